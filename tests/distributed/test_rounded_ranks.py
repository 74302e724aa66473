"""Weights of 8 bits made from the shards of several ranks: the bits of those that one rank makes of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.compat import native
from hybrid_rl.errors import HandoffError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.int8.int8_model import Int8CausalLM
from hybrid_rl.models.row import Layout
from hybrid_rl.planning.engines import rounded_share
from hybrid_rl.weights.sources import named_weights
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import sharded
from tests.support.inside.models import rounded_weights
from tests.support.tiny import VOCABULARY, build_tokenizer, spread, sums
from tests.unit.models.families import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.operator("int8_linear") is None, reason="the compiled extension is not built"),
]

KEYS: dict[str, Any] = {
    "rollout.quantization": "int8",
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "handoff.probe_steps": 1,
}


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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen2", {"num_ranks": 2, "dtype": "bfloat16"}),
        ("qwen3-moe", {"num_ranks": 2, "routing_replay": "rollout", "old_logprobs": "recompute"}),
        ("qwen2", {"num_ranks": 1, "rollout_ranks": 1}),
    ],
    ids=["bfloat16", "experts repeated", "ranks apart"],
)
def test_whole_runs(family: str, keys: dict[str, Any], tmp_path: Path, forked_ranks: Any) -> None:
    """Every handoff is probed and proved; engine and trainer differ by the rounding, and by little more."""
    keys = {**KEYS, "output_dir": str(tmp_path), "tokenizer": build_tokenizer(), **keys}
    model = build(family, vocab_size=len(VOCABULARY)).to(getattr(torch, keys.get("dtype", "float32")))
    with Trainer(model, spread, sums(12), **keys) as trainer:
        trainer.fit()
        lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    assert trainer.config.correction.correction_mode == "tis" and len(lines) == KEYS["max_steps"]
    for line in lines:
        assert 0 < line["mismatch/kl_k3"] < 1e-2 and line["skipped_updates"] == 0
        assert line["handoff/unproven_bytes"] == 0 and line["handoff/bytes"] > 0
        # Routers that read what rounded layers wrote choose other experts now and then.
        assert line.get("routing/changed_share", 0) < 0.05 and line.get("routing/unrecorded_share", 0) == 0
