"""Varlen kernels over pages: their arguments against the signatures of the libraries, their use against attention
written out."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.engines.inplace import paged_kernel
from hybrid_rl.engines.inplace.host_to_device import Tables
from hybrid_rl.engines.inplace.kv_cache import LayerShape, PagedCache
from hybrid_rl.engines.inplace.paged_attention import paged_attention
from hybrid_rl.engines.inplace.paged_kernel import PagedKernel
from hybrid_rl.models import AttentionOptions
from tests.support.inside.engines import without_operator
from tests.unit.engines.inplace.test_paged_attention import DECODE, OPTIONS, RAGGED, case, close, written_out

# flash-attn 2.7 and 2.8, flash_attn/flash_attn_interface.py
FLASH_ATTN_NAMES = {
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale"),
    *("causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "block_table"),
}


def over_pages(
    q: Tensor, k: Tensor, v: Tensor, starts: list[int], lengths: list[int], table: Tensor, settings: dict[str, Any]
) -> Tensor:
    """What both libraries promise, sequence by sequence."""
    left, right = settings["window_size"]
    assert settings["causal"] and (left, right) in ((-1, -1), (left, 0)) and left >= -1
    options = AttentionOptions(
        scale=settings["softmax_scale"], window=None if left < 0 else left + 1, softcap=settings["softcap"] or None
    )
    out = []
    for row, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        place = torch.arange(lengths[row])
        index = (table[row][place // k.shape[1]].long(), place % k.shape[1])
        query = torch.zeros(lengths[row], *q.shape[1:], dtype=torch.float64)
        query[lengths[row] - (end - start) :] = q[start:end]
        out.append(written_out(query, k[index].double(), v[index].double(), end - start, options))
    return torch.cat(out).to(q.dtype)


def vllm_stand_in(**given: Any) -> Tensor:
    assert given["max_seqlen_q"] >= max(given["cu_seqlens_q"].diff()) and given["fa_version"] in (2, 3)
    assert given["max_seqlen_k"] == max(given["seqused_k"])
    for name in ("cu_seqlens_q", "seqused_k", "block_table"):
        assert given[name].dtype == torch.int32 and given[name].stride(-1) == 1
    places = (given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist(), given["block_table"])
    return over_pages(given["q"], given["k"], given["v"], *places, given)


def flash_attn_stand_in(**given: Any) -> Tensor:
    assert {*given} <= FLASH_ATTN_NAMES
    lengths = given["cu_seqlens_k"].diff().tolist()
    assert given["max_seqlen_k"] == max(lengths)
    return over_pages(
        given["q"], given["k"], given["v"], given["cu_seqlens_q"].tolist(), lengths, given["block_table"], given
    )


KERNELS = {
    "vllm": PagedKernel(SimpleNamespace(flash_attn_varlen_func=vllm_stand_in), 3),
    "flash-attn": PagedKernel(SimpleNamespace(flash_attn_varlen_func=flash_attn_stand_in)),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["chunks", "decode"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_pass_over_pages_is_attention_written_out(kernel, lengths, options, monkeypatch):
    without_operator(monkeypatch)
    made = case(lengths, fill=0.0)
    form = paged_attention(made.cache, made.batch, Tables(torch.device("cpu")), pages=kernel)
    assert type(form).__name__ == "_PagedForm"
    close(made.attend(form, options), made.expected(options), torch.float32)


def signature(path: Path, function: str) -> set[str]:
    """Arguments of a function, read from its source."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    raise AssertionError(f"{path} has no {function}")


def test_vllm_takes_the_arguments_that_it_is_given(monkeypatch):
    """The source of whichever version is installed, read without importing it."""
    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("needs vLLM (make test)")
    path = Path(spec.submodule_search_locations[0]) / "vllm_flash_attn" / "flash_attn_interface.py"
    seen: set[str] = set()

    def function(**given: Any) -> Tensor:
        seen.update(given)
        return vllm_stand_in(**given)

    without_operator(monkeypatch)
    made = case(RAGGED, fill=0.0)
    pages = PagedKernel(SimpleNamespace(flash_attn_varlen_func=function), 2)
    made.attend(paged_attention(made.cache, made.batch, Tables(torch.device("cpu")), pages=pages), AttentionOptions())
    assert seen and seen <= signature(path, "flash_attn_varlen_func")
    assert signature(path, "is_fa_version_supported") == {"fa_version"}


def cache_of(device="cuda", dtype=torch.bfloat16, block_size=16, dims=(64, 64)):
    return PagedCache({0: LayerShape(2, *dims, dtype)}, 4, block_size, torch.device(device))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"block_size": 32}, True),
        ({"device": "cpu"}, False),
        ({"block_size": 8}, False),
        ({"dtype": torch.float32}, False),
        ({"dims": (64, 32)}, False),
        ({"dims": (68, 68)}, False),
        ({"dims": (288, 288)}, False),
    ],
    ids=str,
)
def test_which_caches_a_kernel_can_read(settings, expected):
    assert paged_kernel.can_read(cache_of(**settings), paged_kernel.VLLM_BLOCK) is expected


def test_which_library_is_used(monkeypatch, caplog):
    supported = {2, 3}
    functions = SimpleNamespace(is_fa_version_supported=lambda version: version in supported)
    package = SimpleNamespace()
    modules = {"flash_attn": package, "hybrid_rl.vllm.flash": SimpleNamespace(functions=lambda: functions)}
    for function in ("import_module", "import_apart"):
        monkeypatch.setattr(paged_kernel, function, modules.__getitem__)
    monkeypatch.setattr(paged_kernel.importlib.util, "find_spec", lambda name: object())
    choose = paged_kernel.paged_kernel
    assert choose(cache_of(), "varlen") == PagedKernel(functions, 3)
    supported.remove(3)
    assert choose(cache_of(), "varlen") == PagedKernel(functions, 2)
    assert choose(cache_of(), "flash_attn") == PagedKernel(functions, 2)
    assert choose(cache_of(block_size=256), "flash_attn") == PagedKernel(package)
    assert choose(cache_of(), "sdpa") is None and choose(cache_of(device="cpu"), "varlen") is None
    supported.clear()
    assert choose(cache_of(), "varlen") is None
    assert "vLLM's attention does not run on this device" in caplog.text
    monkeypatch.setattr(paged_kernel.importlib.util, "find_spec", lambda name: None)
    assert choose(cache_of(), "varlen") is None
