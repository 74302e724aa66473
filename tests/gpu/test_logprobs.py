"""The fused head in Triton on the device: against float64, and against the form in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import chunked_logprobs, runs_in_triton, token_logprobs
from tests.gpu import logprob_cases
from tests.gpu.device import cuda_only
from tests.gpu.logprob_cases import CASES, Case

pytestmark = cuda_only
# Relative to the largest value: ln p and entropy, gradients. A narrow logit, at most 2^3 here, may be rounded to the
# other side of what float64 gives, one step of 2^-8 or 2^-11 of it; gradients are kept in these bits too.
TOLERANCES = {torch.float32: (2e-6, 5e-6), torch.bfloat16: (1e-2, 2e-2), torch.float16: (2e-3, 3e-3)}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_equal_autograd_in_float64(case: Case, dtype: torch.dtype) -> None:
    if dtype != torch.float32 and case.scale > 1:
        case = dataclasses.replace(case, scale=1.5)  # rounding grows with it
    values, gradients = TOLERANCES[dtype]
    for name, gap in logprob_cases.gaps(dataclasses.replace(case, dtype=dtype), "cuda").items():
        assert gap < (gradients if name.startswith("grad") else values), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bfloat16_head_that_is_not_rounded(case: Case) -> None:
    """Gradients are rounded to bfloat16 once, at the end."""
    wide = dataclasses.replace(case, dtype=torch.bfloat16, in_float32=True)
    for name, gap in logprob_cases.gaps(wide, "cuda").items():
        assert gap < (4e-3 if name.startswith("grad") else 2e-6), name


def test_chunks_multiply_by_the_tensor_cores_without_rounding() -> None:
    hidden, weight, labels = head(512, 896, 32000)
    arguments: Any = (hidden, weight, None, labels, 0.8)
    found = measured(lambda: chunked_logprobs(*arguments, HeadOptions(in_float32=True)), (hidden, weight))[0]
    precise = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    expected = measured(lambda: chunked_logprobs(*precise, None, labels, 0.8, HeadOptions()), tuple(precise))[0]
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine.float(), theirs, rtol=0, atol=(1e-5 if place < 2 else 4e-3) * scale)


def test_the_backward_pass_in_ranges() -> None:
    for name, gap in logprob_cases.ranges_gaps("cuda").items():
        assert gap < TOLERANCES[torch.float32][name.startswith("grad")], name


def test_extremes() -> None:
    assert logprob_cases.huge_logits("cuda") == [0.0] * 6
    assert logprob_cases.summed_gradient("cuda") == pytest.approx([300 / 512, -300 / 512], rel=4e-3)
    assert logprob_cases.unknown_label("cuda") == [False, True, False]


def head(rows: int, depth: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and head in bfloat16 that give logits around 1; labels."""
    generator = torch.Generator("cuda").manual_seed(5)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    hidden = torch.randn(rows, depth, **kind).requires_grad_()
    weight = (torch.randn(vocab, depth, **kind) * depth**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,), device="cuda", generator=generator)


def measured(function: Callable[[], tuple[Tensor, Tensor]], leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], int]:
    """Outputs and gradients of a call, and the most bytes it held above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = function()
    grads = torch.autograd.grad(outputs[0].sum() + 0.1 * outputs[1].sum(), leaves)
    torch.cuda.synchronize()
    return [*outputs, *grads], torch.cuda.max_memory_allocated() - before


def test_a_real_head_against_chunks_in_less_memory() -> None:
    hidden, weight, labels = head(4096, 896, 151936)
    assert runs_in_triton(hidden.device, hidden.dtype)
    arguments: Any = (hidden, weight, None, labels, 0.8, HeadOptions())
    chunks, chunk_bytes = measured(lambda: chunked_logprobs(*arguments), (hidden, weight))
    fused, fused_bytes = measured(lambda: token_logprobs(*arguments), (hidden, weight))
    for mine, theirs in zip(fused, chunks, strict=True):
        assert mine.dtype == theirs.dtype
        scale = float(theirs.float().abs().max())
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=2e-2 * scale)
        # Rounding is not biased: on average far less than the worst.
        assert float((mine.float() - theirs.float()).abs().mean()) < 2e-3 * scale
    assert fused_bytes < chunk_bytes
    assert fused_bytes < 4 * 4096 * 151936  # the logits alone


def test_a_head_of_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    depth, vocab = 16384, 2**17 + 2**12
    hidden, weight, labels = head(130, depth, vocab)
    with torch.no_grad():
        weight[: 2**17] = 0  # all that is not 0 lies behind
    labels[:] = vocab - 1
    arguments: Any = (hidden, weight, None, labels, 1.0, HeadOptions())
    fused = measured(lambda: token_logprobs(*arguments), (hidden,))[0]
    chunks = measured(lambda: chunked_logprobs(*arguments), (hidden,))[0]
    for mine, theirs in zip(fused, chunks, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))
