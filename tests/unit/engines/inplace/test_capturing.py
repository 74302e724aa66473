"""Families that a CUDA graph can hold, on a device without numbers, and what stands in for layers that it cannot."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig, PreTrainedModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from hybrid_rl.compat.transformers import experts_of
from hybrid_rl.engines.inplace import capturing
from hybrid_rl.engines.inplace.capturing import HostReads, capturable
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.engines.inplace.kv_cache import ShapeRecorder
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.decoding import decoded_experts, groups_on_device
from tests.support.cuda.pretended_cuda import CUDA, PretendedCuda, pretended_cuda, to_cuda
from tests.support.engines.engine_settings import inplace_settings
from tests.unit.engines.engines import Rig, request, same_samples
from tests.unit.engines.inplace.graph_stand_in import Graph, force_device_path
from tests.unit.models.families import (
    FAMILIES,
    MIXTURES,
    NOT_CAPTURED,
    SUPPORTED,
    VISION,
    build,
    build_vision,
)

FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 60, **FACTORS}
ROTARIES = [("phi3", LONGROPE), ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})]
EVERYWHERE = {*SUPPORTED, *MIXTURES, *NOT_CAPTURED}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    """A pretended device of capability 8.0, which groups products only with the host's help."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pretended_cuda() as mode:
        yield mode


def first_read(module: PreTrainedModel, cuda: PretendedCuda) -> str | None:
    """What of a decode pass a graph cannot hold. The device counts what the host waits for by itself."""
    to_cuda(module)
    model = CausalLM(module, "sdpa")
    tokens = torch.zeros(5, dtype=torch.long).to(CUDA)
    with torch.no_grad():
        with suppress(RuntimeError):  # of numbers that the device does not have
            model.hidden_states(tokens, tokens, ShapeRecorder())
        cuda.forget()
        with capturable(model), HostReads(CUDA) as reads, suppress(RuntimeError):
            model.hidden_states(tokens, tokens, ShapeRecorder())
    assert (reads.first is not None) == bool(cuda.reads or cuda.pageable)
    assert not any("forward" in vars(child) for child in module.modules())
    return reads.first


@pytest.mark.parametrize(
    "name", [name if name in EVERYWHERE else pytest.param(name, marks=pytest.mark.sweep) for name in FAMILIES]
)
def test_every_family_is_captured_or_known_not_to_be(name: str, cuda: PretendedCuda) -> None:
    read = first_read(build(name, dtype=torch.bfloat16), cuda)
    expected = NOT_CAPTURED.get(name)
    assert read is None if expected is None else read is not None and expected in read


@pytest.mark.sweep
@pytest.mark.parametrize("name", VISION)
def test_every_vision_language_family_is_captured(name: str, cuda: PretendedCuda) -> None:
    assert first_read(build_vision(name, torch.bfloat16), cuda) is None


@pytest.mark.parametrize(("family", "rotary"), ROTARIES, ids=["longrope", "dynamic"])
def test_frequencies_that_are_chosen_by_length_are_captured(
    family: str, rotary: dict[str, Any], cuda: PretendedCuda
) -> None:
    assert first_read(build(family, rope_parameters=rotary), cuda) is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_product_is_a_read_but_for_its_fast_path(
    capability: tuple[int, int], dtype: torch.dtype, cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    module = build("mixtral", dtype=dtype)
    to_cuda(module)
    model, tokens = CausalLM(module, "sdpa"), torch.zeros(5, dtype=torch.long).to(CUDA)
    # As it is outside of captures. In float32 the device has no such product.
    with torch.no_grad(), HostReads(CUDA) as reads, suppress(RuntimeError):
        model.hidden_states(tokens, tokens, ShapeRecorder())
    is_fast = capability == (9, 0) and dtype == torch.bfloat16
    assert groups_on_device(dtype, CUDA) == is_fast
    assert reads.first is None if is_fast else reads.first is not None and "aten::_grouped_mm at moe.py" in reads.first


READS = {
    "bool": lambda x: bool(x[0] > 0),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "to": lambda x: x.to("cpu"),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "upload": lambda x: x + torch.tensor([1.0, 2.0, 3.0]).to(x.device),
    "upload of a number": lambda x: x + torch.tensor(1.0, device=x.device),
    "maximum": lambda x: torch.maximum(x, torch.tensor(1e-5).to(x.device)),
}
NO_READS = {
    "number": lambda x: x * 2.0 + 1,
    "host number": lambda x: torch.tensor(3.0).item() * x,
    "copies": lambda x: x.repeat_interleave(2),
    "known size": lambda x: x.repeat_interleave(torch.ones_like(x).long(), output_size=3),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "dtype": lambda x: x.to(torch.bfloat16),
    "where": lambda x: torch.where(x > 0, x, 0.0),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", READS)
def test_what_is_watched(name: str, inference: bool, cuda: PretendedCuda) -> None:
    x = torch.tensor([1.0, 2.0, 3.0]).to(CUDA)
    with torch.inference_mode(inference), HostReads(CUDA) as reads, suppress(RuntimeError):
        READS[name](x)
    assert reads.first is not None


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", NO_READS)
def test_what_is_not(name: str, inference: bool, cuda: PretendedCuda) -> None:
    x = torch.tensor([1.0, 2.0, 3.0]).to(CUDA)
    with torch.inference_mode(inference), HostReads(CUDA) as reads:
        NO_READS[name](x)
    assert reads.first is None


# ------------------------------------------------------------------------------------------------------- experts


def experts_named(name: str) -> Any:
    """Experts of a layer: gated, with biases and the other way round (gpt-oss), without a gate (Nemotron-H)."""
    if name != "nemotron-h":
        return experts_of(build({"gpt-oss": "attention sinks"}.get(name, name)))[0][0]
    config = NemotronHConfig(n_routed_experts=4, moe_intermediate_size=16, hidden_size=32, num_experts_per_tok=2)
    experts = NemotronHExperts(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
    return experts


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("name", [*MIXTURES, "gpt-oss", "nemotron-h"])
def test_decoded_experts_are_those_of_the_model(name: str, num_tokens: int) -> None:
    """Against transformers' own loop over experts. Four or eight of them, two per token: gathered for few tokens."""
    experts = experts_named(name)
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 32, generator=generator)
    scores = torch.rand(num_tokens, experts.num_experts, generator=generator)
    weights, index = scores.topk(2)
    with torch.no_grad():
        expected: Tensor = inspect.unwrap(type(experts).forward)(experts, hidden, index, weights)
        torch.testing.assert_close(decoded_experts(experts, hidden, index, weights), expected, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------------- engine


def rig_of(family: str, **changes: Any) -> Rig:
    module = build(family, **changes)
    engine = InPlaceEngine(CausalLM(module), inplace_settings(block_size=4, max_num_seqs=16), max_length=48)
    return Rig(engine, module).ready()


REQUESTS = [request(i, 3 + i, 6 + i % 3, temperature=0.7 * (i % 3)) for i in range(7)]


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3-moe", {}), ("gpt2", {}), ("phi3", {"rope_parameters": LONGROPE})], ids=str
)
def test_what_is_computed_otherwise_gives_the_samples_of_plain_passes(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts without grouped products; GPT-2's search for padding, which captures do not have; longrope."""
    expected = rig_of(family, **changes).run(REQUESTS)
    force_device_path(monkeypatch)
    monkeypatch.setattr(capturing, "groups_on_device", lambda dtype, device: False)
    same_samples(rig_of(family, **changes).run(REQUESTS), expected)
    assert Graph.log.count("replay") > 5


def test_a_model_that_cannot_be_captured_decodes_without_graphs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rig_of("phi3", rope_parameters=LONGROPE).run(REQUESTS)
    force_device_path(monkeypatch)
    monkeypatch.setattr(capturing, "rereading_rotaries", lambda module: [])
    rig = rig_of("phi3", rope_parameters=LONGROPE)
    with caplog.at_level(logging.WARNING):
        same_samples(rig.run(REQUESTS), expected)
        rig.publish(2)
        rig.run(REQUESTS, 2)
    assert "capture" not in Graph.log
    (record,) = [record for record in caplog.records if record.name == "hybrid_rl"]
    assert "decode passes of Phi3ForCausalLM are not captured as CUDA graphs" in record.getMessage()
    assert "(aten::_local_scalar_dense at modeling_rope_utils.py:" in record.getMessage()
