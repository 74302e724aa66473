"""CISPO and SAPO with the ratio of a completion: TRL's numbers, and what becomes of single tokens."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos import LossInputs, PolicyObjective
from hybrid_rl.algos.policy_losses import CISPO, SAPO
from hybrid_rl.algos.policy_losses.clip import at_level

# Two completions, the second a token longer; the fourth token is masked. Advantages 1.5 and -0.5.
NEW = [-1.0, -2.0, -0.5, -3.0, -0.3, -1.2, -2.0, -1.0]
OLD = [-1.6, -2.1, -0.9, -1.0, -0.2, -1.9, -1.0, -1.0]
MASK = torch.tensor([True, True, True, False, True, True, True, True])
ROWS = torch.arange(2).repeat_interleave(4)
# What lines of `_compute_loss` of the GRPOTrainer of TRL 1.16.0 give with importance_sampling_level="sequence"
# and, for CISPO, the bound 1.2: the loss of each token, and the gradient of their sum by each ln p. Its temperatures of
# SAPO are float32.
CISPO_LOSS = [1.8, 3.6, 0.9, -0.13572561, -0.54290245, -0.90483742, -0.45241871]
CISPO_GRADIENT = [-1.8] * 3 + [0.45241871] * 4
SAPO_LOSS = [-3.65372305] * 3 + [0.90483925] * 4
SAPO_GRADIENT = [-2.06160263] * 3 + [0.45129133] * 4


def inputs(logprobs: torch.Tensor) -> LossInputs:
    zeros = torch.zeros(8).double()
    advantages = torch.tensor([1.5, -0.5]).double()[ROWS]
    return LossInputs(logprobs, torch.tensor(OLD).double(), advantages, MASK, ROWS, 2, zeros, zeros)


@pytest.mark.parametrize(
    ("record", "losses", "slopes"),
    [
        (CISPO(epsilon_high=0.2, importance_sampling_level="sequence"), CISPO_LOSS, CISPO_GRADIENT),
        (SAPO(importance_sampling_level="sequence"), SAPO_LOSS, SAPO_GRADIENT),
        (SAPO(importance_sampling_level="sequence_token"), SAPO_LOSS, SAPO_GRADIENT),  # the same for equal advantages
    ],
    ids=str,
)
def test_the_numbers_are_those_of_trl(record: PolicyObjective, losses: list[float], slopes: list[float]) -> None:
    logprobs = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    found = record.loss(inputs(logprobs))
    (gradient,) = torch.autograd.grad(torch.where(MASK, found.per_token, 0.0).sum(), logprobs)
    assert found.per_token[MASK].tolist() == pytest.approx(losses, abs=3e-7)
    assert gradient[MASK].tolist() == pytest.approx(slopes, abs=3e-7) and gradient[3] == 0
    mean = math.exp((0.6 + 0.1 + 0.4) / 3)
    assert found.ratio[:3].tolist() == pytest.approx([mean] * 3)


def test_only_the_gate_of_a_completion_mixes_the_advantages_of_its_tokens() -> None:
    assert SAPO(importance_sampling_level="sequence").is_per_completion
    assert not SAPO(importance_sampling_level="sequence_token").is_per_completion
    assert not SAPO().is_per_completion and not CISPO(importance_sampling_level="sequence").is_per_completion


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="importance_sampling_level='word' is unknown; use token, sequence or"):
        at_level(torch.zeros(8), MASK, ROWS, 2, "word")
