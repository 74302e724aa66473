"""Architectures that cannot be packed, on unpacked rows: outputs and gradients of their own forward of each sample."""

import pytest
import torch

from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM, Layout, PackedRow
from hybrid_rl.models.attention.unpacked import UnpackedRow
from hybrid_rl.models.packed.startup_check import check_causal
from tests.support.float64 import KeepFloat64
from tests.unit.models.attention.test_shared_prompts import check, gradients, own, samples
from tests.unit.models.families import REFUSED, build
from tests.unit.models.hybrids import HYBRIDS, MORE, build_hybrid

FAMILIES = [*HYBRIDS, *(pytest.param(name, marks=pytest.mark.sweep) for name in MORE)]
DTYPES = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.sweep)]
# Some families take the logarithm of a decay, or their experts' products, in float32 of their own accord.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}


def unpacked(name, **changes):
    return CausalLM(build_hybrid(name, **changes), "unpacked")


def test_a_row_becomes_whole_sequences_and_back():
    """Two roots, of which the first has two children; the filler of the row becomes no sequence."""
    layout = Layout((2, 3, 4), (1, 2), (0, 0), is_filled=True)
    row = UnpackedRow(layout)
    spread = row.spread(torch.arange(12))
    assert spread.tolist() == [[2, 3, 4, 4], [0, 1, 9, 9], [0, 1, 10, 11]]
    assert row.collect(spread[..., None])[:, 0].tolist() == [0, 1, 2, 3, 4, 2, 2, 2, 2, 9, 10, 11]
    with pytest.raises(ModelError, match="12 tokens but got 11"):
        row.spread(torch.arange(11))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs_unpacked_and_the_packed_one_says_how(name):
    module = build_hybrid(name)
    with pytest.raises(ModelError, match=r'; rollout.engine=hf \(Trainer\(engine="hf"\)\) runs it through'):
        CausalLM(module).verify()
    assert CausalLM(module, "unpacked").verify() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_entropies_and_gradients_are_those_of_every_sample_alone(name, dtype):
    model = unpacked(name, dtype=dtype)
    with KeepFloat64():
        expected = own(model.module, *samples())
        found = model.row_logprobs(PackedRow.of(*samples(), model.device), 1.0)
    for mine, theirs, what in zip(found, expected, ("logprobs", "entropies"), strict=True):
        check(mine, theirs, dtype, what, TOLERANCES)
    check(gradients(model.module, found), gradients(model.module, expected), dtype, "gradients", TOLERANCES)


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputed_activations_change_nothing(name):
    model = unpacked(name)
    row = PackedRow.of(*samples(), model.device)
    expected = gradients(model.module, model.row_logprobs(row, 1.0))
    model.enable_gradient_checkpointing()
    check(gradients(model.module, model.row_logprobs(row, 1.0)), expected, torch.float32, "gradients", TOLERANCES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_architecture_that_can_be_packed_gives_the_same_unpacked(dtype):
    packed, beside = CausalLM(build("qwen2", dtype=dtype)), CausalLM(build("qwen2", dtype=dtype), "unpacked")
    row = PackedRow.of(*samples(), packed.device)
    with KeepFloat64():
        expected, found = packed.row_logprobs(row, 0.7), beside.row_logprobs(row, 0.7)
    for mine, theirs in zip(found, expected, strict=True):
        check(mine, theirs, dtype, "logprobs, entropies")
    check(gradients(beside.module, found), gradients(packed.module, expected), dtype, "gradients")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["an encoder", "encoder and decoder"])
def test_what_is_not_causal_is_called_so_and_sent_nowhere(name, dtype):
    """As it is with packed attention: see test_verify.py."""
    with pytest.raises(ModelError, match=f"^{REFUSED[name].message}"):
        CausalLM(build(name, dtype=dtype), "unpacked").verify()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_causal_is_not_taken_for_an_encoder(name, dtype):
    check_causal(unpacked(name, dtype=dtype))


@pytest.mark.parametrize(
    ("build_it", "reason"),
    [
        (lambda: build_hybrid("rwkv"), r"RwkvForCausalLM does not return a transformers cache \(it returns .*\)$"),
        (lambda: build_hybrid("minimax"), "MiniMaxForCausalLM does not decode with rows of its own cache: .*$"),
        (
            lambda: build("its own attention code", attention="sdpa", alibi=True),
            r"FalconForCausalLM gives other logits.* next to it .*$",
        ),
    ],
    ids=["no cache", "cache", "position"],
)
def test_nobody_is_sent_to_an_engine_that_refuses_them(build_it, reason):
    """The refusal includes what the other engine would say."""
    with pytest.raises(
        ModelError, match="packed row would mix.*; nor does rollout.engine=hf run it: " + reason
    ) as told:
        CausalLM(build_it()).verify()
    assert "Trainer(engine" not in str(told.value)
