"""A curriculum by success rate: prompts that the policy solves sometimes are drawn most often.

The gradient of a group whose samples are all right, or all wrong, is 0 (DAPO, arXiv:2503.14476, samples such groups
again), and the signal-to-noise ratio of a policy gradient is at most 4 N p (1 - p) for N samples of a prompt that is
solved with probability p (SPEED-RL, arXiv:2506.09016, theorem 3.1). So a prompt is drawn in proportion to 4 p (1 - p),
but at least to a floor: the policy changes, and what is never drawn is never measured again. Neither paper draws in
this way: DAPO drops groups after their rollout, SPEED-RL screens prompts with a first small one. `max_refills` is the
former; a curriculum needs no rollouts of its own.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.data.source import SizedSource
from hybrid_rl.errors import DataError

_STATE_VERSION = 1
_MEMORY = 0.5  # weight of what was measured before, at each new measurement


class CurriculumSampler(PromptSampler):
    """Draws prompts by their measured success rates; those not measured yet count as solved half of the time.

    The prompts of one `take` differ (unless it asks for more than there are): they are drawn without replacement, by
    the method of Efraimidis and Spirakis (2006). A draw depends only on the seed, the number of draws before, and the
    rates. An epoch is as many draws as there are prompts, which need not all come.
    """

    def __init__(self, source: SizedSource, *, seed: int, floor: float) -> None:
        """
        Args:
            source: where the prompts come from.
            seed: of the draws.
            floor: the smallest chance of a prompt, relative to one that is solved half of the time; in (0, 1].
        """
        super().__init__(source, shuffle=True, seed=seed)
        self._sized, self._floor = source, floor
        self._num_takes = self._num_drawn = 0
        self._rates: npt.NDArray[np.float32] = np.full(len(source), np.nan, dtype=np.float32)

    def take(self, num_prompts: int) -> list[PromptRow]:
        """Return the next prompts."""
        takes, positions = self._num_takes, list[int]()
        while len(positions) < num_prompts:
            positions += self._order_of(takes)[: num_prompts - len(positions)].tolist()
            takes += 1
        rows = [self._sized[position] for position in positions]
        self._num_takes, self._num_drawn = takes, self._num_drawn + num_prompts
        return rows

    @property
    def epoch(self) -> float:
        """Prompts drawn, in units of the dataset."""
        return self._num_drawn / len(self._sized)

    def observe(self, rows: Sequence[PromptRow], rates: Sequence[float]) -> None:
        """Note measured success rates. rates: of these rows, 0 to 1; NaN = not measured.

        Raises DataError for a rate outside of 0 to 1."""
        for row, rate in zip(rows, rates, strict=True):
            if math.isnan(rate):
                continue
            if not 0 <= rate <= 1:
                raise DataError(
                    f"row {row.index}: the first reward function gives {rate:g} on average, which is no success rate; "
                    "set success_reward to the smallest value that is a success, or leave out curriculum_floor"
                )
            position = self._sized.position(row.index)
            before = self._rates[position]
            self._rates[position] = rate if np.isnan(before) else _MEMORY * before + (1 - _MEMORY) * rate

    def metrics(self) -> dict[str, float]:
        """Return the share of prompts that were measured, their mean rate, and the share never or always solved."""
        known = self._rates[~np.isnan(self._rates)]
        metrics = {"curriculum/measured": len(known) / len(self._rates)}
        if len(known):
            metrics["curriculum/success_rate"] = float(known.mean(dtype=np.float64))
            metrics["curriculum/never_solved"] = float((known == 0).mean())
            metrics["curriculum/always_solved"] = float((known == 1).mean())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws and all rates (float32, in base64), as plain JSON values."""
        return {
            "version": _STATE_VERSION,
            "num_takes": self._num_takes,
            "num_drawn": self._num_drawn,
            "rates": base64.b64encode(self._rates.astype("<f4").tobytes()).decode(),
            "floor": self._floor,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken; with another floor from there on, if that was changed.

        Raises:
            DataError: the state is damaged, or belongs to other data or another seed.
        """
        if state.get("version") != _STATE_VERSION or "rates" not in state:
            raise DataError(
                "the saved data position has no success rates, which curriculum_floor needs; resume with the settings "
                "of then, or start a new run"
            )
        self._check_identity(state)
        rates = np.frombuffer(base64.b64decode(state["rates"]), dtype="<f4")
        if len(rates) != len(self._rates):
            raise DataError(f"the saved data position has {len(rates)} success rates for {len(self._rates)} prompts")
        self._num_takes, self._num_drawn = state["num_takes"], state["num_drawn"]
        self._rates = rates.astype(np.float32)

    def _order_of(self, take: int) -> npt.NDArray[np.int64]:
        """All positions in the order in which they would be drawn."""
        rates = self._rates.astype(np.float64)
        weights = np.where(np.isnan(rates), 1.0, np.maximum(self._floor, 4 * rates * (1 - rates)))
        # Raw bits, because numpy promises that they never change. The middle of each interval is never 0.
        raw = np.random.PCG64([self._seed, take, len(rates)]).random_raw(len(rates))
        uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return np.argsort(-np.log(uniform) / weights, kind="stable")


def make_sampler(source: Any, *, shuffle: bool | None, seed: int, floor: float | None = None) -> PromptSampler:
    """Return the sampler of one dataset. floor: of the curriculum; None = every prompt equally often.

    Raises DataError if a curriculum cannot work with this dataset."""
    if floor is None:
        return PromptSampler(source, shuffle=shuffle, seed=seed)
    if not isinstance(source, SizedSource):
        raise DataError(
            "curriculum_floor draws prompts again by their success rate, but the dataset is a stream; give one of "
            "known size, or leave it out"
        )
    if shuffle is False:
        raise DataError(
            "curriculum_floor draws prompts by chance, but shuffle=false asks for their order; leave one out"
        )
    return CurriculumSampler(source, seed=seed, floor=floor)
