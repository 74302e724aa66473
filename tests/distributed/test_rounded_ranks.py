"""Weights of 8 bits made from the shards of several ranks: the bits of those that one rank makes of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.errors import HandoffError
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.int8.int8_model import Int8CausalLM
from hybrid_rl.models.row import Layout
from hybrid_rl.planning.engines import rounded_share
from hybrid_rl.weights.sources import named_weights
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import sharded
from tests.support.inside.models import rounded_weights
from tests.unit.models.families import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.operator("int8_linear") is None, reason="the compiled extension is not built"),
]


def row_of() -> PackedRow:
    ids = torch.arange(2, 11)
    return PackedRow(ids, torch.arange(9), ids[1:], torch.arange(8), Layout((9,)))


@torch.no_grad()
def round_on_ranks(rank: int, num_ranks: int, family: str, dtype: torch.dtype) -> dict[str, Any]:
    model = sharded(build(family, intermediate_size=51), dtype)
    rounded = Int8CausalLM(model.twin.module, model.attention.name, dtype=model.dtype)
    masters = named_weights(model.module)
    rounded.write(masters)
    rounded.check(masters, 1)
    logprobs = rounded.row_distribution(row_of(), 1.0)
    shard = next(tensor for name, tensor in masters.items() if name.endswith("down_proj.weight")).to_local()
    if rank == num_ranks - 1:
        shard[-1] *= 1.5
    try:
        rounded.check(masters, 2)
        error = ""
    except HandoffError as stale:
        error = str(stale)
    weights = {name: (weight.values, weight.scales) for name, weight in rounded_weights(rounded).items()}
    return {"weights": weights, "logprobs": logprobs, "error": error, "bytes": rounded.num_bytes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_rounded_as_the_whole_weights_are(dtype: torch.dtype) -> None:
    """Three ranks, which no number of rows here is divided by. In bfloat16 the shards are fp32 masters. One row of one
    rank's shard that changes afterwards is found by all ranks."""
    module = build("qwen2", intermediate_size=51)
    whole = Int8CausalLM(module, CausalLM(module).attention.name, dtype=torch.float32)
    whole.write(named_weights(module))
    for report in run_ranks(round_on_ranks, 3, "qwen2", dtype):
        assert report["weights"].keys() == rounded_weights(whole).keys()
        for name, weight in rounded_weights(whole).items():
            values, scales = report["weights"][name]
            assert torch.equal(values, weight.values) and torch.equal(scales, weight.scales), name
        if dtype == torch.float32:
            with torch.no_grad():
                assert torch.equal(report["logprobs"], whole.row_distribution(row_of(), 1.0))
        assert "policy version 2" in report["error"] and "down_proj.weight" in report["error"]
        rest = sum(p.numel() for name, p in module.named_parameters() if name not in whole.rounded_names)
        assert report["bytes"] == whole.num_rounded_bytes + rest * dtype.itemsize
        assert report["bytes"] == rounded_share(module, dtype.itemsize, is_whole=True).num_bytes
