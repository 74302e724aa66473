"""A machine whose GPUs PyTorch cannot use: said, and never answered by a run on the CPU that nobody asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.config import load_config, resolve
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.run import gpus
from hybrid_rl.run.prepare import device_of, find_hardware, warn_of_devices
from tests.support.inside.commands import machine_facts, no_gpu_line
from tests.support.tiny import build_model

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Feb 27 16:22:05 UTC 2024\nGCC version:  gcc 12.3.0"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version:  gcc 12.3.0"
MISMATCH = "Unexpected error from cudaGetDeviceCount(). Error 802:\n system not yet initialized"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this machine one whose torch, a CUDA build for `cuda`, finds no GPU, with device files and a driver."""

    def make(*names: str, driver: str = "", cuda: str | None = "13.0", visible: str | None = None) -> None:
        for name in names:
            (tmp_path / name).touch()
        if driver:
            (tmp_path / "version").write_text(driver)
        monkeypatch.setattr(gpus, "DEVICES", tmp_path)
        monkeypatch.setattr(gpus, "DRIVER", tmp_path / "version")
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: cuda is not None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        def init() -> None:
            raise RuntimeError(MISMATCH)

        monkeypatch.setattr(torch.cuda, "init", init)

    return make


def settled(**keys: Any) -> tuple[str, int]:
    config, given = load_config(None, keys)
    hardware = find_hardware(config)
    resolved = resolve(config, given, hardware=hardware)
    warn_of_devices(resolved, hardware, None)
    assert resolved.num_ranks != "auto"
    return resolved.model.device, resolved.num_ranks


@pytest.mark.parametrize(
    ("driver", "cuda", "reason"),
    [
        (DRIVER.format("550.54.15"), "13.0", "driver 550.54.15 is too old for CUDA 13.0, which needs 580 or newer"),
        (OPEN_DRIVER.format("570.124.06"), "13.2", "driver 570.124.06 is too old for CUDA 13.2"),
        (DRIVER.format("470.82"), "12.8", "driver 470.82 is too old for CUDA 12.8, which needs 525 or newer"),
        # New enough: what CUDA itself says. The same if the version is not known.
        (DRIVER.format("580.65.06"), "13.0", "Error 802: system not yet initialized; check the output of nvidia-smi"),
        (DRIVER.format("525.60.13"), "12.8", "Error 802"),
        ("", "13.0", "Error 802"),
    ],
)
@pytest.mark.parametrize("keys", [{}, {"num_ranks": 8}, {"num_ranks": "auto"}, {"dtype": "float32"}], ids=str)
def test_gpus_that_cannot_be_used_are_an_error(
    node: Any, driver: str, cuda: str, reason: str, keys: dict[str, Any]
) -> None:
    node("nvidia0", "nvidia1", "nvidiactl", driver=driver, cuda=cuda)
    with pytest.raises(ConfigError, match="no GPU can be used: torch .* cannot use those of this machine: ") as caught:
        settled(**keys)
    assert reason in str(caught.value) and str(caught.value).endswith("or set device=cpu to train on the CPU")
    assert reason in no_gpu_line()


def test_device_cpu_is_what_was_asked_for(node: Any, caplog: pytest.LogCaptureFixture) -> None:
    node("nvidia0", driver=DRIVER.format("550.54.15"))
    assert settled(device="cpu") == ("cpu", 1)
    assert settled(device="cpu", num_ranks=2) == ("cpu", 2)
    assert not caplog.records


@pytest.mark.parametrize(
    ("names", "machine", "message"),
    [
        (("nvidia0",), {"driver": DRIVER.format("550.54.15")}, ".* driver 550.54.15 is too old"),
        ((), {"cuda": None}, r"torch \S+ is built without CUDA; install a build"),
        ((), {"visible": "7"}, r"torch \S+ finds none with CUDA_VISIBLE_DEVICES='7'"),
    ],
)
def test_device_cuda_says_why_there_is_none(node: Any, names: Any, machine: dict[str, Any], message: str) -> None:
    node(*names, **machine)
    with pytest.raises(ConfigError, match=f"device=cuda, but there is no GPU: {message}"):
        settled(device="cuda")


def test_a_module_on_another_kind_of_device() -> None:
    with pytest.raises(ModelError, match="the module is on meta; move it to the CPU or to a CUDA device"):
        device_of(build_model().to("meta"))


def test_a_gpu_that_no_longer_has_the_number_asked_for_is_an_error(node: Any) -> None:
    node("nvidia0", driver=DRIVER.format("580.65.06"), visible="7")
    with pytest.raises(ConfigError, match=r"cannot use those of this machine \(CUDA_VISIBLE_DEVICES='7'\)"):
        settled()


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_no_error(node: Any, visible: str, caplog: pytest.LogCaptureFixture) -> None:
    node("nvidia0", driver=DRIVER.format("550.54.15"), visible=visible)
    assert settled() == ("cpu", 1)
    assert not caplog.records
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES='{visible}' hides all"):
        settled(device="cuda")


@pytest.mark.parametrize("names", [(), ("nvidiactl", "nvidia-uvm", "nvidia-caps")])
def test_a_machine_without_gpus_takes_the_cpu(
    node: Any, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    node(*names)
    assert settled() == ("cpu", 1)
    assert not caplog.records
    assert no_gpu_line() == "none, so: CPU only"


@pytest.mark.parametrize(
    ("names", "cuda", "warning"),
    [
        # A container without --gpus, or a batch job that asked for none: the driver is there, the devices are not.
        ((), "13.0", "no GPU can be opened; a container or a job has to ask for them"),
        (("nvidia0",), None, "is built without CUDA"),
    ],
)
def test_gpus_that_were_overlooked_are_a_warning(
    node: Any, names: tuple[str, ...], cuda: str | None, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    node(*names, driver=DRIVER.format("580.65.06"), cuda=cuda)
    with caplog.at_level(logging.WARNING):
        assert settled() == ("cpu", 1)
    (record,) = caplog.records
    assert warning in record.getMessage() and "the run takes the CPU" in record.getMessage()
    assert warning in no_gpu_line()


@pytest.mark.parametrize(("reason", "is_named"), [(None, False), ("there are no kernels for cuda", True)])
def test_doctor_names_kernels_that_were_not_built(
    reason: str | None, is_named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(native, "why_missing", lambda device_type: reason)
    facts = machine_facts(tmp_path)
    assert facts["accelerators"] == "H100 with 80.0 GiB"
    assert ("kernels for CUDA" in facts) == is_named
    assert not is_named or "nvidia-cuda-nvcc" in facts["kernels for CUDA"]
