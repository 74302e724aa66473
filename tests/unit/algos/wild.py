"""Columns as only a broken run has them: log ratios to +-100, whatever at masked tokens. For properties of all losses,
corrections and estimators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import LossInputs, PolicyObjective, WholeMiniBatch

VOCABULARY, NUM_TOP, NUM_ROWS = 8, 3, 6
# Beyond 88.7 exp is no float32; at 20 the ratio ends.
GAPS = torch.tensor([0, 1e-8, 0.1, -0.1, 0.5, -0.5, 5, -5, 19.9, 20.1, -30, 88.7, 88.8, -88.8, 100, -100]).double()
ANYTHING = torch.tensor([math.nan, math.inf, -math.inf, -1e30, 1e30])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def seeds(few: int, many: int = 0) -> pytest.MarkDecorator:
    """Have a test try so many seeds, and many in the sweep."""
    swept = [pytest.param(range(few, many), marks=pytest.mark.sweep, id=f"to {many}")] if many else []
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id=f"{few}"), *swept])


class Draw:
    """Random numbers of a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def of(self, values: Tensor, *shape: int) -> Tensor:
        return values[torch.randint(len(values), shape, generator=self.generator)]

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)


def rows_and_mask(draw: Draw) -> tuple[Tensor, Tensor]:
    """Samples of 1 to 6 tokens, a quarter of them masked."""
    rows = torch.repeat_interleave(torch.arange(NUM_ROWS), draw.integers(1, 7, NUM_ROWS))
    return rows, draw.uniform(0, 1, len(rows)) < 0.75


def two_policies(draw: Draw, count: int) -> tuple[Tensor, Tensor]:
    """ln p under two policies whose log ratio is one of GAPS."""
    base, gap = draw.uniform(-5, -1e-3, count), draw.of(GAPS, count)
    return base + gap.clamp(max=0), base - gap.clamp(min=0)


def spoiled(draw: Draw, column: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The column in a dtype, with anything where the mask is off."""
    column = column.to(dtype)
    off = ~mask.view(-1, *(1,) * (column.dim() - 1)).expand_as(column)
    return torch.where(off, draw.of(ANYTHING, *column.shape).to(dtype), column)


def wild_inputs(record: PolicyObjective, seed: int, dtype: torch.dtype) -> tuple[LossInputs, list[Tensor]]:
    """What a loss is given, and the tensors that get its gradient: logprobs, log_probs, what is learned besides.

    Advantages are one number per completion, as losses that take one ratio per completion want them.
    """
    draw = Draw(seed)
    rows, mask = rows_and_mask(draw)
    count = len(rows)
    logprobs, old = two_policies(draw, count)
    engine = torch.minimum(logprobs - draw.of(GAPS, count), torch.zeros(()))
    advantages = (draw.of(torch.tensor([-1e6, -1.0, -1e-6, 0.0, 0.7, 1.0, 1e6]).double(), NUM_ROWS))[rows]
    token_ids = draw.integers(0, VOCABULARY, count)
    whole = (40 * torch.randn(count, VOCABULARY, generator=draw.generator)).double().log_softmax(1)
    # The distribution says of the sampled token what the column says; that they add up to 1 no loss asks for.
    whole = spoiled(draw, whole.scatter(1, token_ids[:, None], logprobs[:, None]), mask, dtype).requires_grad_()
    old_whole = (10 * torch.randn(count, VOCABULARY, generator=draw.generator)).double().log_softmax(1)
    top = old_whole.topk(NUM_TOP, dim=1)

    def column(values: Tensor) -> Tensor:
        return spoiled(draw, values, mask, dtype)

    leaf = whole.gather(1, token_ids[:, None])[:, 0]
    old_column, advantage_column = column(old), column(advantages)
    prepared = record.prepare(
        WholeMiniBatch(old_column, advantage_column, mask, rows, NUM_ROWS, GROUPS, seed=seed % (1 << 31))
    )
    parameters = draw.uniform(-3, 3, 1).requires_grad_()
    more: dict[str, Any] = {
        "prepared": None if prepared is None else prepared.float(),
        "parameters": parameters,
        "log_probs": whole,
        "token_ids": token_ids,
        "old_top_ids": top.indices,
        "old_top_logprobs": column(top.values),
        "router_logprobs": column(draw.uniform(-100, 0, count, 2, 2)),
        "old_router_logprobs": column(draw.uniform(-100, 0, count, 2, 2)),
        "token_versions": draw.integers(-1, 6, count),
        "version": 6,
    }
    inputs = LossInputs(
        logprobs=leaf,
        old_logprobs=old_column,
        advantages=advantage_column,
        mask=mask,
        rows=rows,
        num_rows=NUM_ROWS,
        entropy=column(draw.uniform(0, 2, count)),
        rollout_logprobs=column(engine),
        **more,
    )
    return inputs, [leaf, whole, parameters]
