"""Adapters on real ranks: loss and gradients of peft in one process, whatever the split, and which numbers are sharded
in which dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.checkpoint.writing import write_checkpoint
from hybrid_rl.config.lora_keys import LoraKeys
from hybrid_rl.controller import RankContext
from hybrid_rl.models.lora.inject import is_adapter_name
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.training.critic import Critic
from hybrid_rl.training.sharding.build import build_model
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, move_to_region, shard
from hybrid_rl.weights.sources import ObjectSource
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import context_of, gather, sharded
from tests.distributed.test_critic import OPTIONS, PLANS, ROWS, WHOLE, compare, exact_config, whole_weights
from tests.distributed.test_fsdp import UNEVEN, WITHOUT_WORK
from tests.reference import grpo_case
from tests.support.float64 import KeepFloat64
from tests.unit.training.critic_case import critic_batch
from tests.unit.training.lora_case import adapted, by_peft, check, config_of, gradients, recorded, step
from tests.unit.training.test_lora_gradients import EXPERTS, PLAIN, TOLERANCE

pytestmark = pytest.mark.slow

DORA = {**PLAIN, "use_dora": True, "modules_to_save": ["lm_head", "embed_tokens"]}


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
    "DoRA, head and embedding": Case("qwen2", DORA, settings={"dp_replicate": 2, "dp_shard": 1}),
    "exact KL, kept gathered": Case(
        "gemma2", PLAIN, settings={"reshard_after_forward": False}, config={"kl_estimator": "exact"}
    ),
    "a rank without work": Case("qwen2", PLAIN, torch.float32, checkpointing=True, split=WITHOUT_WORK),
    "exact KL, checkpoints": Case("qwen2", PLAIN, torch.float32, config={"kl_estimator": "exact"}, checkpointing=True),
}


def on_a_rank(rank: int, num_ranks: int, olds: dict[str, Any], root: Path, policy: ModelRecipe) -> dict[str, Any]:
    found: dict[str, Any] = {name: _one(rank, CASES[name], old) for name, old in olds.items()}
    found["bfloat16"] = _in_bfloat16(rank, num_ranks, olds["fp32"])
    found["fresh"] = fresh(policy, context_of(rank, num_ranks))
    found["critic"] = _critic(rank, num_ranks, root, policy)
    return found


def _one(rank: int, case: Case, old: Any) -> tuple[float, dict[str, torch.Tensor]]:
    module = adapted(case.family, case.keys, case.dtype)
    model = sharded(module, case.dtype, "sdpa", **case.settings)
    if case.checkpointing:
        model.enable_gradient_checkpointing()
    loss = step(model, config_of(case.keys, **case.config), recorded(old), case.split[rank])
    return loss, gradients(module)


def _in_bfloat16(rank: int, num_ranks: int, old: Any) -> dict[str, Any]:
    """Shards in a region: their dtypes and bytes by whether they are adapters; dtypes of what is gathered."""
    options = ShardOptions(1, num_ranks, torch.bfloat16)
    module = adapted("qwen2", PLAIN, torch.bfloat16)
    base = {name: p.detach().clone() for name, p in module.named_parameters()}
    shards = shard(module, device_mesh(options, "cpu"), options)
    region = move_to_region(shards, "actor")
    model = ShardedCausalLM(replace(shards, region=region), "sdpa")
    step(model, config_of(PLAIN), recorded(old), UNEVEN[rank])
    with model.twin.bound():
        twin = {p.dtype for p in model.twin.module.parameters()}
    named: dict[str, Any] = dict(module.named_parameters())
    bytes_by_kind = dict.fromkeys((False, True), 0)
    for name, parameter in named.items():
        bytes_by_kind[is_adapter_name(name)] += parameter.to_local().nbytes
    return {
        "dtypes": {is_adapter_name(name): p.dtype for name, p in named.items()},
        "gradients": gradients(module),
        "twin": twin,
        "same": all(torch.equal(p.full_tensor(), base[name].to(p.dtype)) for name, p in named.items()),
        "bytes": bytes_by_kind,
    }


def fresh(policy: ModelRecipe, context: RankContext) -> dict[str, torch.Tensor]:
    """What a policy starts with, whole."""
    config = config_of({**PLAIN, "use_dora": True, "modules_to_save": ["model.norm"]}, dtype="bfloat16")
    named: dict[str, Any] = dict(build_model(policy, config, context, is_trained=True).module.named_parameters())
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}


def _critic(rank: int, num_ranks: int, root: Path, policy: ModelRecipe) -> dict[str, Any]:
    """Two updates of a critic with adapters, a checkpoint between them, and one that goes on from it."""
    critic, again = (critic_of(policy, context_of(rank, num_ranks)) for _ in range(2))
    batch, plan = critic_batch().select(ROWS[rank]), PLANS[rank]
    critic.update(batch, plan)
    parts = {"critic": critic.optimizer_state()}
    folder = root / "checkpoint"
    write_checkpoint(folder, lambda f: critic.save_model(f / "critic"), {}, {}, parts=parts, rank=rank, gather=gather)
    again.load(folder / "critic")
    for its in (critic, again):
        its.update(batch, plan)
    return {"weights": whole_weights(critic), "resumed": whole_weights(again)}


def critic_of(policy: ModelRecipe, context: RankContext) -> Critic:
    config = replace(exact_config(), lora=LoraKeys(r=4, lora_alpha=6, lora_critic=True))
    with KeepFloat64():
        return Critic(policy, config, context, num_optimizer_steps=20, options=OPTIONS)


def test_loss_and_gradients_are_those_of_peft_in_one_process(tmp_path: Path) -> None:
    theirs = {
        name: by_peft(case.family, case.keys, case.dtype, exact_kl="kl_estimator" in case.config)
        for name, case in CASES.items()
    }
    policy = grpo_case.build_model(torch.float64)
    recipe = ModelRecipe.of_module(policy, ObjectSource.of(policy, lambda data: data))
    olds = {name: old for name, (_, old) in theirs.items()}
    ranks = run_ranks(on_a_rank, 2, olds, tmp_path, recipe, preloaded=("peft",))
    for name, case in CASES.items():
        loss = sum(found[name][0] for found in ranks)
        for found in ranks:
            check((loss, found[name][1]), theirs[name][0], TOLERANCE[case.dtype])

    # The base has no masters, and its gradients are as good as those of one process that computes in bfloat16.
    (_, exact), _ = by_peft("qwen2", PLAIN, torch.float64)
    (_, padded), _ = by_peft("qwen2", PLAIN, torch.bfloat16)
    num = dict.fromkeys((False, True), 0)
    for name, parameter in adapted("qwen2", PLAIN, torch.float32).named_parameters():
        num[is_adapter_name(name)] += parameter.numel()
    seen = [found["bfloat16"] for found in ranks]
    for its in seen:
        assert its["dtypes"] == {False: torch.bfloat16, True: torch.float32} and its["twin"] == {torch.bfloat16}
        assert its["same"]
        assert {gradient.dtype for gradient in its["gradients"].values()} == {torch.float32}
        assert error_of(its["gradients"], exact) < error_of(padded, exact)
    assert {kind: sum(its["bytes"][kind] for its in seen) for kind in num} == {
        False: 2 * num[False],
        True: 4 * num[True],
    }

    here = RankContext(device=torch.device("cpu"))
    again = ModelRecipe.of_module(policy, ObjectSource.of(policy, lambda data: data))
    for name, value in fresh(again, here).items():
        for found in ranks:  # in float32, of what is trained
            assert torch.equal(found["fresh"][name].to(value.dtype), value), name
    alone = critic_of(ModelRecipe.of_module(policy, ObjectSource.of(policy, lambda data: data)), here)
    start = whole_weights(alone)
    with KeepFloat64():
        for _ in range(2):
            alone.update(critic_batch(), WHOLE)
    for found in ranks:
        compare(found["critic"]["weights"], whole_weights(alone), 1e-7)  # Adam divides small gradients by their size
        assert all(torch.equal(found["critic"]["resumed"][name], w) for name, w in found["critic"]["weights"].items())
        for name, weights in found["critic"]["weights"].items():
            assert torch.equal(weights, start[name]) is not is_adapter_name(name), name


def error_of(gradients: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """Relative, of all numbers together."""
    wrong = sum(float((gradients[name].double() - its).square().sum()) for name, its in exact.items())
    return (wrong / sum(float(its.square().sum()) for its in exact.values())) ** 0.5
