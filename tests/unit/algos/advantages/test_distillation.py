"""Distillation: the gradient is that of the reverse KL, exactly, in expectation."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.advantages import Distillation, group_relative_advantages
from hybrid_rl.algos.interface import AdvantageInputs


def reverse_kl(logprobs: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The advantages of the tokens of one sample."""
    rows = torch.zeros(len(logprobs)).long()
    one = torch.zeros(1)
    inputs = AdvantageInputs(
        one, one.long(), rows, mask, torch.zeros(len(rows)), logprobs=logprobs, teacher_logprobs=teacher
    )
    return Distillation().compute(inputs).advantages


def test_by_hand() -> None:
    """p .2 against a teacher's .1: ln(.1 / .2), negative: the policy says it too often."""
    logprobs, teacher = torch.tensor([0.2, 0.2]).log(), torch.tensor([0.1, 0.4]).log()
    found = reverse_kl(logprobs, teacher, torch.tensor([True, True]))
    assert found.tolist() == pytest.approx([-0.693147, 0.693147], abs=1e-6) and found.dtype == torch.float64


def test_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over every token of a vocabulary of 5, weighed with its probability: REINFORCE's gradient = - grad KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (kl_gradient,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    own = logprobs.detach()
    advantages = reverse_kl(own, teacher, torch.ones(5).bool())
    (gradient,) = torch.autograd.grad((own.exp() * advantages * logprobs).sum(), logits)
    torch.testing.assert_close(gradient, -kl_gradient, rtol=0, atol=1e-14)


def test_rewards_beside_the_teacher() -> None:
    """The unscored sample learns from the teacher alone."""
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0, math.nan], dtype=torch.float64),
        groups=torch.zeros(3).long(),
        rows=torch.tensor([0, 0, 1, 2]),
        mask=torch.tensor([True, False, True, True]),
        token_rewards=torch.zeros(4, dtype=torch.float64),
        logprobs=torch.full((4,), -1.0, dtype=torch.float64),
        teacher_logprobs=torch.tensor([-1.5, -9.0, -0.5, -2.0], dtype=torch.float64),
    )
    assert Distillation().compute(inputs).advantages.tolist() == [-0.5, 0.0, 0.5, -1.0]
    won, lost, _ = group_relative_advantages(inputs.rewards, inputs.groups).tolist()
    mixed = Distillation(group_advantage_coef=0.1).compute(inputs).advantages.tolist()
    assert mixed == pytest.approx([-0.5 + 0.1 * won, 0.0, 0.5 + 0.1 * lost, -1.0], rel=1e-14)


def test_rewards_are_needed_only_where_they_count() -> None:
    assert not Distillation().needs_rewards and Distillation().min_generations == 1
    mixed = Distillation(group_advantage_coef=0.1)
    assert mixed.needs_rewards and mixed.min_generations == 2
