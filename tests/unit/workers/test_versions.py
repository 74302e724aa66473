"""Versions of the policy in files: what is written is what is read, base weights travel once, damage is found."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

from hybrid_rl.errors import ConfigError, HandoffError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.lora.factors import low_rank_changes
from hybrid_rl.models.lora.inject import init_adapters, inject
from hybrid_rl.models.lora.model_weights import weights_of
from hybrid_rl.resharding.handoff.base import alone
from hybrid_rl.weights.plain import plain
from hybrid_rl.weights.sources import named_weights
from hybrid_rl.workers.policy_versions import (
    PolicyReader,
    fill,
    require_folder,
    require_room,
    write_policy,
)
from tests.support.tiny import build_model

DTYPE = torch.float32
SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}


def adapted(seed: int = 0, **form: Any) -> Any:
    """A model whose adapters change something."""
    module = build_model(**SHAPE)
    inject(module, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "o_proj"], **form))
    init_adapters(module, seed)
    torch.manual_seed(seed + 1)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
            assert ".lora_" in name or ".modules_to_save." in name
    return module


def write(root: Path, version: int, module: Any, **changes: Any) -> None:
    given: dict[str, Any] = {"is_embedded": False, "probe": None, "writes_base": True, "rank": 0, "gather": alone}
    write_policy(root, version, CausalLM(module), **{**given, **changes})


def modelled(module: Any) -> Any:
    """What a model is to versions, of any module."""
    return SimpleNamespace(module=module, weights=weights_of(module))


def reader(root: Path) -> PolicyReader:
    return PolicyReader(root, DTYPE, reader=0, num_readers=1, gather=alone)


@pytest.mark.parametrize("is_embedded", [True, False])
def test_all_weights_and_the_probe(tmp_path: Path, is_embedded: bool) -> None:
    module, probe = build_model(**SHAPE), torch.rand(4, 7)
    write(tmp_path, 3, module, is_embedded=is_embedded, probe=probe)
    found = reader(tmp_path)
    other = build_model(1, **SHAPE)
    with found.read(3) as (source, changes), source.opened(3):
        assert found.probe is not None and torch.equal(found.probe, probe) and not changes
        num_bytes = fill(CausalLM(other), source)
    weights = named_weights(module)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in named_weights(other).items())
    assert num_bytes == sum(tensor.nbytes for tensor in weights.values())
    write(tmp_path, 4, module, is_embedded=is_embedded)
    with found.read(4):
        assert found.probe is None
    with pytest.raises(HandoffError, match="does not hold policy version 3"), found.read(3):
        pass


def test_adapters_of_an_embedded_engine_travel_alone(tmp_path: Path) -> None:
    module, other = adapted(), adapted(5)
    write(tmp_path, 1, module, is_embedded=True)
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]
    with reader(tmp_path).read(1) as (source, changes):
        assert not changes
        fill(CausalLM(other), source)
        names = {sharded.spec.name for sharded in source.layout().tensors}
    assert names == {*weights_of(module).moving()} and not any("base_layer" in name for name in names)
    weights = named_weights(module)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in named_weights(other).items())
    with reader(tmp_path).read(1) as (source, _), pytest.raises(HandoffError, match="differ in .* weights"):
        fill(CausalLM(build_model(**SHAPE)), source)


def test_other_engines_read_the_base_once_and_the_factors_of_each_version(tmp_path: Path) -> None:
    module, found = adapted(use_dora=True), reader(tmp_path)
    with plain(module):
        base = {name: tensor.clone() for name, tensor in named_weights(module).items()}
    for version in (1, 2):
        write(tmp_path, version, module, writes_base=version == 1)
        expected = low_rank_changes(module, DTYPE)
        with found.read(version) as (source, changes), source.opened(version):
            assert {sharded.spec.name for sharded in source.layout().tensors} == {*base}
            assert all(torch.equal(source.full(name), tensor) for name, tensor in base.items())
        assert changes.keys() == expected.keys()
        for name, change in changes.items():
            known = expected[name]
            assert (change.scale, change.is_transposed, change.dtype) == (4.0, False, DTYPE)
            assert torch.equal(change.a, known.a) and torch.equal(change.b, known.b)
            assert change.row_factor is not None and known.row_factor is not None
            assert torch.equal(change.row_factor, known.row_factor)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1
    written = {path.name for path in (tmp_path / "version-00000002").glob("*.safetensors")}
    assert len(written) == 1 and [path.name for path in (tmp_path / "base").iterdir()] == ["version-00000000"]


def test_modules_that_are_trained_whole_travel_with_every_version(tmp_path: Path) -> None:
    module, found = adapted(modules_to_save=["norm"]), reader(tmp_path)
    write(tmp_path, 1, module)
    with plain(module):
        trained = copy.deepcopy(module.model.norm.weight)
    with found.read(1) as (source, changes):
        assert torch.equal(source.full("model.norm.weight"), trained) and len(changes) == 2
    assert not (tmp_path / "base").exists()


def test_damaged_files_and_other_machines_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, adapted())
    (path,) = (tmp_path / "version-00000001").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(HandoffError, match="is damaged: its content is not what was written"):
        reader(tmp_path).read(1).__enter__()
    with pytest.raises(ConfigError, match="hands weights over through .*nowhere"):
        require_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_shared_memory_must_hold_two_versions(
    spare: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear layer of 6 numbers and a bias of 2, in float32: 32 bytes. A frozen one of 4 numbers counts as a base."""
    module = torch.nn.Linear(3, 2)
    usage = shutil.disk_usage(tmp_path)

    def with_free(num_bytes: int) -> Any:
        return type(usage)(usage.total, usage.used, num_bytes)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: with_free(64 + spare))
    for writes_base in (False, True):  # nothing is frozen
        with nullcontext() if fits else pytest.raises(ConfigError, match=r"two versions .*--ipc=host, or --shm-size="):
            require_room(tmp_path, modelled(module), writes_base=writes_base)
    frozen = torch.nn.Sequential(module, torch.nn.Linear(2, 2, bias=False).requires_grad_(False))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: with_free(2 * 48 + 16 + spare))
    with nullcontext() if fits else pytest.raises(ConfigError, match="hands weights over through"):
        require_room(tmp_path, modelled(frozen), writes_base=True)
    (tmp_path / "version-00000001").mkdir()
    require_room(tmp_path, modelled(frozen), writes_base=True)  # what is replaced makes room
