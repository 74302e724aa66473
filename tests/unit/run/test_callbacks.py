"""The hooks that the trainer calls are the hooks that a callback has."""

from __future__ import annotations

import ast
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hybrid_rl
from hybrid_rl import Callback
from hybrid_rl.errors import HybridRLError, RewardError
from tests.support.inside.trainers import log_of
from tests.support.tiny import sums

HOOKS = {name: hook for name, hook in vars(Callback).items() if name.startswith("on_")}


def notified() -> dict[str, int]:
    """Hook to number of arguments, as `_notify("on_...", ...)` calls in the trainer have them; + the trainer."""
    files = (Path(hybrid_rl.__file__).parent / "run").glob("*.py")
    nodes = [node for file in sorted(files) for node in ast.walk(ast.parse(file.read_text()))]
    return {
        node.args[0].value: len(node.args)
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_notify"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_every_hook_is_called_with_its_arguments() -> None:
    assert notified() == {name: len(inspect.signature(hook).parameters) - 1 for name, hook in HOOKS.items()}


class Ends(Callback):
    """Raises at the end of fit(), and in a step if it is asked to."""

    def __init__(self, at_step: type[BaseException] | None) -> None:
        self._at_step = at_step

    def on_step_end(self, trainer: Any, step: int, batch: Any, metrics: Any) -> None:
        if self._at_step is not None:
            raise self._at_step("of the step")

    def on_fit_end(self, trainer: Any) -> None:
        raise ValueError("of the end")


@pytest.mark.parametrize("first", [None, KeyboardInterrupt, OSError])
def test_what_on_fit_end_raises_comes_after_the_log_and_what_ended_fit(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, first: type[BaseException] | None
) -> None:
    stopped = []
    trainer = make_trainer(callbacks=[Ends(first)], max_steps=1)
    stop = log_of(trainer).stop
    monkeypatch.setattr(log_of(trainer), "stop", lambda lost: (stopped.append(lost), stop(lost)))
    with pytest.raises(first or ValueError, match="of the step" if first else "of the end") as raised:
        trainer.fit()
    assert stopped == [[]]
    assert getattr(raised.value, "__notes__", []) == (["then ValueError: of the end"] if first else [])


class Closes(Callback):
    """Tries to close the Trainer in every hook, and ends the run after step 2 in the way that the error names."""

    def __init__(self) -> None:
        self.refused: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        return partial(self.close, name) if name in HOOKS else super().__getattribute__(name)

    def close(self, hook: str, trainer: Any, *arguments: Any) -> None:
        with pytest.raises(HybridRLError, match=r"close\(\) was called while fit\(\) runs: .*call trainer.stop\(\)"):
            trainer.close()
        self.refused.add(hook)
        if hook == "on_step_end" and arguments[0] == 2:
            trainer.stop()


def test_nobody_closes_a_trainer_at_work(make_trainer: Any) -> None:
    """What is due at the end of a run is done all the same."""
    closes = Closes()
    trainer = make_trainer(callbacks=[closes], eval_dataset=sums(2), max_steps=5, save_steps=2)
    trainer.fit()
    assert trainer.global_step == 2 and closes.refused == set(HOOKS)
    trainer.close()
    with pytest.raises(HybridRLError, match="this Trainer is closed"):
        trainer.step()


def test_a_reward_that_closes_its_trainer_fails(make_trainer: Any) -> None:
    made: list[Any] = []

    def closes(completions: Any, **_: Any) -> list[float]:
        made[0].close()
        return [0.0] * len(completions)

    made.append(make_trainer(reward_funcs=closes, max_steps=1))
    with pytest.raises(RewardError, match=r"close\(\) was called while step\(\) runs"):
        made[0].step()
