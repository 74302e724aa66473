"""The in-place engine on the twin of a sharded model, against one on the plain model."""

from typing import Any

import pytest
import torch

from hybrid_rl.compat.torch_fsdp import parameters
from hybrid_rl.config import OptimizerConfig
from hybrid_rl.engines.base import KV_CACHE, WEIGHTS, RolloutRequest, SamplingParams
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.region import Region
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.training.optimizer import Optimizer
from hybrid_rl.training.sharding.fsdp import accumulating
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import sharded
from tests.support.engines.engine_settings import inplace_settings
from tests.support.inside.engines import graphs_of
from tests.support.libraries.torch_names import gathered
from tests.unit.engines.inplace.graph_stand_in import force_device_path
from tests.unit.models.families import VOCABULARY, build

pytestmark = pytest.mark.slow

LENGTHS = [9, 6, 5]
TARGETS = torch.tensor([1, 4, 8, 11, 14, 16])
MAX_TOKENS = 9


def engine_of(model: CausalLM) -> InPlaceEngine:
    engine = InPlaceEngine(model, inplace_settings(kv_cache_memory_bytes=1 << 20), max_length=32)
    engine.sleep({WEIGHTS, KV_CACHE})
    return engine


def rollout(engine: InPlaceEngine, module: torch.nn.Module, version: int, num_requests: int) -> list[Any]:
    """Samples of `num_requests` prompts of different lengths, the first ones greedy."""
    engine.wake({WEIGHTS, KV_CACHE})
    engine.update_weights(TensorSource.of(module), version)
    requests = [
        RolloutRequest(
            index,
            tuple((7 * index + 3 * place) % VOCABULARY for place in range(3 + index)),
            SamplingParams(max_tokens=MAX_TOKENS - index, temperature=float(index > 1), seed=index),
        )
        for index in range(num_requests)
    ]
    samples = EngineClient(engine).generate(requests, version)
    engine.sleep({WEIGHTS, KV_CACHE})
    return [(list(sample.completion_ids), list(sample.logprobs)) for sample in samples]


def loss_of(model: CausalLM, seed: int) -> torch.Tensor:
    token_ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    logprobs, _ = model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0)
    return (logprobs * torch.linspace(-1, 1, len(TARGETS))).sum()


def optimizer_of(module: torch.nn.Module) -> Optimizer:
    return Optimizer(module, OptimizerConfig(learning_rate=1e-2, max_grad_norm=1.0), num_optimizer_steps=9)


def storage_bytes(module: torch.nn.Module) -> int:
    """Bytes of the tensors that FSDP gathers, by their addresses in the units' own books."""
    whole = [gathered(parameter) for parameter in parameters(module)]
    return sum(tensor.untyped_storage().nbytes() for tensor in whole if tensor is not None)


def generate_on_ranks(rank: int, num_ranks: int, family: str) -> dict[str, Any]:
    module = build(family)
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    model = sharded(module)
    optimizer = optimizer_of(module)
    twin = model.twin
    seen: dict[str, Any] = {"samples": [], "gathered": [], "free": [], "gaps": []}
    twin.bind()
    plain = CausalLM(twin.module)
    engine = engine_of(plain)
    twin.release()
    for version in range(1, 4):
        twin.bind()
        seen["samples"].append(rollout(engine, twin.module, version, 2 + 2 * rank))
        seen["gathered"].append(storage_bytes(module) >= num_bytes)
        with torch.no_grad():  # the probe: the trainer scores while the engine holds the weights
            seen["gaps"].append(float(loss_of(model, 5) - loss_of(plain, 5)))
        with pytest.raises(MemoryStateError, match="before training"):
            loss_of(model, 5)
        twin.release()
        seen["free"].append(storage_bytes(module))
        assert all(p.is_meta for p in twin.module.parameters())
        with accumulating(model, is_last=True):
            loss_of(model, 10 * version + rank).backward()
        optimizer.step()
    return seen


def generate_alone(num_ranks: int, family: str, num_requests: int) -> list[Any]:
    model = CausalLM(build(family))
    optimizer, engine = optimizer_of(model.module), engine_of(model)
    samples = []
    for version in range(1, 4):
        samples.append(rollout(engine, model.module, version, num_requests))
        for rank in range(num_ranks):
            loss_of(model, 10 * version + rank).backward()
        optimizer.step()
    return samples


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_engine_on_the_twin_gives_the_samples_of_a_plain_engine_over_updates(family: str) -> None:
    """Ranks generate for 2 and for 4 prompts; three phases with an optimizer step after each."""
    per_rank = run_ranks(generate_on_ranks, 2, family)
    expected = generate_alone(2, family, 4)
    assert expected[0] != expected[1]
    for rank, seen in enumerate(per_rank):
        for mine, theirs in zip(seen["samples"], expected, strict=True):
            assert len(mine) == 2 + 2 * rank
            for (tokens, logprobs), (their_tokens, their_logprobs) in zip(mine, theirs, strict=False):
                assert tokens == their_tokens
                assert logprobs == pytest.approx(their_logprobs, abs=1e-5)
        assert seen["gathered"] == [True] * 3
        assert seen["free"] == [0] * 3  # the full weights are gone, not only unreferenced
        assert max(map(abs, seen["gaps"])) < 1e-5


def phases_on_ranks(rank: int, num_ranks: int, keeps: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Three phases with graphs, on the stand-in of them, and an optimizer step after each; odd sizes are padded."""
    module = build("qwen2")
    model = sharded(module, dtype)
    optimizer, twin = optimizer_of(module), model.twin
    regions: list[Region] = []

    def new_region(num_bytes: int) -> Region:
        regions.append(Region("weights", capacity_bytes=num_bytes))
        return regions[0]

    with twin.bound():
        pass  # what the check at the start does, in memory of FSDP's own
    if keeps:
        twin.keep_addresses(new_region)
    seen: dict[str, Any] = {"addresses": [], "captures": [], "samples": [], "occupied": [], "objects": []}
    with pytest.MonkeyPatch.context() as patch:
        force_device_path(patch)
        twin.bind()
        engine = engine_of(CausalLM(twin.module))
        twin.release()
        held = []
        for version in range(1, 4):
            full = [p.full_tensor().to(dtype) for p in module.parameters()]
            twin.bind()
            mine = list(twin.module.parameters())
            assert all(torch.equal(*pair) for pair in zip(mine, full, strict=True))
            seen["samples"].append(rollout(engine, twin.module, version, 3))
            seen["addresses"].append([p.data_ptr() for p in mine])
            seen["objects"].append([id(p) for p in mine])
            seen["captures"].append(graphs_of(engine).num_captures)
            seen["occupied"] += [region.occupied_bytes for region in regions]
            twin.release()
            seen["occupied"] += [region.occupied_bytes for region in regions]
            held.append([torch.empty_like(p) for p in full])  # others take what was free
            with accumulating(model, is_last=True):
                loss_of(model, 10 * version + rank).backward()
            optimizer.step()
        assert storage_bytes(module) == 0
    return seen


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.sweep), torch.bfloat16], ids=str)
@pytest.mark.sweep
def test_gathered_weights_keep_their_addresses_so_that_graphs_are_kept(dtype: torch.dtype) -> None:
    """The same samples as from memory of FSDP's own, over which the graphs are captured in each phase."""
    kept, moved = (run_ranks(phases_on_ranks, 2, keeps, dtype) for keeps in (True, False))
    for seen, usual in zip(kept, moved, strict=True):
        assert seen["addresses"][0] == seen["addresses"][1] == seen["addresses"][2]
        assert seen["objects"][0] == seen["objects"][1] == seen["objects"][2]
        assert len(set(seen["captures"])) == 1 and seen["captures"][0] > 0
        assert usual["captures"][-1] > seen["captures"][0]
        assert seen["samples"] == usual["samples"]
        (bound,) = set(seen["occupied"][::2])
        assert bound > 0 and seen["occupied"][1::2] == [0] * 3


def refused_on_rank(rank: int, num_ranks: int) -> None:
    module = build("qwen2")
    twin = sharded(module).twin

    def none(num_bytes: int) -> Region:
        raise MemoryStateError("no room")

    with twin.bound(), pytest.raises(MemoryStateError, match="release them before choosing their memory"):
        twin.keep_addresses(none)
    twin.keep_addresses(none)
    for _ in range(2):  # and never gathered elsewhere in its place
        with pytest.raises(MemoryStateError, match="no room"):
            twin.bind()
        assert not twin.is_bound and storage_bytes(module) == 0


def test_memory_that_cannot_be_had_leaves_the_twin_as_it_was() -> None:
    run_ranks(refused_on_rank, 1)
