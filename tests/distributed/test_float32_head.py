"""A head whose logits stay float32 (cast_lm_head_to_fp32), on shards: as one rank computes them."""

from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.models import CausalLM
from hybrid_rl.training.sharding.build import generating_model
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, accumulating, device_mesh, shard
from tests.distributed.ranks import run_ranks
from tests.support.tiny import build_model, build_tokenizer, spread, sums
from tests.unit.models.families import VOCABULARY, build

pytestmark = pytest.mark.slow

LENGTHS = [9, 6, 5]
TARGETS = torch.tensor([1, 4, 8, 11, 14, 16])
HEAD = "model.embed_tokens.weight"  # tied


def outputs_of(model: CausalLM) -> Any:
    token_ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    return model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0)


def logits_of(model: CausalLM) -> torch.Tensor:
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(4))
    return model.logits(hidden.to(model.dtype)).detach()


def on_ranks(rank: int, num_ranks: int, float32_head: bool) -> dict[str, Any]:
    options = ShardOptions(1, num_ranks, torch.bfloat16)
    module = build("qwen2", tie_word_embeddings=True)
    shards = shard(module, device_mesh(options, "cpu"), options)
    model = ShardedCausalLM(shards, float32_head=float32_head)
    gap = model.verify()
    with accumulating(model, is_last=True):
        logprobs, entropy = outputs_of(model)
        (logprobs + 0.1 * entropy).sum().backward()
    with torch.no_grad(), generating_model(model) as plain:
        logits = logits_of(plain)
    gradient: Any = dict(model.module.named_parameters())[HEAD].grad
    found = {"logprobs": logprobs, "entropy": entropy, "logits": logits, "gradient": gradient.to_local()}
    return {name: tensor.detach() for name, tensor in found.items()} | {"gap": gap}


def test_two_ranks_have_the_head_of_one() -> None:
    module = build("qwen2", tie_word_embeddings=True)
    for parameter in module.parameters():  # not the rotary frequencies, which shards leave in float32 as well
        parameter.data = parameter.data.bfloat16()
    model = CausalLM(module, float32_head=True)
    logprobs, entropy = outputs_of(model)
    (logprobs + 0.1 * entropy).sum().backward()
    expected = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "logits": logits_of(model)}
    gradient = model.module.get_parameter(HEAD).grad
    for rank, seen in enumerate(run_ranks(on_ranks, 2, True)):
        assert seen["gap"] < 0.1
        for name, tensor in expected.items():
            assert tensor.dtype == torch.float32
            torch.testing.assert_close(seen[name], tensor, rtol=1e-5, atol=1e-5)
        # Two ranks with the same tokens: twice the gradient, and each has half of the rows.
        rows = gradient.float().chunk(2)[rank]
        torch.testing.assert_close(seen["gradient"] / 2, rows, rtol=0.02, atol=0.02 * float(gradient.abs().max()))
    for seen in run_ranks(on_ranks, 2, False):
        for name in ("logprobs", "logits"):
            assert float((seen[name] - expected[name]).abs().max()) > 1e-3, name


@pytest.mark.sweep
def test_engine_and_trainer_lie_closer_on_two_ranks(tmp_path, forked_ranks) -> None:
    """As with one (tests/unit/test_trainer_float32_head.py): what is left is the rounding in the body."""
    keys: dict[str, Any] = {"dtype": "bfloat16", "beta": 0.1, "max_steps": 1, "output_dir": str(tmp_path)}
    keys |= {"prompts_per_step": 8, "num_generations": 8, "max_completion_length": 16, "num_ranks": 2}
    divergence = []
    for is_cast in (False, True):
        module = build_model(hidden_size=64, seed=1, tie_word_embeddings=False)
        with torch.no_grad():
            module.lm_head.weight.mul_(32)
        more: dict[str, Any] = {"cast_lm_head_to_fp32": is_cast, "tokenizer": build_tokenizer()}
        with Trainer(module.bfloat16(), spread, sums(12), run_name=str(is_cast), **keys, **more) as trainer:
            metrics = trainer.step().metrics
        assert metrics["kl"] == 0 and metrics["grad_norm"] > 0 and metrics["skipped_updates"] == 0
        divergence.append(metrics["mismatch/kl_k3"])
    assert 0 < divergence[1] < divergence[0] / 1.5, divergence
