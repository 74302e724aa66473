"""Advantages of 1 and 0: what is accepted, and what is not."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.advantages import SFT, Rejection
from hybrid_rl.algos.interface import AdvantageInputs
from hybrid_rl.errors import ConfigError

NAN = math.nan


def test_sft_learns_every_token_of_the_policy() -> None:
    """Without a reward too."""
    mask = torch.tensor([True, False, True, True])
    inputs = AdvantageInputs(
        rewards=torch.tensor([NAN, 0.0]),
        groups=torch.tensor([0, 1]),
        rows=torch.tensor([0, 0, 0, 1]),
        mask=mask,
        token_rewards=torch.zeros(4),
    )
    found = SFT().compute(inputs)
    assert found.advantages.tolist() == [1.0, 0.0, 1.0, 1.0] and found.advantages.dtype == torch.float64
    assert not SFT().needs_rewards


def test_by_hand() -> None:
    rewards, groups = torch.tensor([0.2, 0.9, 0.9, NAN, 0.5, 0.1]), torch.tensor([7, 7, 7, 7, 2, 2])

    def accepted(threshold: float | None, num_best: int | None) -> list[int]:
        found = Rejection(reward_threshold=threshold, num_best=num_best).of_samples(rewards, groups)
        return torch.nonzero(found)[:, 0].tolist()

    assert accepted(None, 1) == [1, 4]  # of equal ones the first
    assert accepted(None, 2) == [1, 2, 4, 5]
    assert accepted(0.5, None) == [1, 2, 4]  # the threshold itself is accepted
    assert accepted(0.6, 1) == [1]
    assert accepted(0.2, 3) == [0, 1, 2, 4]


def test_tokens_of_accepted_samples_have_advantage_one() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([0.0, 1.0, NAN]),
        groups=torch.zeros(3).long(),
        rows=torch.tensor([0, 1, 1, 1, 2]),
        mask=torch.tensor([True, True, False, True, True]),
        token_rewards=torch.zeros(5),
    )
    assert Rejection().compute(inputs).advantages.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_accepting_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="advantage=sft"):
        Rejection(reward_threshold=None, num_best=None)
