"""Which keys a run reads: one that it never looks at is refused when it is set."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.errors import ConfigError
from tests.support.tiny import build_model, spread, sums
from tests.unit.algos.variants import other_values

pytestmark = pytest.mark.slow

SHOWN = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}"} for n in range(1, 5)]
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 2},
    "ppo": {"algorithm": "ppo"},
    "sft": {"algorithm": "sft"},
    "remax": {"advantage": "remax", "num_generations": 2, "correction": "tis", "policy_loss": "cispo"},
    "kl": {"num_generations": 2, "beta": 0.1, "policy_loss": "clip_cov"},
}
# Tags of sections, which choose a class; the length of the run, which hybrid_rl.config computes; the penalty that
# hybrid_rl.run.checks makes a reward of; and what is looked at if a model is loaded by name or compared with a module.
NOT_COUNTED = {"algorithm.name", "controller.backend", "rollout.engine", "max_steps", "rewards.overlong_buffer"}
NOT_COUNTED |= {"model.trust_remote_code", "model.dtype", "lora.r"}
NOT_COUNTED |= {"rollout.partial", "rollout.async_level"}
# Who copies, writes down and checks a configuration reads all of it.
READERS = ("dataclasses", "copy", "pickle", "cloudpickle", "hybrid_rl.config", "hybrid_rl.run.checks")


def sections(config: Any, prefix: str = "") -> Iterator[tuple[type, str, list[str]]]:
    """All classes of a configuration with their paths and their own keys."""
    names = [item.name for item in dataclasses.fields(config)]
    nested = [name for name in names if dataclasses.is_dataclass(getattr(config, name))]
    yield type(config), prefix, [name for name in names if name not in nested]
    for name in nested:
        yield from sections(getattr(config, name), f"{prefix}{name}.")


@pytest.mark.parametrize("name", RUNS)
def test_a_key_that_a_run_never_reads_is_refused(name: str, make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"prompts_per_step": 2, "max_completion_length": 5, "max_steps": 1, "num_generations": 1, **RUNS[name]}
    config, given = load_config(keys)
    resolve(config, given, has_eval=False)
    leaves: dict[str, tuple[Any, Any]] = {}
    read: set[str] = set()
    for cls, prefix, own in list(sections(config)):
        fields, hints = {item.name: item for item in dataclasses.fields(cls)}, typing.get_type_hints(cls)
        leaves |= {prefix + option: (fields[option], hints[option]) for option in own}

        def reading(self: Any, option: str, own: Any = own, prefix: str = prefix) -> Any:
            if option in own and not inspect.currentframe().f_back.f_globals["__name__"].startswith(READERS):
                read.add(prefix + option)
            return object.__getattribute__(self, option)

        monkeypatch.setattr(cls, "__getattribute__", reading, raising=False)
    rows, rewards = (SHOWN, None) if name == "sft" else (sums(6), spread)
    make_trainer(build_model(), rewards, rows, **keys).fit()
    monkeypatch.undo()
    unread = sorted(leaves.keys() - read - NOT_COUNTED)
    assert "fsdp.reduce_dtype" in unread and len(unread) < 20
    accepted = []
    for path in unread:
        option = path.rpartition(".")[2]
        for value in other_values(*leaves[path]):
            if value == keys.get(option):
                continue
            given_keys = {key: other for key, other in keys.items() if key != option}
            try:
                resolve(*load_config({**given_keys, path: value}), has_eval=False)
                accepted.append((path, value))
            except ConfigError as error:
                assert re.search("would do nothing|does not divide", str(error)), error
    assert not accepted
