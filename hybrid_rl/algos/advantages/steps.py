"""Tokens as steps of an episode: rewards, next values and sums over what follows, without padding.

Only tokens that the policy made are steps. What is between them (tool results, later prompts) is the environment's
answer: the next step after a token is the next token that the policy made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybrid_rl.algos.columns import check_ascending, check_columns, check_rewards
from hybrid_rl.algos.masked import row_sum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """K steps of N samples, sample after sample.

    place: int64 [K], the index of each among the T tokens. rows: int64 [K], its sample. lengths: int64 [N]. position:
    int64 [K], its number within the sample, from 0. num_tokens: T.
    """

    place: Tensor
    rows: Tensor
    lengths: Tensor
    position: Tensor
    num_tokens: int

    @classmethod
    def of(cls, mask: Tensor, rows: Tensor, num_rows: int) -> Steps:
        """Find the steps. mask: bool [T], True if the policy made the token; rows: int64 [T], ascending, the sample of
        each."""
        place = torch.nonzero(mask)[:, 0]
        kept = rows[place]
        lengths = torch.bincount(kept, minlength=num_rows)
        starts = lengths.cumsum(0) - lengths
        return cls(place, kept, lengths, torch.arange(len(place), device=rows.device) - starts[kept], len(mask))

    @property
    def is_last(self) -> Tensor:
        """bool [K]: the last step of its sample."""
        return self.position == self.lengths[self.rows] - 1

    def take(self, values: Tensor) -> Tensor:
        """Return `values` [T] at the steps, float64 [K]."""
        return values[self.place].to(torch.float64)

    def spread(self, values: Tensor) -> Tensor:
        """Put `values` [K] at their tokens, 0 elsewhere: float64 [T]."""
        return values.new_zeros(self.num_tokens, dtype=torch.float64).index_copy_(0, self.place, values.double())

    def next(self, values: Tensor) -> Tensor:
        """Return `values` [K] of the next step; 0 at the last one of a sample: an episode that ends has no value to
        come."""
        shifted = torch.cat([values[1:], values.new_zeros(min(len(values), 1))])
        return torch.where(self.is_last, torch.zeros_like(values), shifted)

    def discounted(self, terms: Tensor, decay: Tensor | float) -> Tensor:
        """Compute y_t = terms_t + decay_t * y_{t+1}, with y = 0 after the last step: float64 [K].

        terms: float64 [K]; decay: one number, or float64 [K]. A loop over steps counted from the end, all samples in
        parallel. Samples are ordered from the longest to the shortest there, so that those that reach a step come
        first.
        """
        lane = self.lengths.argsort(descending=True, stable=True).argsort()
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        from_end = self.lengths[self.rows] - 1 - self.position
        widths = torch.bincount(from_end, minlength=longest)
        order = (widths.cumsum(0) - widths)[from_end] + lane[self.rows]
        packed, decays, result = torch.empty_like(terms), torch.empty_like(terms), torch.empty_like(terms)
        packed[order] = terms
        decays[order] = torch.as_tensor(decay, dtype=terms.dtype, device=terms.device).expand_as(terms)
        carry, begin = terms.new_zeros(len(self.lengths)), 0
        for width in widths.tolist():
            carry = torch.addcmul(packed[begin : begin + width], decays[begin : begin + width], carry[:width])
            result[begin : begin + width] = carry
            begin += width
        return result[order]

    def accumulated(self, terms: Tensor) -> Tensor:
        """Sum of terms [K] over the steps up to and with each one, float64 [K]."""
        # Subtracted from the sum of the sample: a running sum over all samples would carry their rounding along.
        ahead = self.discounted(terms, 1.0)
        sums = terms.new_zeros(len(self.lengths)).index_add_(0, self.rows, terms)
        return sums[self.rows] - self.next(ahead)


def step_rewards(rewards: Tensor, token_rewards: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Compute the reward of each step, float64 [T], 0 where masked.

    rewards: float [N], the total of a sample, NaN if it could not be scored; token_rewards: float [T], the part of
    it that belongs to single tokens; mask: bool [T]; rows: int64 [T], ascending. The rest of the total belongs to the
    last step. A reward at a token that the policy did not make belongs to the step before it, which led there;
    before the first step, to none. Samples that were not scored have no rewards. Raises ValueError for infinite
    rewards, and for rewards of tokens of a scored sample that are not numbers.
    """
    check_rewards(rewards=rewards)
    check_columns(rows=rows, mask=mask, token_rewards=token_rewards)
    check_ascending(rows, len(rewards))
    steps = Steps.of(mask, rows, len(rewards))
    scored = ~rewards.isnan()
    dense = torch.where(scored[rows], token_rewards.double(), torch.zeros_like(token_rewards, dtype=torch.float64))
    if not bool(dense.isfinite().all()):
        token = int((~dense.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"token_rewards has {float(dense[token])} at token {token}, of sample {int(rows[token])}; give finite "
            "numbers"
        )
    outcome = torch.where(scored, rewards.double() - row_sum(dense, rows, len(rewards)), 0.0)
    earned = torch.where(steps.is_last, outcome[steps.rows], 0.0)
    step = mask.cumsum(0) - 1  # of each token: the last step at or before it, perhaps of an earlier sample
    led = torch.nonzero(step >= 0)[:, 0]
    led = led[steps.rows[step[led]] == rows[led]]
    return steps.spread(earned.index_add(0, step[led], dense[led]))
