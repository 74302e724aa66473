"""Every name of torch, vLLM, transformers and Ray that the package uses is there; this runs on the newest versions and,
by `make pins`, on the oldest."""

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from hybrid_rl.compat import torch_fsdp as fsdp2
from hybrid_rl.vllm import versions as vllm_versions
from tests.pins import names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OLD_TORCH = torch.__version__.startswith("2.11.")
OLD_VLLM = (vllm_versions.installed_version() or "").startswith("0.25.1")


def tabled() -> set[str]:
    """Names that the tables say are not here."""
    found = [set(row.names) for row in fsdp2.DIFFERENCES.values() if row.in_newest == OLD_TORCH]
    if importlib.util.find_spec("vllm") is not None:
        rows = vllm_versions.DIFFERENCES.values()
        found += [set(row.names) for row in rows if row.in_newest == OLD_VLLM]
    return set().union(*found)


def missing_here() -> list[tuple[names.Use, str]]:
    return list(names.missing(ROOT, ["hybrid_rl"]))


def test_every_name_that_the_package_uses_is_there_or_in_a_table() -> None:
    """In a fork, for what is imported on the way, vLLM above all, changes the process; much is imported already."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        missing = pool.submit(missing_here).result()
    lines = [f"{use.path}:{use.line}: {what}" for use, what in missing if what not in tabled()]
    assert lines == []
    # A row about a name that nobody uses, or that is there after all, is out of date.
    assert {what for _, what in missing} == tabled()


SABOTAGE = """
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shardd
from torch.nn import functional as F


def unknown(unit, tensor: torch.Tensor, text: str):
    unit.set_reduce_scatter_unused_paramz(True, recurse=False)
    unit._get_fsdp_state()._fsdp_param_groupz
    unit.set_requires_gradient_sync(True)
    dist.new_group([0], use_local_synchronisation=True)
    dist.new_group([0], use_local_synchronization=True)
    F.softmax(tensor, dim=-1, dimension=2)
    functools.partial(dist.new_group, rankz=[0])
    torch.mm(tensor, tensor, out_dtyp=torch.float32)
    torch.mm(tensor, tensor, out_dtype=torch.float32)
    torch.ops.aten.no_such_operator(tensor)
    return text.splitlines()


class Known:
    def __init__(self, mesh: DeviceMesh | None):
        self.mesh = mesh
        self.unit: FSDPModule = None

    def use(self):
        torch = self.mesh
        made = DeviceMesh("cpu", [0], mesh_dimension_names=("a",))
        made.no_such_mesh_method()
        return torch.anything, made.get_group(mesh_dim=0), self.unit.unshards(), self.mesh.ndim
"""


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    (tmp_path / "used.py").write_text(SABOTAGE)
    found = [(use.line, what) for use, what in names.missing(tmp_path, ["used.py"])]
    mesh, fsdp = "torch.distributed.device_mesh.DeviceMesh", "torch.distributed.fsdp"
    assert sorted(what for _, what in found) == sorted(
        [
            f"{fsdp}.fully_shardd",
            "set_reduce_scatter_unused_paramz",
            "_fsdp_param_groupz",
            "torch.distributed.new_group(use_local_synchronisation=)",
            "torch.nn.functional.softmax(dimension=)",
            "torch.distributed.new_group(rankz=)",
            "torch.mm(out_dtyp=)",
            "torch.ops.aten.no_such_operator",
            f"{mesh}(mesh_dimension_names=)",
            f"{mesh}.no_such_mesh_method",
            f"{fsdp}.FSDPModule.unshards",
            "anything",
        ]
    )
