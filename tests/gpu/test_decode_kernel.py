"""The Triton kernel for paged decode attention on the device."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.decode_cases import CASES, PLANS, Case, build, gap, plan_problem, reference
from tests.gpu.device import cuda_only

pytestmark = cuda_only
# Of the largest value. bf16 keeps 8 bits of the probabilities and of the result, fp16 11.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_agrees_with_float64(case: Case, dtype: torch.dtype) -> None:
    assert gap(case, "cuda", dtype) < TOLERANCES[dtype]


def test_long_contexts_cut_into_many_parts() -> None:
    case = Case("long", lengths=(4097, 3, 0, 2500), num_heads=14, num_key_heads=2, dim=64)
    assert gap(case, "cuda", torch.float32) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_parts_tile_what_every_sequence_sees(plan) -> None:
    assert plan_problem(*plan, device="cuda") is None


def test_a_captured_call_follows_tables_and_lengths_that_change() -> None:
    from hybrid_rl.engines.inplace.triton_decode import paged_decode  # Triton is there only with CUDA

    case = Case("graph", lengths=(90, 33, 70, 5), spare_table=4)
    arguments = build(case, "cuda", torch.float32)
    # Cached keys are NaN behind each context: all of the cache is to be readable here.
    for name in ("key_cache", "value_cache"):
        arguments[name] = torch.randn_like(arguments[name])
    paged_decode(**arguments)  # compiled outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode(**arguments)
    for lengths in ((1, 2, 3, 4), (0, 33, 0, 5), (90, 0, 16, 1)):
        arguments["context_length"].copy_(torch.tensor(lengths, dtype=torch.int32))
        arguments["block_table"][:, :1] = arguments["block_table"][:, :1].roll(1, 0)
        arguments["query"].normal_()
        graph.replay()
        expected = reference(arguments)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=5e-6 * float(expected.abs().max()))


def test_offsets_beyond_two_to_the_31_elements() -> None:
    from hybrid_rl.engines.inplace.triton_decode import paged_decode

    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    num_blocks = (2**31 + 2**24) // (16 * 128)
    cache = torch.zeros(num_blocks, 16, 1, 128, dtype=torch.bfloat16, device="cuda")
    cache[-1].normal_()
    arguments = {
        "query": torch.randn(1, 1, 128, dtype=torch.bfloat16, device="cuda"),
        "block_table": torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        "context_length": torch.tensor([13], dtype=torch.int32, device="cuda"),
    }
    small = {"key_cache": cache[-1:].clone(), "value_cache": cache[-1:].clone()}
    expected = paged_decode(**arguments, **small)
    arguments["block_table"] += num_blocks - 1
    torch.testing.assert_close(paged_decode(**arguments, key_cache=cache, value_cache=cache), expected, rtol=0, atol=0)
