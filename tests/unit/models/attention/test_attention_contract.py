"""Attention backends against the contract: what runs on a CPU as it is, CUDA kernels with a stand-in of their
interface."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.attention.backends import Backend
from hybrid_rl.models.attention.padded import PaddedAttention
from hybrid_rl.models.attention.varlen import FlashAttnKernel, TorchKernel
from hybrid_rl.models.row import Layout
from tests.support.cuda.varlen_stand_in import StandIn
from tests.support.engines.attention_contract import LAYOUTS, OPTIONS, SOFTCAP, check_backend, check_context, inputs

CPU_DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
def test_backends_of_a_cpu(dtype):
    """Every number of key heads in float64; one that is neither alone nor as many as the queries' in the others."""
    check_backend("sdpa", "cpu", dtype, key_heads=(1, 2, 4) if dtype == torch.float64 else (2,))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
def test_backends_of_a_cpu_with_every_number_of_key_heads(dtype):
    check_backend("sdpa", "cpu", dtype)


def test_the_compiled_backend():
    check_backend("compiled", "cpu", torch.float32)


# Arguments of the operators of flash-attn-3 after the first ones.
FA3_FORWARD = (
    "Tensor? k_new, Tensor? v_new, Tensor? qv, Tensor? out, Tensor? cu_q, Tensor? cu_k, Tensor? cu_k_new, "
    "Tensor? used_q, Tensor? used_k, int? max_q, int? max_k, Tensor? page_table, Tensor? batch_idx, Tensor? leftpad, "
    "Tensor? cos, Tensor? sin, Tensor? rotary_lengths, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float? scale, bool causal, int left, int right, int chunk, float softcap, bool interleaved, Tensor? metadata, "
    "int num_splits, bool? pack_gqa, int sm_margin"
)
FA3_BACKWARD = (
    "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor? cu_q, Tensor? cu_k, Tensor? used_q, Tensor? used_k, "
    "int? max_q, int? max_k, float? scale, bool causal, int left, int right, float softcap, bool deterministic, "
    "int sm_margin"
)


@pytest.fixture(params=["varlen", "flash_attn"])
def injected(request, monkeypatch):
    """A backend on the stand-in, and the stand-in."""
    stand_in = StandIn()
    if request.param == "flash_attn":
        return Backend("flash_attn", FlashAttnKernel(stand_in)), stand_in
    monkeypatch.setattr("hybrid_rl.models.attention.varlen.torch", SimpleNamespace(**vars(torch)))
    monkeypatch.setattr("hybrid_rl.models.attention.varlen.torch.ops", SimpleNamespace(aten=stand_in))
    return Backend("varlen", TorchKernel()), stand_in


@pytest.fixture
def flash_attn_3(monkeypatch):
    """PyTorch's switch to FlashAttention 3 on, over the stand-in under the package's names: operators fwd and bwd of
    flash_attn_3 with the arguments of its file flash_api.cpp. What PyTorch then runs on CUDA runs on the CPU here."""
    stand_in = StandIn()

    def fwd(
        q, k, v, k_new, v_new, qv, out, cu_q, cu_k, cu_k_new, used_q, used_k, max_q, max_k, page_table, batch_idx,
        leftpad, cos, sin, rotary_lengths, q_descale, k_descale, v_descale, scale, causal, left, right, chunk, softcap,
        interleaved, metadata, num_splits, pack_gqa, sm_margin,
    ):  # fmt: skip
        assert {k_new, v_new, qv, out, cu_k_new, used_q, used_k, page_table, leftpad, q_descale} == {None}
        assert (chunk, softcap) == (0, 0.0)
        out, lse = stand_in.forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, left, right)
        return out, lse, q.new_empty(0), q.new_empty(0)

    def bwd(
        grad, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, used_q, used_k, max_q, max_k, scale, causal, left, right,
        softcap, deterministic, sm_margin,
    ):  # fmt: skip
        assert (used_q, used_k, softcap) == (None, None, 0.0)
        found = stand_in.backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale, left, right)
        for mine, theirs in zip((dq, dk, dv), found, strict=True):
            mine.copy_(theirs)

    package = torch.library.Library("flash_attn_3", "FRAGMENT")
    package.define(f"fwd(Tensor q, Tensor k, Tensor v, {FA3_FORWARD}) -> (Tensor, Tensor, Tensor, Tensor)")
    package.define(f"bwd(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {FA3_BACKWARD}) -> ()")
    package.impl("fwd", fwd, "CPU")
    package.impl("bwd", bwd, "CPU")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    switch: Any = import_module("torch.nn.attention._fa3")
    here = torch.library.Library("aten", "IMPL")
    for name in ("forward", "backward"):
        monkeypatch.setattr(switch, f"_fa3_{name}_support_error", lambda *_: None)  # it asks for CUDA and bfloat16
    here.impl("_flash_attention_forward", switch._fa3_flash_attention_forward_impl_default, "CPU")
    here.impl("_flash_attention_backward", switch._fa3_flash_attention_backward_impl, "CPU")
    activate_flash_attention_impl("FA3")
    yield stand_in
    restore_flash_attention_impl()
    here._destroy()
    package._destroy()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_flash_attention_3_through_pytorchs_switch(flash_attn_3, layout):
    for chosen in OPTIONS.values():
        context = Backend("flash_attn_3", TorchKernel()).context(layout, "cpu")
        check_context(context, layout, chosen, "cpu", torch.float64, num_key_value_heads=1)
    assert flash_attn_3.calls


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_structure_of_the_cuda_backends(injected, layout):
    backend, _ = injected
    options = {**OPTIONS, **(SOFTCAP if backend.name == "flash_attn" else {})}
    for chosen in options.values():
        for num_key_value_heads in (1, 4):
            context = backend.context(layout, "cpu")
            check_context(context, layout, chosen, "cpu", torch.float64, num_key_value_heads=num_key_value_heads)


def test_calls_of_the_cuda_backends(injected):
    """Shared prompts: one causal call over all segments, one call of all completions against their prompts, without
    copies of keys; where a window cuts, prompts alone and completions with a copy."""
    backend, stand_in = injected
    layout = Layout((5, 7, 4), (2, 3, 6), (0, 0, 1))
    rows = inputs(layout, torch.float64)
    backend.context(layout, "cpu").attend(0, *rows, OPTIONS["plain"])
    everything, front, back = 27, 12, 11
    assert [call[0][0] for call in stand_in.calls] == [everything, back]
    assert [call[1][0] for call in stand_in.calls] == [everything, front]
    assert [call[2] for call in stand_in.calls] == [True, False]
    stand_in.calls.clear()
    backend.context(layout, "cpu").attend(0, *rows, AttentionOptions(window=4))
    assert [(call[0][0], call[1][0], call[3]) for call in stand_in.calls] == [(16, 16, 3), (11, 7 + 8 + 13, 3)]


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["window into the prompt"], SOFTCAP["all"]])
def test_a_poisoned_group_leaves_the_others_as_they_are(options):
    layout = LAYOUTS["groups of several sizes"]
    rows = inputs(layout, torch.float32)
    clean = PaddedAttention(layout).attend(0, *rows, options)
    bad = torch.zeros(layout.num_tokens, dtype=torch.bool)
    bad[40:41] = bad[105 + 12 : 105 + 16] = True  # the second group: its prompt, its two completions
    for tensor in rows:
        tensor[bad] = torch.nan
    poisoned = PaddedAttention(layout).attend(0, *rows, options)
    assert poisoned[bad].isnan().all()
    torch.testing.assert_close(poisoned[~bad], clean[~bad], rtol=0, atol=0)


def test_gradients_of_one_completion_stay_in_its_group():
    layout = LAYOUTS["groups of several sizes"]
    rows = [row.requires_grad_() for row in inputs(layout, torch.float64)]
    out = PaddedAttention(layout).attend(0, *rows, OPTIONS["plain"])
    second = 105 + 3  # the second completion of the first group
    _, key, _ = torch.autograd.grad(out[second : second + 9].square().sum(), rows)
    touched = key.flatten(1).abs().sum(1) > 0
    assert touched.nonzero()[:, 0].tolist() == [*range(40), *range(second, second + 9)]


@pytest.mark.parametrize("name", ["sdpa", "compiled", "varlen"])
def test_a_row_of_another_length_is_refused(name):
    layout = LAYOUTS["one group"]
    context = Backend(name, TorchKernel() if name == "varlen" else None).context(layout, "cpu")
    with pytest.raises(ModelError, match="planned for 51 tokens but got 3"):
        context.attend(0, *(torch.zeros(3, 4, 16) for _ in range(3)), AttentionOptions())


def test_values_of_another_size_than_queries():
    """As in multi-head latent attention: the slow path takes them."""
    layout = LAYOUTS["one group"]
    query, key, value = inputs(layout, torch.float64)
    context = PaddedAttention(layout)
    narrow = context.attend(0, query, key, value[..., :6], OPTIONS["plain"])
    wide = context.attend(0, query, key, value, OPTIONS["plain"])
    torch.testing.assert_close(narrow, wide[..., :6], rtol=0, atol=1e-12)
