"""The base model of an adapter is known again by its weights, wherever it is and in whatever dtype it was loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybrid_rl.checkpoint.base_model import base_hashes, base_of, check_base, config_numbers, keep_base
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.models.lora.folder import save_adapter
from hybrid_rl.models.lora.inject import init_adapters, inject
from hybrid_rl.models.lora.peft_config import peft_config_of
from tests.support.tiny import build_model

ALONE: Any = {"rank": 0, "gather": lambda value: [value]}


def hashes(module: Any) -> dict[str, str]:
    return base_hashes(module, module.dtype, **ALONE)


def with_adapters(module: Any) -> Any:
    inject(module, peft_config_of({"r": 2, "target_modules": "all-linear"}))
    init_adapters(module, seed=3)
    return module


def test_a_hash_is_of_the_values_and_names_of_the_base_weights() -> None:
    module = build_model()
    plain = hashes(module)
    assert plain.keys() == {"float32", "bfloat16"}
    assert hashes(with_adapters(build_model())) == plain
    # Rounded to bfloat16 the weights of a float32 and a bfloat16 run are the same.
    half = hashes(build_model(dtype=torch.bfloat16))
    assert half == {"bfloat16": plain["bfloat16"]} and plain["bfloat16"] != plain["float32"]
    with torch.no_grad():
        one, other = module.model.layers[0].self_attn.k_proj.weight, module.model.layers[0].self_attn.v_proj.weight
        kept = one.clone()
        one.copy_(other), other.copy_(kept)  # the same numbers at other names
        swapped = hashes(module)
        other.copy_(one), one.copy_(kept)
        assert hashes(module) == plain
        one[0, 0] += 1e-6  # less than bfloat16 can tell
    changed = hashes(module)
    assert len({plain["float32"], swapped["float32"], changed["float32"]}) == 3
    assert plain["bfloat16"] == changed["bfloat16"] != swapped["bfloat16"]
    check_base({"path": "x", "hashes": plain}, half, "the adapter x")
    with pytest.raises(CheckpointError, match="the adapter x was trained on other weights .* Its base is here"):
        check_base({"path": "here", "hashes": plain}, changed, "the adapter x")


def test_another_config_is_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """What changes numbers, not how the base is stored; keys that only one version of transformers has do not count."""
    module = build_model()
    record = keep_base(module, module.dtype, "a/name", tmp_path, print, **ALONE)
    stored = json.loads(json.dumps(record)) | {"path": "x"}
    stored["config"]["of_yesterday"] = 1
    module.config.eos_token_id, module.config.transformers_version = 7, "0"
    check_base(stored, hashes(module), "the adapter x", config_numbers(module))
    assert not caplog.text
    module.config.rms_norm_eps = 0.1
    check_base(stored, hashes(module), "the adapter x", config_numbers(module))
    assert "another config.json: rms_norm_eps 1e-06 -> 0.1. The" in caplog.text


def test_a_base_that_is_nowhere_is_written_once_and_any_other_is_named(tmp_path: Path) -> None:
    folder, run, tokenizers = tmp_path / "model", tmp_path / "run", []
    build_model().save_pretrained(folder)

    def keep(module: Any, known: str | None = None) -> dict[str, Any]:
        return keep_base(module, module.dtype, known, run, tokenizers.append, **ALONE)

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # written in float32
    assert keep(with_adapters(loaded))["path"] == str(folder)
    assert keep(build_model(), "a/name")["path"] == "a/name" and keep(build_model(), str(folder))["path"] == str(folder)
    assert not run.exists()

    with torch.no_grad():
        loaded.model.norm.weight += 1  # no longer what is in the folder
    record = keep(loaded)
    kept = Path(record["path"])
    assert kept.parent == run and record["hashes"] == hashes(loaded)
    found = AutoModelForCausalLM.from_pretrained(kept)
    assert found.dtype == torch.bfloat16 and hashes(found) == record["hashes"]
    written = (kept / "model.safetensors").stat().st_mtime_ns
    assert keep(loaded) == record and (kept / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in run.iterdir()] == [kept.name] and len(tokenizers) == 1

    save_adapter(loaded, run / "checkpoint-1", torch.bfloat16, base=record["path"])
    assert base_of(run / "checkpoint-1") == str(kept)
    moved = run.rename(tmp_path / "elsewhere")
    assert base_of(moved / "checkpoint-1") == str(moved / kept.name)
    shutil.rmtree(moved / kept.name)
    with pytest.raises(ModelError, match=f"belongs to the model {kept}, which is not there"):
        base_of(moved / "checkpoint-1")


def test_a_base_with_an_adapter_from_transformers_is_written_with_its_own_names(tmp_path: Path) -> None:
    """load_adapter() leaves the renamings of the adapter's names (base_model.model.) behind, which the base has not."""
    save_adapter(with_adapters(build_model()), tmp_path / "adapter", torch.float32, base="unknown")
    module = build_model()
    module.load_adapter(str(tmp_path / "adapter"))
    kept = keep_base(module, module.dtype, None, tmp_path / "run", lambda _: None, **ALONE)["path"]
    assert set(load_file(f"{kept}/model.safetensors")) <= set(build_model().state_dict())
