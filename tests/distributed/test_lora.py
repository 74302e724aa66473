"""Adapters on real ranks: loss and gradients of peft in one process, whatever the split, and which numbers are sharded
in which dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hybrid_rl.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, shard
from tests.distributed.ranks import run_ranks
from tests.distributed.test_fsdp import UNEVEN, WITHOUT_WORK
from tests.unit.training.lora_case import adapted, by_peft, check, config_of, gradients, recorded, step
from tests.unit.training.test_lora_gradients import EXPERTS, PLAIN, TOLERANCE

pytestmark = pytest.mark.slow

WHOLE = {**PLAIN, "use_dora": True, "modules_to_save": ["lm_head", "embed_tokens"]}


@dataclass(frozen=True)
class Case:
    """settings: of ShardOptions; config: keys besides those of the adapters."""

    family: str
    keys: Mapping[str, Any]
    dtype: torch.dtype = torch.float64
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    split: Any = field(default_factory=lambda: UNEVEN)


CASES = {
    "fp32": Case("qwen2", PLAIN, torch.float32),
    "fp64": Case("llama", PLAIN),
    "experts": Case("qwen3-moe", EXPERTS, settings={"sync_every_micro_batch": True}),
    "DoRA, head and embedding": Case("qwen2", WHOLE, settings={"dp_replicate": 2, "dp_shard": 1}),
    "kept gathered": Case("gemma2", PLAIN, settings={"reshard_after_forward": False}),
    "a rank without work": Case("qwen2", PLAIN, torch.float32, checkpointing=True, split=WITHOUT_WORK),
    "exact KL": Case("qwen2", PLAIN, config={"kl_estimator": "exact"}),
    "exact KL, checkpoints": Case("qwen2", PLAIN, torch.float32, config={"kl_estimator": "exact"}, checkpointing=True),
}


def on_a_rank(rank: int, num_ranks: int, olds: dict[str, Any]) -> dict[str, Any]:
    return {name: _one(rank, num_ranks, CASES[name], old) for name, old in olds.items()}


def _one(rank: int, num_ranks: int, case: Case, old: Any) -> tuple[float, dict[str, torch.Tensor]]:
    options = ShardOptions(**{"dp_replicate": 1, "dp_shard": num_ranks, **case.settings}, param_dtype=case.dtype)
    module = adapted(case.family, case.keys, case.dtype)
    model = ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options), "sdpa")
    if case.checkpointing:
        model.enable_gradient_checkpointing()
    loss = step(model, config_of(case.keys, **case.config), recorded(old), case.split[rank])
    return loss, gradients(module)


def test_loss_and_gradients_are_those_of_peft_in_one_process() -> None:
    theirs = {
        name: by_peft(case.family, case.keys, case.dtype, exact_kl="kl_estimator" in case.config)
        for name, case in CASES.items()
    }
    ranks = run_ranks(on_a_rank, 2, {name: old for name, (_, old) in theirs.items()})
    for name, case in CASES.items():
        loss = sum(found[name][0] for found in ranks)
        for found in ranks:
            check((loss, found[name][1]), theirs[name][0], TOLERANCE[case.dtype])
