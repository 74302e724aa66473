"""The weight of the entropy bonus over a run: fixed, or following the measured entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybrid_rl.algos.masked import next_entropy_coef
from hybrid_rl.config.algorithm_keys import AdaptiveEntropyConfig, EntropyConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.metrics.metric_sums import MetricSums


class EntropyWeight:
    """entropy_coef, the same on every rank. options: how it changes; coef: at the start; is_subset: whether only the
    tokens of the highest entropy are paid for it."""

    def __init__(self, options: EntropyConfig, coef: float, *, is_subset: bool) -> None:
        self._options = options if isinstance(options, AdaptiveEntropyConfig) else None
        self._is_subset = is_subset
        self._coef = coef
        self._measured = math.inf  # in the last optimizer step; unknown before the first one, so nothing is paid

    def reconfigure(self, coef: float) -> None:
        """Go on with another weight; an adaptive one starts again from there."""
        self._coef = coef

    @property
    def applied(self) -> float:
        """The weight in the next optimizer step."""
        return self._coef if self._options is None or self._measured <= self._options.entropy_target else 0.0

    def follow(self, sums: MetricSums, context: RankContext) -> MetricSums:
        """Move by the mean entropy, in an optimizer step, of the tokens that are paid for it; its metrics. Collective.
        sums: of the step on this rank. A step without such tokens says nothing of the entropy, so nothing moves."""
        metrics = MetricSums()
        if self._options is None:
            return metrics
        total, count = sums.parts("entropy")
        if self._is_subset:
            total, count = sums.parts("top_entropy/part_of_entropy")[0], sums.parts("top_entropy/tokens")[0]
        total, count = (sum(part) for part in zip(*context.data_gather((total, count)), strict=True))
        if count:
            self._measured = total / count
            self._coef = next_entropy_coef(
                self._coef,
                self._measured,
                target=self._options.entropy_target,
                low=self._options.entropy_coef_min,
                high=self._options.entropy_coef_max,
                delta=self._options.entropy_coef_delta,
            )
        if context.data_rank == 0:
            metrics.mean("entropy_coef", self._coef, 1)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        if self._options is None:
            return {}
        return {"entropy_coef": self._coef, "entropy": None if math.isinf(self._measured) else self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`: an adaptive weight from where it was, a fixed one is the configuration's."""
        if self._options is not None and "entropy_coef" in state:
            self._coef = float(state["entropy_coef"])
            self._measured = math.inf if state["entropy"] is None else float(state["entropy"])
