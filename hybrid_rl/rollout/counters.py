"""What is counted while a batch is collected: failures, timings, how full the engine was, and what functions logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hybrid_rl.batch import AnyBatch, SampleKey, Trajectories
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.errors import AgentError
from hybrid_rl.metrics.metric_sums import MetricSums, Timings
from hybrid_rl.rewards import RewardFailure, check_failure_share, check_not_ended, format_failures
from hybrid_rl.rollout.call import RolloutCall, RolloutReport
from hybrid_rl.rollout.lengths import length_metrics
from hybrid_rl.rollout.time_saved import SecondsWon

logger = logging.getLogger("hybrid_rl")

GREEDY = "/greedy"  # ends the purpose of a baseline's rollout


@dataclass
class Collected:
    """A batch with the timings and metrics of its collection. timings: of the slowest rank; metrics: of the batch, and
    under `collect/` of everything that was rolled out for it; logged: means of what reward functions gave to
    log_metric."""

    batch: AnyBatch
    timings: Timings
    metrics: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


class Tally:
    """The failures, timings and logged numbers of one collection so far. first_id: its smallest trajectory id; reports
    count from there. won: what the engine steps of the run cost so far; None = these are not to count."""

    def __init__(self, max_failure_share: float, first_id: int, won: SecondsWon | None = None) -> None:
        self._max_failure_share = max_failure_share
        self._first_id = first_id
        self._num_samples = self._num_failed = self._num_retried = 0
        self._failures: list[RewardFailure] = []
        self._timings = Timings()
        self._logged, self._metrics, self._left = MetricSums(), MetricSums(), MetricSums()
        self._uses: list[SlotUse] = []
        self._won, self._seconds_won = won, list[float | None]()

    def add(self, batch: AnyBatch, reports: Sequence[RolloutReport], call: RolloutCall) -> None:
        """Count a rollout. Raises RewardError if too many of all samples so far have no reward, and the exception with
        which a reward function ends the run."""
        for name in dict.fromkeys(("rollout", "reward", *(name for report in reports for name in report.seconds))):
            self._timings.add(name, max(report.seconds.get(name, 0.0) for report in reports))
        if batch.num_samples:  # held trajectories are older than the call
            self._first_id = min(self._first_id, int(batch["trajectory"].min()))
        uses = [report.use for report in reports]
        self._uses.append(SlotUse.of_ranks(uses))
        self._seconds_won.append(None if self._won is None else self._won.of(uses, batch))
        if not call.purpose.endswith(GREEDY):  # metrics, and what functions log, are of the policy's own samples
            self._left = MetricSums()
            for report in reports:
                self._metrics.merge(report.metrics)
                self._left.merge(report.left)
                self._logged.merge(report.logged)
        failures = [
            replace(failure, key=SampleKey(failure.key.trajectory - self._first_id, failure.key.turn))
            for report in reports
            for failure in report.failures
        ]
        check_not_ended(failures, call.state.global_step)
        if not call.is_scored:
            if failures and len(failures) == len(Trajectories.of(batch).first):
                raise AgentError(
                    f"{call.purpose}: every trajectory failed; rows may lack columns that the agent or its environment "
                    f"needs\n{format_failures(failures)}"
                )
            if failures:
                logger.warning("%s: %s", call.purpose, format_failures(failures))
            return
        self._num_retried += sum(number for report in reports for number, _ in report.retried.values())
        rewards = batch["rewards"][Trajectories.of(batch).first]
        num_failed = int(rewards.isnan().sum())
        self._failures += failures
        self._num_failed += num_failed
        self._num_samples += len(rewards)
        check_failure_share(
            self._num_failed, self._num_samples, self._failures, self._max_failure_share, call.state.global_step
        )
        if failures:
            logger.warning(
                "%s: %s no reward and %s masked\n%s",
                *(call.purpose, "1 sample has" if num_failed == 1 else f"{num_failed} samples have"),
                *("is" if num_failed == 1 else "are", format_failures(failures)),
            )

    def use(self) -> dict[str, float]:
        """Return how full the engine was, and what holding has won."""
        won = [seconds for seconds in self._seconds_won if seconds is not None]
        is_known = won and len(won) == len(self._seconds_won)
        return use_metrics(self._uses) | ({"timing/won": sum(won)} if is_known else {})

    def collected(self, batch: AnyBatch, metrics: dict[str, float]) -> Collected:
        """Return the batch with all timings and metrics."""
        if "rewards/num_failed" in metrics:
            metrics = metrics | {"rewards/num_retried": float(self._num_retried)}
        metrics = length_metrics(batch) | self._metrics.result() | self._left.result() | metrics
        return Collected(batch, self._timings, metrics, self._logged.result())


def use_metrics(uses: Sequence[SlotUse]) -> dict[str, float]:
    """Return the engine's steps in some rollouts, the share of its slots that decoded nothing, and what became of
    drafts, if there were any; empty if they were not counted. Of each rollout as many slots count as were used at once;
    a rank that has ended waits for the others."""
    num_steps = sum(use.num_steps for use in uses)
    metrics = {"engine/steps": float(num_steps)} if num_steps else {}
    if num_places := sum(use.num_steps * use.num_slots for use in uses):
        metrics["engine/idle_share"] = 1 - sum(use.num_tokens for use in uses) / num_places
    if num_drafted := sum(use.num_drafted for use in uses):
        num_accepted = sum(use.num_accepted for use in uses)
        metrics |= {"engine/draft_tokens": float(num_drafted), "engine/accepted_tokens": float(num_accepted)}
        metrics["engine/tokens_per_pass"] = 1 + num_accepted / sum(use.num_tokens for use in uses)
    return metrics
