"""Packed samples to try policy losses on, in float64, and what an objective makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algos import LossInputs, PolicyLoss, PolicyObjective

LENGTHS = (3, 1, 5, 4, 2, 6)
GROUPS = torch.tensor([7, 7, 7, 2, 2, 2])
ROWS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
WILD = 6  # a masked token in the middle of the third sample whose ratio overflows
MASK = torch.tensor([True] * 6 + [False] + [True] * 6 + [False] * 2 + [True] * 6)  # the fifth sample is masked too
ADVANTAGES = torch.tensor([1.5, -0.5, -1.0, 0.7, 2.0, -1.2], dtype=torch.float64)
VERSION = 6

Columns = dict[str, Tensor]


def columns(seed: int = 0, spread: float = 0.7) -> Columns:
    """Columns of LossInputs, with ratios to the old policy and to the engine's on both sides of every clip."""
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(ROWS), generator=generator, dtype=torch.float64)

    logprobs = between(-4, -0.8)
    old_logprobs, rollout_logprobs = logprobs - between(-spread, spread), logprobs - between(-spread, spread)
    old_logprobs[WILD] = rollout_logprobs[WILD] = -1e4
    return {
        "logprobs": logprobs.requires_grad_(),
        "old_logprobs": old_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "advantages": ADVANTAGES[ROWS],
        "mask": MASK,
        "rows": ROWS,
        "entropy": torch.ones(len(ROWS), dtype=torch.float64),
        "token_versions": torch.tensor([3, 5, 6] * 7),
    }


def part(given: Columns, samples: list[int]) -> tuple[Columns, Tensor]:
    """The columns of these samples in this order, with logprobs of their own, and the places of their tokens."""
    places = torch.cat([torch.where(row == ROWS)[0] for row in samples])
    cut = {name: column[places] for name, column in given.items()}
    cut["rows"] = torch.cat([torch.full((LENGTHS[row],), number) for number, row in enumerate(samples)])
    cut["logprobs"] = given["logprobs"].detach()[places].requires_grad_()
    return cut, places


def loss_of(
    record: PolicyObjective,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    **more: Any,
) -> PolicyLoss:
    """The loss of columns that are written down in a test."""
    return record.loss(LossInputs(logprobs, old_logprobs, advantages, mask, rows, num_rows, **more))


def loss_and_gradient(record: PolicyObjective, given: Columns, **more: Any) -> tuple[PolicyLoss, Tensor]:
    """The loss, and the gradient of its sum over the tokens in it by each logprob."""
    loss = record.loss(LossInputs(**given, num_rows=int(given["rows"].max()) + 1, version=VERSION, **more))
    kept = torch.where(given["mask"], loss.per_token, torch.zeros_like(loss.per_token))
    (gradient,) = torch.autograd.grad(kept.sum(), given["logprobs"], retain_graph=True)
    return loss, gradient


def samples(given: Columns) -> list[list[int]]:
    """The places of the tokens in the loss, sample by sample, for references that are written out."""
    return [[t for t in range(len(ROWS)) if ROWS[t] == row and MASK[t]] for row in range(len(LENGTHS))]


def assert_is(loss: PolicyLoss, gradient: Tensor, expected: list[tuple[int, float, float]]) -> None:
    """Each token in the loss has this (place, value, gradient), and the others have no gradient."""
    assert sorted(t for t, _, _ in expected) == torch.where(MASK)[0].tolist()
    slopes = torch.zeros(len(MASK), dtype=torch.float64)
    for t, value, slope in expected:
        torch.testing.assert_close(loss.per_token[t].item(), value, rtol=1e-12, atol=1e-12)
        slopes[t] = slope
    torch.testing.assert_close(gradient, slopes, rtol=1e-12, atol=1e-12)
