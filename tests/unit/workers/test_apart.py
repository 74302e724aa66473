"""What the driver measures of ranks that train beside ranks that generate."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.workers import apart


def test_busy_shares_are_of_the_whole_step_with_its_wait_for_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: rewards are waited for 6 s, training takes 2 s and the generation beside it 3 s, so that
    the step takes 9 s."""
    clock = [100.0]
    monkeypatch.setattr(apart, "now", lambda: clock[0])

    class Ranks:
        """They answer calls at once, by that clock: generation in 6 s, whoever waits, and beside training in 3 s."""

        role, num_ranks, label, has_ended = "rollout", 1, "", False

        def call(self, method: Any, *_: Any) -> Any:
            if method is apart.RolloutWorker.rollout:
                clock[0] += 6.0
            ahead = [(MetricSums(), [], 3.0)]
            answers = {"rollout": ("batch", []), "go_ahead": ahead, "write_weights": 0.0, "take_weights": [{}]}
            return answers[method.__name__]

        def close(self) -> None: ...

    def waits(ahead: Future[Any]) -> Any:
        clock[0] += 1.0  # training has ended a second before
        return ahead.result()

    monkeypatch.setattr(apart, "result_of", waits)
    group = apart.RolloutGroup(Ranks(), Ranks(), has_scores=False, root=Path())
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
