"""Each private name of another library is there: whoever updates one sees first, by name, what has moved."""

from __future__ import annotations

import importlib.util
import inspect
import re
import types
from pathlib import Path

import pytest
import torch

from hybrid_rl.compat import ray as ray_names
from hybrid_rl.compat import torch as torch_names
from hybrid_rl.compat import torch_fsdp as fsdp
from hybrid_rl.compat import transformers as transformers_names
from hybrid_rl.compat import vllm
from tests.architecture.source import defined_names, private_uses, read_module
from tests.pins import names

ROOT = Path(__file__).parents[3]

TABLES = (torch_names, fsdp, ray_names, transformers_names, vllm)
# Set on an optimizer by the schedule that wraps it: no source says `self._opt_called`. See test_torch.py.
SET_FROM_OUTSIDE = {"torch.optim.Optimizer._opt_called"}
IN_2_13_ONLY = {name for name in fsdp.NAMES if name.rpartition(".")[2] in fsdp.DIFFERENCES["has_several_groups"].names}


@pytest.mark.parametrize("name", [*torch_names.NAMES, *fsdp.NAMES, *ray_names.NAMES, *transformers_names.NAMES])
def test_a_name_is_there(name: str) -> None:
    if name in SET_FROM_OUTSIDE or (name in IN_2_13_ONLY and torch.__version__.startswith("2.11.")):
        return
    called, _, keyword = name.rstrip(")").partition("(")
    if keyword:
        assert f'"{keyword}"' in inspect.getsource(names.resolve(called)), f"{name} has moved"
    assert names.resolve(called) is not names.ABSENT, f"{name} has moved"


@pytest.mark.parametrize("name", vllm.NAMES)
def test_a_name_of_vllm_is_there(name: str) -> None:
    """In the source of its module: importing vLLM would change this process."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("needs vllm: `make vllm`")
    *module, attribute = (part for part in name.split(".")[1:] if not part[0].isupper())
    path = Path(*found.submodule_search_locations or (), *module)
    source = path.with_suffix(".py")
    if not source.exists():
        compiled = [*path.parent.glob(f"{path.name}.*.so")]
        if not compiled:
            pytest.skip(f"{path.name} is compiled for CUDA only")
        source = compiled[0]
    assert re.search(rf"\b{attribute}\b", source.read_text(errors="ignore")), f"{name} has moved"


@pytest.mark.parametrize("module", TABLES, ids=lambda module: module.__name__)
def test_a_file_says_why_it_uses_a_name(module: types.ModuleType) -> None:
    """Every private name of a file is in its table, and every name of the table is used."""
    read = read_module(ROOT, Path(str(module.__file__)))
    used = {name for _, name in private_uses(read)} - set(defined_names(read))
    told = {part for name in module.NAMES for part in re.split(r"[.()]", name)}
    told |= set(getattr(module, "UNDECLARED_NAMES", ()))
    assert used - told == set()
    before, _, rest = read.text.partition("NAMES = {")
    words = set(re.findall(r"\w+", before + rest.partition("\n}")[2]))
    assert {re.split(r"[.(]", name.rstrip(")"))[-1] for name in module.NAMES} - words == set()
