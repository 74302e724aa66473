"""Tests on a CUDA device; where there is none they are not collected.

HYBRID_RL_TEST_DEVICE=cpu runs them on the CPU all the same: a check of the tests themselves on a machine without a GPU.
What only CUDA has is then skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.device import CHOSEN, DEVICE
from tests.unit.conftest import make_trainer, model_folder, records  # noqa: F401  fixtures

HERE = Path(__file__).parent
if not torch.cuda.is_available() and not CHOSEN:
    collect_ignore = [path.name for path in HERE.glob("test_*.py")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs the device."""
    for item in items:
        if item.path.parent == HERE and DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def peak_memory(record_testsuite_property: Callable[[str, object], None]) -> Iterator[None]:
    """The most bytes that tensors of this process held, into the JUnit report that tests/gpu/run.py reads."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        record_testsuite_property("peak_tensor_bytes", torch.cuda.max_memory_allocated())


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """fp32 products in fp32: TF32 keeps 10 bits, and a comparison would then be of TF32, not of this library."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
