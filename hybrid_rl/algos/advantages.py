"""From rewards to advantages."""

from __future__ import annotations

import torch
from torch import Tensor

STD_FLOOR = 1e-4  # as in TRL, so that the same batch gives the same numbers; rewards are of the order of 1


def group_relative_advantages(rewards: Tensor, groups: Tensor, *, scale_rewards: str = "group") -> Tensor:
    """GRPO: each reward against the mean of its group, (r - mean) / (std + 1e-4).

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. scale_rewards="none" leaves the division out (Dr. GRPO,
    arXiv:2503.20783); "batch" divides by the standard deviation over all samples. Standard deviations are those of a
    sample (n - 1), as in TRL.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]. Returns float64 [N]: 0 for unscored
    samples, for a group whose rewards are all equal (exactly, not up to rounding), and for one scored sample alone.
    """
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards and groups must be [N], not {tuple(rewards.shape)} and {tuple(groups.shape)}")
    if scale_rewards not in ("group", "batch", "none"):
        raise ValueError(f"scale_rewards={scale_rewards!r} is unknown; use group, batch or none")
    rewards = rewards.to(torch.float64)
    scored = ~rewards.isnan()
    _, index = groups.unique(return_inverse=True)
    num_groups = int(index.max()) + 1 if index.numel() else 0
    mean, std, spread = _group_statistics(rewards, scored, index, num_groups)
    # Where all rewards of a group are equal, rounding in the mean must not become a signal.
    centred = torch.where(scored & (spread > 0)[index], rewards - mean[index], torch.zeros_like(rewards))
    if scale_rewards == "group":
        return centred / (std[index] + STD_FLOOR)
    if scale_rewards == "batch":
        batch_std = rewards[scored].std() if int(scored.sum()) > 1 else rewards.new_zeros(())
        return centred / (batch_std + STD_FLOOR)
    return centred


def group_has_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for each group (bool [G], groups in ascending order of their id) with at least two different rewards."""
    _, index = groups.unique(return_inverse=True)
    num_groups = int(index.max()) + 1 if index.numel() else 0
    _, _, spread = _group_statistics(rewards.to(torch.float64), ~rewards.isnan(), index, num_groups)
    return spread > 0


def _group_statistics(rewards: Tensor, scored: Tensor, index: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sample standard deviation and max - min of the scored rewards of each group, [num_groups]."""
    zeros = rewards.new_zeros(num_groups)
    filled = torch.where(scored, rewards, torch.zeros_like(rewards))
    count = zeros.index_add(0, index, scored.to(rewards.dtype))
    mean = zeros.index_add(0, index, filled) / count.clamp(min=1)
    square = torch.where(scored, (rewards - mean[index]) ** 2, torch.zeros_like(rewards))
    std = (zeros.index_add(0, index, square) / (count - 1).clamp(min=1)).sqrt()
    low, high = torch.full_like(zeros, torch.inf), torch.full_like(zeros, -torch.inf)
    low = low.scatter_reduce(0, index, torch.where(scored, rewards, torch.inf), "amin")
    high = high.scatter_reduce(0, index, torch.where(scored, rewards, -torch.inf), "amax")
    return mean, std, torch.where(count > 1, high - low, zeros)
