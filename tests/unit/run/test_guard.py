"""The guard of a training step: what an error or Ctrl-C leaves, before the update, in it and after it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hybrid_rl.run.guard import StepGuard


class Sampler:
    """Counts prompts."""

    def __init__(self) -> None:
        self.position = 5

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make() -> tuple[StepGuard, Any]:
    sampler: Any = Sampler()
    return StepGuard(sampler), sampler


def test_a_whole_step_keeps_what_it_took() -> None:
    guard, sampler = make()
    with guard.step():
        sampler.position = 9
        assert guard.is_stepping
        guard.commit()
        assert guard.is_torn and guard.data_position == {"position": 5}
        guard.complete()
        assert not guard.is_torn and not guard.is_stepping
    assert guard.data_position == {"position": 9} == sampler.state_dict()


@pytest.mark.parametrize("commits", [False, True])
def test_a_step_that_breaks_off_gives_its_prompts_back(commits: bool) -> None:
    guard, sampler = make()
    with pytest.raises(ValueError), guard.step():
        sampler.position = 9
        if commits:
            guard.commit()
        raise ValueError
    assert sampler.position == 5 and guard.is_torn is commits and not guard.is_stepping


def test_what_fails_after_a_whole_step_takes_nothing_back() -> None:
    guard, sampler = make()
    with pytest.raises(ValueError), guard.step():
        sampler.position = 9
        guard.complete()
        raise ValueError
    assert sampler.position == 9 and not guard.is_torn


def test_ctrl_c_comes_at_once_before_the_update_and_at_the_end_after_it() -> None:
    guard, sampler = make()
    done = []
    with pytest.raises(KeyboardInterrupt), guard.step():
        sampler.position = 9
        signal.raise_signal(signal.SIGINT)
        done.append("not reached")
    assert done == [] and sampler.position == 5
    with pytest.raises(KeyboardInterrupt), guard.step():
        sampler.position = 9
        guard.commit()
        signal.raise_signal(signal.SIGINT)
        guard.complete()
        done.append("logged")
    assert done == ["logged"] and sampler.position == 9 and not guard.is_torn
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_in_the_update_leaves_the_weights_torn() -> None:
    guard, _ = make()
    with pytest.raises(KeyboardInterrupt), guard.step():
        guard.commit()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        guard.complete()
    assert guard.is_torn
