"""Quantised weights from two ranks that hold rows of them: each makes its part of what one rank would make."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Placement, Shard

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.base import PeerError, alone
from hybrid_rl.resharding.handoff.quantised import Quantisation
from hybrid_rl.resharding.layout import ShardedTensor, SourceLayout, TensorSpec
from hybrid_rl.weights.grids import GRIDS
from hybrid_rl.weights.low_rank import LowRank

SHAPES = {"a.q_proj.weight": (200, 64), "a.k_proj.weight": (3, 64), "a.norm.weight": (64,), "b.weight": (130, 160)}
MESH = np.arange(2, dtype=np.int32)


def whole_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    weights["a.k_proj.weight"][1, 1] = 0.4  # the largest of the weights that an engine joins
    return weights


def quantisation(name: str) -> Quantisation:
    names = frozenset(name for name, shape in SHAPES.items() if len(shape) == 2)
    return Quantisation(GRIDS[name], names, torch.float32, joined=[frozenset({"a.q_proj.weight", "a.k_proj.weight"})])


def layout_of(num_ranks: int, placement: Placement) -> SourceLayout:
    tensors = [
        ShardedTensor.of(TensorSpec(name, shape, torch.float32), MESH[:num_ranks], [placement])
        for name, shape in sorted(SHAPES.items())
    ]
    return SourceLayout(tuple(tensors), ("host",) * num_ranks)


def on_two_ranks(call: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Call it on two threads as ranks, which gather from each other; results, or the errors that were raised."""
    barrier, values = threading.Barrier(2), dict[int, Any]()

    def of_rank(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait(timeout=60)
            answers = [values[0], values[1]]
            barrier.wait(timeout=60)
            return answers

        try:
            return call(rank, gather)
        except HandoffError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of_rank, range(2)))


def rows_of(rank: int, weights: dict[str, torch.Tensor], dim: int = 0) -> dict[str, torch.Tensor]:
    """torch.chunk of every weight, as FSDP2 shards: rank 1 has one row of three, or, of one row, none."""
    return {name: weight.chunk(2, min(dim, weight.dim() - 1))[rank] for name, weight in weights.items()}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_parts_of_ranks_are_those_of_the_whole(name: str, is_adapted: bool) -> None:
    weights, changes = whole_weights(), dict[str, LowRank]()
    if is_adapted:
        generator = torch.Generator().manual_seed(1)
        a, b = (torch.randn(shape, generator=generator) * 0.1 for shape in ((2, 160), (130, 2)))
        changes = {"b.weight": LowRank(a, b, scale=0.5)}
    of_one_rank = quantisation(name).source(layout_of(1, Shard(0)), weights, changes, rank=0, gather=alone)
    layout, parts = of_one_rank.layout(), of_one_rank.held()[0]
    expected = {each.spec.name: part for each, part in zip(layout.tensors, parts, strict=True)}

    # The whole weights as the grid itself takes them, those that are joined with the largest value of both.
    grid, merged = GRIDS[name], dict(weights)
    for changed, change in changes.items():
        merged[changed] = change.merged(weights[changed], tuple(slice(0, n) for n in weights[changed].shape))
    for weight_name in quantisation(name).names:
        names = [weight_name]
        if grid.whole_scale and weight_name.startswith("a."):
            names = ["a.q_proj.weight", "a.k_proj.weight"]
        maxima = torch.stack([grid.maxima(merged[each]) for each in names]).amax(0)
        for suffix, values in grid.quantise(merged[weight_name], maxima, torch.float32).items():
            own = expected[weight_name.removesuffix("weight") + suffix]
            assert torch.equal(own.view(torch.uint8), values.view(torch.uint8)), weight_name

    def shard(rank: int, gather: Any) -> Any:
        return quantisation(name).source(
            layout_of(2, Shard(0)), rows_of(rank, weights), changes, rank=rank, gather=gather
        )

    sources = on_two_ranks(shard)
    assert sources[0].layout().digest() == sources[1].layout().digest()
    for rank, source in enumerate(sources):
        low, high = source.layout().parts(rank)
        for number, each in enumerate(source.layout().tensors):
            part, whole = source.held()[rank][number], expected[each.spec.name]
            assert (each.spec.shape, each.spec.dtype) == (tuple(whole.shape), whole.dtype)
            box = tuple(map(slice, low[number].tolist(), high[number].tolist()))[: whole.dim()]
            assert part is not None and part.dtype == whole.dtype
            assert torch.equal(part.contiguous().view(torch.uint8), whole[box].contiguous().view(torch.uint8))


def test_a_weight_that_is_not_finite_is_refused_on_all_ranks() -> None:
    weights = whole_weights()
    weights["b.weight"][129, 0] = float("nan")

    def shard(rank: int, gather: Any) -> Any:
        return quantisation("int4").source(layout_of(2, Shard(0)), rows_of(rank, weights), {}, rank=rank, gather=gather)

    first, second = on_two_ranks(shard)
    assert isinstance(second, HandoffError) and "b.weight has values that are not finite" in str(second)
    assert isinstance(first, PeerError) and "b.weight has values that are not finite" in str(first)


def test_rows_that_are_cut_are_refused() -> None:
    weights = whole_weights()
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
    tensors = [ShardedTensor.of(TensorSpec(n, s, torch.float32), MESH, [Shard(1)]) for n, s in sorted(shapes.items())]
    layout = SourceLayout(tuple(tensors), ("host", "host"))

    def shard(rank: int, gather: Any) -> Any:
        own = {name: weights[name].chunk(2, 1)[rank] for name in shapes}
        return quantisation("nvfp4").source(layout, own, {}, rank=rank, gather=gather)

    assert all("the rows of a.k_proj.weight are cut over ranks" in str(error) for error in on_two_ranks(shard))
