"""What the driver measures of ranks that train beside ranks that generate."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.workers import apart


def test_busy_shares_are_of_the_whole_step_with_its_wait_for_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: rewards are waited for 6 s, training takes 2 s and the generation beside it 3 s, so that
    the step takes 9 s."""
    clock = [100.0]
    monkeypatch.setattr(apart, "now", lambda: clock[0])

    class Generating:
        def rollout(self, tasks: list[Any], call: Any) -> tuple[str, list[Any]]:
            clock[0] += 6.0
            return "batch", []

        def submit(self, *_: Any) -> Future[tuple[dict[str, float], float]]:
            made = Future[tuple[dict[str, float], float]]()
            made.set_result(({}, 3.0))
            return made

        def take_weights(self, *_: Any) -> list[dict[str, float]]:
            return [{}]

    def waits(ahead: Future[Any]) -> Any:
        clock[0] += 1.0  # training has ended a second before
        return ahead.result()

    monkeypatch.setattr(apart, "result_of", waits)
    monkeypatch.setattr(apart.SplitGroup, "write_weights", lambda *_: 0.0)
    ranks: Any = SimpleNamespace(role="policy", num_ranks=1, label="", has_ended=False)
    generating: Any = Generating()
    group = apart.SplitGroup(ranks, has_scores=False, generating=generating, root=Path())
    call: Any = SimpleNamespace(hold=object(), is_refill=False)
    group.rollout([], call)
    group.begin([], call)
    clock[0] += 2.0
    (metrics,) = group.update_weights(1)
    assert metrics["ranks/generating_busy"] == pytest.approx(3 / 9)
    assert metrics["ranks/training_busy"] == pytest.approx(2 / 9)
    refill: Any = SimpleNamespace(hold=object(), is_refill=True)
    group.rollout([], call)
    group.rollout([], refill)  # 6 s more, in which the generating ranks work and the others wait
    group.begin([], call)
    clock[0] += 2.0
    (metrics,) = group.update_weights(2)
    assert metrics["ranks/generating_busy"] == pytest.approx((6 + 3) / 15)
    assert metrics["ranks/training_busy"] == pytest.approx(2 / 15)
