"""Where models go on a machine with GPUs, which are pretended: up to the point where weights would be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2ForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.config import load_config, resolve
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import ConfigError
from hybrid_rl.models.lora import model_weights
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.rewards import RewardModelEntry
from hybrid_rl.run import choice, start
from hybrid_rl.training.sharding import build
from hybrid_rl.workers.reward_model import build_reward_model
from tests.support.tiny import build_model

GPU = torch.device("cuda:1")
Make = Callable[..., Trainer]
Gpus = Callable[..., None]
Loads = list[dict[str, Any]]


class Loaded(Exception):
    """Here weights would be loaded, or a rank would begin."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Pretend GPUs, of which the second is the user's current one."""

    def pretend(count: int = 2, *, bfloat16: bool = True, is_built: bool = True) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Pretended 9000")
        properties = SimpleNamespace(total_memory=80_000_000_000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)

    return pretend


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loads:
    """What the loader of named models and the rank are handed: the first model says that it lies where it was asked to
    lie, and the rank does not begin. With what the run folder says by then."""
    handed: Loads = []

    def load(path: str, *, dtype: str, device: torch.device, **_: Any) -> Any:
        (folder,) = (tmp_path / "runs").iterdir()
        written: Any = OmegaConf.load(folder / "config.yaml")
        handed.append({"dtype": dtype, "device": device, "written": dict(written.model), "ranks": written.num_ranks})
        monkeypatch.setattr(Qwen2ForCausalLM, "device", device)
        return build_model(dtype=getattr(torch, dtype))

    def begin(role: str, make_worker: Any, device: torch.device) -> None:
        handed.append({"rank on": device})
        raise Loaded

    monkeypatch.setattr(choice, "load_model", load)
    monkeypatch.setattr(start, "load_model", load)
    monkeypatch.setattr(start, "LocalBackend", begin)
    return handed


@pytest.mark.parametrize(
    ("count", "keys", "device", "dtype"),
    [
        (2, {}, GPU, "bfloat16"),
        (2, {"num_ranks": 1, "dtype": "float32"}, GPU, "float32"),
        (2, {"device": "cpu"}, torch.device("cpu"), "float32"),
        (0, {"num_ranks": "auto"}, torch.device("cpu"), "float32"),
        (1, {"num_ranks": "auto"}, GPU, "bfloat16"),
    ],
)
def test_a_named_model_goes_to_the_gpu(
    gpus: Gpus, loads: Loads, make_trainer: Make, model_folder: Path, count: int, keys: Any, device: Any, dtype: str
) -> None:
    """With all other models after it, and the run folder says so."""
    gpus(count)
    with pytest.raises(Loaded):
        make_trainer(str(model_folder), **keys)
    loaded, rank = loads
    assert (loaded["device"], loaded["dtype"], rank) == (device, dtype, {"rank on": device})
    assert (loaded["written"]["device"], loaded["written"]["dtype"]) == (device.type, dtype)
    assert loaded["ranks"] == 1


def test_a_teacher_goes_where_the_policy_goes(gpus: Gpus, loads: Loads, make_trainer: Make, model_folder: Path) -> None:
    gpus()
    with pytest.raises(Loaded):
        make_trainer(str(model_folder), None, algorithm="distillation", teacher_path=str(model_folder))
    policy, teacher, _ = loads
    assert policy == teacher and teacher["device"] == GPU and teacher["dtype"] == "bfloat16"


@pytest.mark.parametrize("role", ["critic", "reward model", "reference"])
def test_models_of_recipes_go_to_the_device_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, role: str
) -> None:
    """In the dtype of the run."""
    handed: list[tuple[Any, Any]] = []

    def load(module: Any, source: Any, device: Any) -> None:
        handed.append((module.dtype, device))
        raise Loaded

    monkeypatch.setattr(model_weights, "load_weights", load)
    config = resolve(load_config(None, {"dtype": "bfloat16"})[0])
    context, recipe = RankContext(device=GPU), ModelRecipe.of_folder(str(model_folder))
    with pytest.raises(Loaded):
        if role == "critic":
            build.build_critic(recipe, config, context)
        elif role == "reference":
            build.build_model(recipe, config, context, is_trained=False)
        else:
            build_reward_model(RewardModelEntry("rm", str(model_folder)), config, context)
    assert handed == [(torch.bfloat16, GPU)]


@pytest.mark.parametrize(
    ("module_device", "keys", "told"),
    [("cpu", {}, 1), ("cpu", {"device": "cpu"}, 0), ("cpu", {"device": "auto"}, 1), ("cuda:1", {}, 0)],
)
def test_a_module_that_is_passed_stays(
    gpus: Gpus,
    loads: Loads,
    make_trainer: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module_device: str,
    keys: dict[str, Any],
    told: int,
) -> None:
    """Where it is and what it is; that a GPU is idle is said once, with a remedy."""
    gpus(bfloat16=False)  # which is of no interest to a module in float32
    monkeypatch.setattr(Qwen2ForCausalLM, "device", torch.device(module_device))
    with caplog.at_level(logging.WARNING, "hybrid_rl"), pytest.raises(Loaded):
        make_trainer(build_model(), **keys)
    assert loads == [{"rank on": torch.device(module_device)}]
    lines = [record.message for record in caplog.records if record.name == "hybrid_rl"]
    assert len(lines) == told and all('pass module.to("cuda")' in line and "on the CPU" in line for line in lines)


def test_a_gpu_without_bfloat16_is_told(
    gpus: Gpus,
    loads: Loads,
    make_trainer: Make,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus(bfloat16=False)
    with caplog.at_level(logging.WARNING, "hybrid_rl"), pytest.raises(Loaded):
        make_trainer(str(model_folder))
    assert "dtype=float32: Pretended 9000 has no hardware support for bfloat16" in caplog.messages
    with pytest.raises(ConfigError, match="dtype=bfloat16, but Pretended 9000 has no hardware support for it"):
        make_trainer(str(model_folder), dtype="bfloat16")
