"""The weight of the KL penalty over a run: fixed, or following the measured KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_rl.algos import KLInLoss, KLInReward, KLTerm, kl_estimate
from hybrid_rl.algos.kl import next_beta
from hybrid_rl.batch import Batch, Trajectories
from hybrid_rl.controller import RankContext
from hybrid_rl.metrics.metric_sums import MetricSums


class KLWeight:
    """beta, the same on every rank."""

    def __init__(self, term: KLTerm) -> None:
        self._term = term if isinstance(term, (KLInLoss, KLInReward)) else None
        self.beta = 0.0 if self._term is None else self._term.beta

    def reconfigure(self, term: KLTerm) -> None:
        """Go on with another beta; an adaptive one starts again from there."""
        if self._term is not None and isinstance(term, (KLInLoss, KLInReward)) and term != self._term:
            self._term, self.beta = term, term.beta

    def follow(self, batch: Batch, sums: MetricSums, context: RankContext) -> MetricSums:
        """Move beta by the mean KL of a trajectory in a training step; its metrics. Collective.

        batch: this rank's samples; sums: metrics of the update, which hold the KL if it is in the loss. The
        metric `kl` is the mean of a token.
        """
        metrics = MetricSums()
        if self._term is None:
            return metrics
        if isinstance(self._term, KLInReward):
            mask = batch["completion_mask"].values
            old, reference = batch["old_logprobs"].values[mask], batch["ref_logprobs"].values[mask]
            estimates = kl_estimate(old.double(), reference.double(), self._term.kl_estimator)
            metrics.mean("kl", float(estimates.sum()), len(estimates))
        if context.data_rank == 0:
            metrics.mean("kl_beta", self.beta, 1)
        if self._term.kl_target is not None:
            measured = metrics if isinstance(self._term, KLInReward) else sums
            num_tokens = int(batch["completion_mask"].values.sum())
            everywhere = context.data_gather(
                (*measured.parts("kl"), num_tokens, Trajectories.of(batch).num_trajectories)
            )
            total, count, num_tokens, num_trajectories = (sum(part) for part in zip(*everywhere, strict=True))
            if count:
                self.beta = next_beta(
                    self.beta,
                    total / count * num_tokens / num_trajectories,  # of an episode, as in the paper
                    target=self._term.kl_target,
                    horizon=self._term.kl_horizon,
                    num_samples=int(num_trajectories),
                )
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`: an adaptive weight from where it was, a fixed one is the configuration's."""
        if self._term is not None and self._term.kl_target is not None:
            self.beta = float(state["beta"])
