"""The critic's loss and how much of the returns it explains. Aggregation is a matter of token weights (masked.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Compute 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), per token.

    The value loss that comes with PPO's implementations (PPO2 of OpenAI Baselines; arXiv:2005.12729, section 3); PPO's
    paper has the plain square (arXiv:1707.06347, eq. 9), which clip=None gives.

    values: float [T], with gradient; old_values, returns: float [T]; clip: above 0. Returns float [T], to be summed
    with token weights that are fixed from global counts: a mean of each micro-batch would grow or shrink with their
    number.
    """
    plain, bounded = _squares(values, old_values, returns, clip)
    # torch.where, not torch.maximum: at a tie the gradient is the unclipped one, whole.
    return 0.5 * torch.where(bounded > plain, bounded, plain)


def value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return the tokens whose gradient `clipped_value_loss` stops, bool [T]."""
    plain, bounded = _squares(values.detach(), old_values, returns, clip)
    return bounded > plain


def _squares(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    check_columns(values=values, old_values=old_values, returns=returns)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} would stop the critic; use a number above 0, or None for no clip")
    old_values, returns = old_values.detach(), returns.detach()
    plain = (values - returns) ** 2
    if clip is None:
        return plain, plain
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return plain, (bounded - returns) ** 2


@dataclass(frozen=True)
class ValueFit:
    """Statistics of values and returns that tell how well one predicts the other; those of micro-batches and ranks add
    up to those of the whole.

    count of tokens; means and sums of squared deviations from them, of the returns R and the errors R - V.
    """

    count: int = 0
    return_mean: float = 0.0
    return_square: float = 0.0
    error_mean: float = 0.0
    error_square: float = 0.0

    @classmethod
    def of(cls, values: Tensor, returns: Tensor, mask: Tensor) -> ValueFit:
        """Of the unmasked tokens. values, returns: float [T]; mask: bool [T]."""
        check_columns(values=values, returns=returns, mask=mask)
        count = int(mask.sum())
        if not count:
            return cls()
        chosen = returns.detach()[mask].double()
        errors = chosen - values.detach()[mask].double()
        return_mean, error_mean = chosen.mean(), errors.mean()
        return cls(
            count,
            float(return_mean),
            float(((chosen - return_mean) ** 2).sum()),
            float(error_mean),
            float(((errors - error_mean) ** 2).sum()),
        )

    def __add__(self, other: ValueFit) -> ValueFit:
        """Combine both (T. Chan et al., "Algorithms for computing the sample variance", 1983)."""
        count = self.count + other.count
        if not count:
            return ValueFit()
        share = other.count / count
        return_gap, error_gap = other.return_mean - self.return_mean, other.error_mean - self.error_mean
        return ValueFit(
            count,
            self.return_mean + return_gap * share,
            self.return_square + other.return_square + return_gap**2 * self.count * share,
            self.error_mean + error_gap * share,
            self.error_square + other.error_square + error_gap**2 * self.count * share,
        )

    @property
    def explained_variance(self) -> float:
        """1 - Var(R - V) / Var(R): 1 for a perfect critic up to a constant, 0 for a constant one, below 0 for one that
        is worse than that. NaN if the returns are all equal."""
        return 1 - self.error_square / self.return_square if self.return_square > 0 else float("nan")
