"""Paged decode attention in Triton's interpreter on the CPU, against plain PyTorch.

bfloat16 is for a GPU only: the interpreter multiplies the bits of bfloat16 matrices as if they were integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.decode_cases import CASES, PLANS, SWEPT, build, reference
from tests.support.cuda.interpreted_triton import importable, needs_triton, run_cases
from tests.support.kills.forked import Forked
from tests.unit.triton_forms import MODEL_HEADS, decode_forms

pytestmark = [pytest.mark.slow, needs_triton]


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """Triton can be imported while the tests of this file run."""
    with importable():
        yield


@pytest.fixture(scope="module")
def found(forked: Forked) -> dict[str, Any]:
    """The ordinary cases."""
    return run_cases(forked, "decode_cases")


@pytest.mark.sweep
def test_the_cases_between_the_ordinary_ones(forked: Forked) -> None:
    gaps = run_cases(forked, "decode_cases", "swept")["gaps"]
    assert gaps.keys() == SWEPT
    assert max(gaps.values()) < 2e-6, gaps


@pytest.mark.parametrize("name", [*(case.name for case in CASES if case.name not in SWEPT), "float16"])
def test_the_kernel_gives_what_attention_over_the_gathered_context_gives(found: dict[str, Any], name: str) -> None:
    # float16 keeps 11 bits, float32 24; sums are taken in float32 in both.
    assert found["gaps"][name] < (2e-3 if name == "float16" else 2e-6)


def test_parts_tile_what_every_sequence_sees(found: dict[str, Any]) -> None:
    """As worked out by hand in PLANS: long sequences in many parts, short ones in one, none for what is not there."""
    assert found["plans"] == [None] * len(PLANS)


def test_the_reference_on_a_case_worked_by_hand() -> None:
    """Two keys with scores ln 3 and 0: weights 3/4 and 1/4; with a window of 1 the last value alone."""
    arguments = build(CASES[0], "cpu", torch.float32) | {
        "query": torch.tensor([[[1.0, 0.0]]]),
        "key_cache": torch.tensor([[[[3.0, 5.0]], [[0.0, 9.0]]]]).log().nan_to_num(neginf=0.0),
        "value_cache": torch.tensor([[[[4.0, 0.0]], [[8.0, 4.0]]]]),
        "block_table": torch.tensor([[0]], dtype=torch.int32),
        "context_length": torch.tensor([2], dtype=torch.int32),
        "scale": 1.0,
    }
    assert reference(arguments)[0, 0].tolist() == pytest.approx([5.0, 1.0])
    assert reference(arguments | {"window": 1})[0, 0].tolist() == [8.0, 4.0]
    # softcap 1: scores tanh(ln 3) = 0.8 and 0
    capped = reference(arguments | {"softcap": 1.0})[0, 0, 1].item()
    assert capped == pytest.approx(4 / (1 + torch.tensor(0.8).exp().item()))


BAD = {
    "query is torch.int64": {"query": torch.zeros(4, 4, 32, dtype=torch.int64)},
    "query is torch.float32": {"query": torch.zeros(4, 32)},
    "key_cache is torch.float16": {"key_cache": torch.zeros(9, 16, 2, 32, dtype=torch.float16)},
    "do not go together": {"value_cache": torch.zeros(9, 16, 1, 32)},
    "head dims 257 and 32": {
        "query": torch.zeros(4, 4, 257),
        "key_cache": torch.zeros(9, 16, 2, 257),
        "value_cache": torch.zeros(9, 16, 2, 32),
    },
    "5 query heads over 2 key heads": {"query": torch.zeros(4, 5, 32)},
    "block_table is torch.int64": {"block_table": torch.zeros(4, 5, dtype=torch.int64)},
    "give int32 [B] with B = 4": {"context_length": torch.zeros(3, dtype=torch.int32)},
    "the last dim of query has stride 2": {"query": torch.zeros(4, 4, 64)[..., ::2]},
    "on meta, query on cpu": {"block_table": torch.zeros(4, 5, dtype=torch.int32, device="meta")},
    "window=0 must be at least 1": {"window": 0},
    "softcap=0.0 must be above 0": {"softcap": 0.0},
}


@pytest.mark.parametrize("message", BAD)
def test_arguments_that_do_not_go_together_are_refused(message: str) -> None:
    from hybrid_rl.engines.inplace.triton_decode import paged_decode  # only where Triton is there

    with pytest.raises(ValueError) as caught:
        paged_decode(**(build(CASES[0], "cpu", torch.float32) | BAD[message]))
    assert message in str(caught.value)


def test_keys_and_values_that_do_not_fit_the_caches_are_refused() -> None:
    from hybrid_rl.engines.inplace.triton_decode import paged_store  # only where Triton is there

    arguments = build(CASES[0], "cpu", torch.float32)
    caches = [arguments[name] for name in ("key_cache", "value_cache", "block_table", "context_length")]
    key, value = torch.zeros(2, 4, 2, 32)
    with pytest.raises(ValueError, match="do not go with caches of 2 heads"):
        paged_store(key.repeat(1, 2, 1), value.repeat(1, 2, 1), *caches)
    with pytest.raises(ValueError, match="do not go with caches of 2 heads"):
        paged_store(key, value[..., :16], *caches)
    with pytest.raises(ValueError, match="value is torch.float16 on cpu; give torch.float32"):
        paged_store(key, value.half(), *caches)


SHAPE_ONLY = ("BLOCK_SIZE", "GROUP", "ROWS", "DIM", "DIM_TILE", "VALUE_DIM", "VALUE_TILE", "HAS_SOFTCAP", "LOG2_E")
FIXED = ("TOKENS", "MIN_PART", "MOST_PARTS", "TILE")


def test_what_is_compiled_depends_on_the_heads_of_a_model_and_not_on_the_batch() -> None:
    forms = list(decode_forms())
    assert len(forms) == len({form.name for form in forms}) == 1 + 2 * 3 * len(MODEL_HEADS)
    for form in forms:
        assert {*form.constants} <= {*SHAPE_ONLY, *FIXED}
        assert {*form.signature} | {*form.constants} == {*form.kernel.arg_names}
        assert not {*form.signature} & {*form.constants}
