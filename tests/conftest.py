"""What all tests share: no hubs, no windows, fixed seeds, and markers that skip with their reason."""

from __future__ import annotations

import ctypes.util
import gc
import importlib.util
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# Before any test imports them: hubs are never asked, and pictures are drawn without a display.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.support.plugins.no_pictures import draw_nothing  # noqa: E402

# A run that finds GPUs which it cannot use is an error, and a warning where a container hides them; tests take the CPU.
if not torch.cuda.is_available() and Path("/proc/driver/nvidia/version").exists():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

VLLM = Path(__file__).parent / "vllm"
# Functions that take long by measurement (`make durations`); others are marked `slow` by hand.
SLOW = frozenset((Path(__file__).parent / "slow_tests.txt").read_text().split())
MARKED_SLOW = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)
TEST_FUNCTION = re.compile(r"^def (test_\w+)", re.MULTILINE)

# Tests make many objects and keep few: going through them as often as Python does by itself is a tenth of their time.
gc.set_threshold(100_000, 20, 50)
# Started in the background of a shell's script, by nohup and by some CI, a program ignores Ctrl-C, and so does what it
# starts. Tests of Ctrl-C are about programs in the foreground; those of the others say so.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Models of a few thousand parameters: more threads only wait for each other, on a busy machine many times longer.
torch.set_num_threads(1)
if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine may do without
    from hypothesis import settings

    # How long an example takes is the machine's business. `make test` has the same examples each time; `make sweep`
    # draws new ones.
    settings.register_profile("fixed", deadline=None, derandomize=True)
    settings.register_profile("drawn", deadline=None)
    settings.load_profile("fixed")


def without_vllm() -> str:
    """Why vLLM cannot be used here; empty where it can. It is not imported for that, which takes ten seconds."""
    if importlib.util.find_spec("vllm") is None:
        return "needs vllm: `make vllm` (CPU, Linux on x86-64) or constraints-cuda.txt (GPU)"
    if sys.platform == "linux" and ctypes.util.find_library("numa") is None:
        return "vllm needs libnuma.so.1 of the system (Debian and Ubuntu: libnuma1)"
    return ""


class WithoutVLLM(pytest.Module):
    """A file that is skipped before it is imported."""

    def collect(self) -> NoReturn:
        raise pytest.skip.Exception(without_vllm(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """The files of tests/vllm import vLLM, or what does."""
    if module_path.parent == VLLM and without_vllm():
        return WithoutVLLM.from_parent(parent, path=module_path)
    return None


def without_slow(config: pytest.Config) -> bool:
    """Whether `-m` leaves out what is slow. That is the larger half: it is then not collected, which takes seconds."""
    return "not slow" in config.getoption("markexpr")


def slow_alone(config: pytest.Config) -> bool:
    """Whether `-m` asks for what is slow, and for nothing else."""
    return config.getoption("markexpr").startswith("slow and ")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file is not imported if nothing of it is to run: all of it is slow, or nothing."""
    if not (collection_path.is_file() and collection_path.name.startswith("test_")):
        return None
    if not (without_slow(config) or slow_alone(config)):
        return None
    text, name = collection_path.read_text(), collection_path.relative_to(config.rootpath).as_posix()
    tests = TEST_FUNCTION.findall(text)
    are_slow = [f"{name}::{test}" in SLOW for test in tests]
    if slow_alone(config):
        return True if tests and not any(are_slow) and "mark.slow" not in text else None
    return True if MARKED_SLOW.search(text) or (tests and all(are_slow)) else None


def pytest_pycollect_makeitem(collector: pytest.Module, name: str) -> list[pytest.Item] | None:
    """No cases of a slow function, of which some have hundreds, if none is to run."""
    return [] if f"{collector.nodeid}::{name}" in SLOW and without_slow(collector.config) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by these marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow, and skips what this machine cannot run; `-ra` prints why."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if reason := without_vllm():
        missing["vllm"] = reason
    for item in items:
        if item.nodeid.partition("[")[0] in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.path.parent == VLLM:
            item.add_marker(pytest.mark.vllm)
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What all tests imported stays: no collection of garbage need go through it again, which takes up to a second."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What earlier files have left is not gone through again either: after some thousand tests a collection, by a test,
    the library or an engine that goes to sleep, takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same global random state, in whatever order tests run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[pytest.MonkeyPatch]:
    """Runs draw no pictures, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        yield patch


@pytest.fixture
def pictures(no_pictures: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of this test draw them."""
    no_pictures.undo()
    yield
    draw_nothing(no_pictures)
