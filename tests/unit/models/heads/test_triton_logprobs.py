"""The fused head in Triton's interpreter on the CPU, against log_softmax and autograd in float64."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rl.models.heads import logprobs
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import token_logprobs
from tests.gpu.logprob_cases import CASES, NARROW, Case, build, reference
from tests.support.cuda.interpreted_triton import importable, needs_triton, run_cases
from tests.support.kills.forked import Forked

# ln p and entropy are float32 numbers around 5. Gradients are rounded to the dtype: 11 and 8 bits.
TOLERANCES = {torch.float32: (1e-6, 2e-6), torch.float16: (2e-6, 1e-3), torch.bfloat16: (2e-6, 8e-3)}


@pytest.fixture(scope="module")
def found(forked: Forked) -> dict[str, Any]:
    """The results of all cases, from a separate process: whether Triton interprets is decided when it is imported."""
    return run_cases(forked, "logprob_cases")


@pytest.fixture
def path() -> Iterator[None]:
    """Triton can be imported in the test."""
    with importable():
        yield


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *NARROW, Case("ranges", bias=True)], ids=lambda case: case.name)
def test_values_and_gradients_equal_autograd_in_float64(found: dict[str, Any], case: Case) -> None:
    values, gradients = TOLERANCES[case.dtype]
    if case.in_float32:
        gradients = 4e-3  # one rounding to 8 bits, at the end
    gaps = found[case.name]
    wanted = {"hidden", "weight", *(["bias"] if case.bias else [])} - set(case.frozen)
    assert gaps.keys() == {"logprobs", "entropy", *(f"grad {name}" for name in wanted)}
    for name, gap in gaps.items():
        assert gap < (gradients if name.startswith("grad") else values), (name, gaps)


@needs_triton
@pytest.mark.slow
def test_huge_logits_stay_finite(found: dict[str, Any]) -> None:
    assert found["huge logits"] == [0.0] * 6


@needs_triton
@pytest.mark.slow
def test_the_gradient_of_a_bf16_head_is_summed_in_fp32(found: dict[str, Any]) -> None:
    # d ln p_0 / d w_0 = (1 - 1/2) * 2^-8 for each row.
    assert found["summed gradient"] == pytest.approx([300 / 512, -300 / 512], rel=4e-3)


@needs_triton
@pytest.mark.slow
def test_rows_of_the_gradient_are_aligned_as_the_kernel_is_compiled_for(found: dict[str, Any]) -> None:
    for columns, stride in found["gradient rows"].values():
        assert columns == 37
        assert stride % 16 == 0, found["gradient rows"]  # what Triton looks for in an argument at a launch


@needs_triton
@pytest.mark.slow
def test_a_label_outside_of_the_vocabulary_gives_nan(found: dict[str, Any]) -> None:
    assert found["unknown label"] == [False, True, False]


def test_the_reference_on_numbers_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8."""
    leaves = [torch.ones(1, 1), torch.tensor([1.0, 2.0, 5.0]).log()[:, None], None]
    logprob, entropy = reference(Case("by hand"), leaves, torch.tensor([1]))
    assert (logprob.item(), entropy.item()) == pytest.approx((-1.3862944, 0.9002561))


@needs_triton
def test_no_rows_give_no_values_and_zero_gradients(path: None) -> None:
    from hybrid_rl.models.heads.triton_logprobs import linear_logprobs  # only where Triton is there

    leaves, _, _ = build(Case("none", bias=True), "cpu")
    hidden, weight, bias = (leaf for leaf in leaves if leaf is not None)
    outputs = linear_logprobs(hidden[:0], weight, bias, torch.zeros(0, dtype=torch.int64), 1.0)
    assert [(tuple(output.shape), output.dtype) for output in outputs] == [((0,), torch.float32)] * 2
    for gradient in torch.autograd.grad(sum(outputs).sum(), (hidden, weight, bias)):
        assert gradient.count_nonzero() == 0


BAD = {
    "hidden is torch.float64": {"hidden": torch.zeros(4, 8, dtype=torch.float64)},
    "hidden is torch.float32 [4]": {"hidden": torch.zeros(4)},
    "hidden, torch.float32 [4, 8] on cpu; give torch.float32 [9, 8] there": {"weight": torch.zeros(9, 7)},
    "weight: torch.float16": {"weight": torch.zeros(9, 8, dtype=torch.float16)},
    "weight: torch.float32 [0, 8] on cpu does not go with hidden": {"weight": torch.zeros(0, 8)},
    "give torch.float32 [9] there, contiguous": {"bias": torch.zeros(8)},
    "bias: torch.float32 [9]": {"bias": torch.zeros(18)[::2]},
    "labels: torch.int32 [4]": {"labels": torch.zeros(4, dtype=torch.int32)},
    "labels: torch.int64 [3]": {"labels": torch.zeros(3, dtype=torch.int64)},
    "weight: torch.float32 [9, 8] on meta": {"weight": torch.zeros(9, 8, device="meta")},
    "temperature=0.0 must be above 0": {"temperature": 0.0},
    "softcap=-1.0 must be above 0": {"options": HeadOptions(softcap=-1.0)},
}


@needs_triton
@pytest.mark.parametrize("message", BAD)
def test_arguments_that_do_not_go_together_are_refused(path: None, message: str) -> None:
    from hybrid_rl.models.heads.triton_logprobs import linear_logprobs  # only where Triton is there

    arguments: dict[str, Any] = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(9, 8), "bias": None}
    arguments |= {"labels": torch.zeros(4, dtype=torch.int64), "temperature": 1.0} | BAD[message]
    with pytest.raises(ValueError) as caught:
        linear_logprobs(**arguments)
    assert message in str(caught.value)


def test_the_head_is_handed_over_where_the_kernels_run(monkeypatch: Any) -> None:
    calls = []

    def linear_logprobs(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(arguments)
        return torch.full((4,), 1.0), torch.full((4,), 2.0)

    stand_in = SimpleNamespace(linear_logprobs=linear_logprobs)
    monkeypatch.setitem(sys.modules, "hybrid_rl.models.heads.triton_logprobs", stand_in)
    monkeypatch.setattr(logprobs, "runs_in_triton", lambda device, dtype: True)
    arguments = (torch.zeros(4, 8), torch.zeros(9, 8), None, torch.zeros(4, dtype=torch.int64), 0.7)
    options = HeadOptions(scale=0.5, softcap=3.0, in_float32=True)
    outputs = token_logprobs(*arguments, options)
    assert [output[0].item() for output in outputs] == [1.0, 2.0]
    assert calls == [(*arguments, options)]


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "triton", "expected"),
    [
        ("cpu", torch.bfloat16, (9, 0), True, "in chunks of rows (on cpu)"),
        ("cuda", torch.float32, (9, 0), True, "in chunks of rows (in torch.float32)"),
        ("cuda", torch.bfloat16, (7, 5), True, "in chunks of rows (before Ampere)"),
        ("cuda", torch.bfloat16, (9, 0), None, "in chunks of rows (without Triton)"),
        ("cuda", torch.bfloat16, (8, 0), True, "by fused Triton kernels"),
        ("cuda", torch.float16, (9, 0), True, "by fused Triton kernels"),
    ],
)
def test_which_form_runs_is_chosen_and_logged_once(
    device: str, dtype: torch.dtype, capability: Any, triton: Any, expected: str, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(logprobs.importlib.util, "find_spec", lambda name: triton)
    logprobs.runs_in_triton.cache_clear()
    with caplog.at_level(logging.DEBUG, "hybrid_rl"):
        chosen = {logprobs.runs_in_triton(torch.device(device), dtype) for _ in range(3)}
    logprobs.runs_in_triton.cache_clear()
    assert chosen == {expected.startswith("by fused")}
    assert [record.message.partition("computed ")[2] for record in caplog.records] == [expected]
