"""The sampling kernels in Triton's interpreter on the CPU, against exact arithmetic and PyTorch's form."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.sampling_cases import CASES
from tests.support.cuda.interpreted_triton import importable, needs_triton, run_cases
from tests.support.kills.forked import Forked
from tests.unit.triton_forms import sampling_forms

pytestmark = [pytest.mark.slow, needs_triton]


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """Triton can be imported while the tests of this file run."""
    with importable():
        yield


@pytest.fixture(scope="module")
def problems(forked: Forked) -> dict[str, str | None]:
    """All cases in a process of their own: whether Triton interprets is decided when it is imported."""
    return run_cases(forked, "sampling_cases")


@pytest.mark.parametrize("name", [*CASES, "flat in bfloat16", "steep in bfloat16", "broken rows"])
def test_tokens_are_where_their_uniform_numbers_fall(problems: dict[str, str | None], name: str) -> None:
    assert problems[name] is None


def test_the_bound_of_a_draw_by_hand() -> None:
    from hybrid_rl.engines.triton_sampling import draw_error  # only where Triton is there

    # ln 152,064 = 11.932: 2 (3.5 * 11.932 + 4) / 2^23
    assert draw_error(152_064) == pytest.approx(2 * 45.762 / 8_388_608, rel=1e-4)
    assert draw_error(1) == draw_error(2) == pytest.approx(2 * (3.5 * math.log(2) + 4) / 8_388_608)


BAD = {
    "logits are torch.float64": {"logits": torch.zeros(2, 5, dtype=torch.float64)},
    "logits are torch.float32 [5]": {"logits": torch.zeros(5)},
    "the last dim contiguous": {"logits": torch.zeros(2, 10)[:, ::2]},
    "temperature is torch.float64 [2]": {"temperature": torch.ones(2, dtype=torch.float64)},
    "uniform is torch.float32 [2]": {"uniform": torch.ones(2)},
    "uniform is torch.float64 [3]": {"uniform": torch.ones(3, dtype=torch.float64)},
    "out is torch.int64 [2, 2]": {"out": torch.zeros(2, 2, dtype=torch.int64)},
    "temperature is on meta, logits on cpu": {"temperature": torch.ones(2, device="meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_arguments_that_do_not_go_together_are_refused(message: str) -> None:
    from hybrid_rl.engines.triton_sampling import choose

    good = {
        "logits": torch.zeros(2, 5),
        "temperature": torch.ones(2),
        "uniform": torch.full((2,), 0.5, dtype=torch.float64),
    }
    with pytest.raises(ValueError) as caught:
        choose(**(good | BAD[message]))
    assert message in str(caught.value)


def test_what_is_compiled_depends_on_the_vocabulary_only() -> None:
    forms = list(sampling_forms())
    assert len(forms) == len({form.name for form in forms}) == 8
    for form in forms:
        assert {*form.constants} <= {"BLOCK", "BLOCKS"}
        assert {*form.signature} | {*form.constants} == {*form.kernel.arg_names}
