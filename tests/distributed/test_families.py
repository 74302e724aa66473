"""Every family on two ranks: the start-up check, and the logprobs and gradients of one process from shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.training.sharding.fsdp import ShardOptions, accumulating, shard
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import sharded
from tests.unit.models.families import FAMILIES, VISION, build, build_vision

LENGTHS = {0: [9, 1, 5], 1: [4, 12]}
OFTEN = ("deepseek-v3", "gemma3n", "qwen2.5-vl")  # experts; an infinite slope at zeros; a tower without gradient
ALONE = [name for name, family in FAMILIES.items() if not family.two_ranks]
CASES = [name for name in (*FAMILIES, *VISION) if name not in ALONE]


def module_of(name: str) -> Any:
    return build_vision(name) if name in VISION else build(name)


def backward(model: CausalLM, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of a rank's sequences, with the backward pass done."""
    lengths = LENGTHS[rank]
    token_ids = torch.randint(2, 90, (sum(lengths),), generator=torch.Generator().manual_seed(rank))
    first = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    targets = torch.tensor([place for place in range(sum(lengths)) if place not in first])
    logprobs, entropy = model.packed_logprobs(token_ids, lengths, targets, 0.7)
    (logprobs.sum() + 0.5 * entropy.sum()).backward()
    return logprobs.detach(), entropy.detach()


def on_ranks(rank: int, num_ranks: int, name: str) -> dict[str, Any]:
    module = module_of(name)
    model = sharded(module)
    gap = model.verify()
    with accumulating(model, is_last=True):
        outputs = backward(model, rank)
    gradients = {key: p.grad.full_tensor() for key, p in module.named_parameters() if p.grad is not None}
    return {"gap": gap, "outputs": outputs, "gradients": gradients}


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.sweep) for n in CASES])
def test_two_ranks_give_what_one_process_gives(name: str) -> None:
    module = module_of(name)
    model = CausalLM(module)
    expected = [backward(model, rank) for rank in range(2)]
    scale = max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)
    for rank, result in enumerate(run_ranks(on_ranks, 2, name)):
        assert result["gap"] < 1e-5
        torch.testing.assert_close(result["outputs"], expected[rank], rtol=1e-5, atol=1e-5)
        for key, parameter in module.named_parameters():
            found = result["gradients"].get(key)
            if parameter.grad is None:
                assert found is None or not found.any()
            else:
                torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ALONE)
def test_a_family_that_cannot_be_sharded_says_so(name: str) -> None:
    with pytest.raises(ModelError, match="names no transformer blocks"):
        shard(build(name), None, ShardOptions(1, 1, torch.float32))  # type: ignore[arg-type]
