"""model.exact on shards: the trainer of two ranks, the twin that an engine decodes from, and one rank are equal to the
bit."""

from typing import Any

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.models import CausalLM
from hybrid_rl.models.exact import missing_operators
from hybrid_rl.training.sharding.build import generating_model
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, accumulating, device_mesh, shard
from tests.distributed.ranks import run_ranks
from tests.unit.models.families import VOCABULARY, build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.is_available() or bool(missing_operators()), reason="extension not built"),
]
LENGTHS = [9, 16, 5]


def logprobs_of(model: CausalLM, lengths: list[int]) -> Any:
    token_ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    targets = torch.tensor([place for place in range(1, sum(lengths)) if place not in (9, 25)])
    return model.packed_logprobs(token_ids[: sum(lengths)], lengths, targets, 0.7)[0]


def on_ranks(rank: int, num_ranks: int, family: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    options = ShardOptions(1, num_ranks, dtype)
    module = build(family)
    model = ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options), exact=True)
    model.verify()
    with accumulating(model, is_last=True):
        trained = logprobs_of(model, LENGTHS)
        trained.sum().backward()
    with torch.no_grad(), generating_model(model) as plain:
        alone = torch.cat([logprobs_of(plain, LENGTHS[: rank + 2])])  # ranks generate unequally
    return {"trained": trained.detach(), "generated": alone}


@pytest.mark.parametrize(("family", "dtype"), [("qwen3-moe", torch.float32), ("llama", torch.bfloat16)])
def test_two_ranks_have_the_bits_of_one(family: str, dtype: torch.dtype) -> None:
    module = build(family)
    for parameter in module.parameters():  # not the rotary frequencies, which shards leave in float32 as well
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        expected = logprobs_of(CausalLM(module, exact=True), LENGTHS)
    for seen in run_ranks(on_ranks, 2, family, dtype):
        assert torch.equal(seen["trained"], expected)
        assert torch.equal(seen["generated"], expected[: len(seen["generated"])])
