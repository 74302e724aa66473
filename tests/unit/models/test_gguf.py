"""GGUF files: what is converted, once, and what cannot be."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl import Trainer
from hybrid_rl.errors import ModelError
from hybrid_rl.models import load_model, load_tokenizer
from hybrid_rl.models.model_loading import model_folder
from hybrid_rl.models.saving import check_saved, save_weights
from hybrid_rl.models.tokenizer import save_tokenizer
from tests.support.tiny import spread
from tests.support.tiny_gguf import write_llama

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybrid_rl" / "gguf"


def test_a_file_is_converted_once_into_what_it_holds(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "own" / "tiny.gguf"
    file.parent.mkdir()
    held = write_llama(file)
    folder = Path(model_folder(str(file)))
    assert folder.parent == cache
    saved = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in saved.items()} == dict.fromkeys(held, torch.float32)
    assert all(torch.equal(saved[name], held[name]) for name in held)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder(str(file.parent)) == str(folder)  # a folder that has nothing else
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert load_model(str(file), dtype="bfloat16").dtype == torch.bfloat16
    assert load_tokenizer(str(file)).decode(load_tokenizer(str(file)).encode("1+2=")) == "1+2="
    (folder / "model.safetensors").unlink()
    assert load_model(str(file), dtype="float32").dtype == torch.float32  # written again
    os.utime(file, (1, 1))  # another file by all appearances
    assert model_folder(str(file)) != str(folder)


def test_what_lies_beside_a_file_is_not_of_it(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    ids = load_tokenizer(str(tmp_path / "tiny.gguf")).encode("12+3=")
    rules = json.loads((Path(model_folder(str(tmp_path / "tiny.gguf"))) / "tokenizer.json").read_text())
    rules["model"]["vocab"] |= {str(digit): (digit + 1) % 10 for digit in range(10)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    os.utime(tmp_path / "tiny.gguf", (1, 1))
    assert load_tokenizer(str(tmp_path / "tiny.gguf")).encode("12+3=") == ids


def test_what_is_saved_of_it_any_other_can_load(tmp_path: Path) -> None:
    file = str(tmp_path / "tiny.gguf")
    write_llama(Path(file))
    module, tokenizer = load_model(file, dtype="float32"), load_tokenizer(file)
    check_saved(module, tokenizer, torch.float32)
    save_weights(module, tmp_path / "saved", torch.float32)
    save_tokenizer(tokenizer, tmp_path / "saved")
    shutil.rmtree(tmp_path / "cache")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert load_tokenizer(str(tmp_path / "saved")).encode("1+2=") == tokenizer.encode("1+2=")
    again = load_model(str(tmp_path / "saved"), dtype="float32").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a.gguf", "b.gguf"], "has 2 GGUF files; name one: a.gguf, b.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "is a part of a model; join the parts"),
    ],
)
def test_folders_of_several_files(tmp_path: Path, names: list[str], says: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=says):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert model_folder(str(tmp_path)) == str(tmp_path)


def test_files_that_cannot_be_converted(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "part.gguf", leaves_out="layers.1.mlp.up_proj")
    with pytest.raises(ModelError, match=r"cannot load GGUF file .*part\.gguf.*1 missing keys, e\.g\. model.*up_proj"):
        model_folder(str(tmp_path / "part.gguf"))
    write_llama(tmp_path / "other.gguf", architecture="rwkv6")
    with pytest.raises(ModelError, match=r"cannot load GGUF file .*other\.gguf.*rwkv6"):
        model_folder(str(tmp_path / "other.gguf"))
    (tmp_path / "text.gguf").write_text("no weights")
    with pytest.raises(ModelError, match=r"cannot load GGUF file .*text\.gguf"):
        model_folder(str(tmp_path / "text.gguf"))
    with pytest.raises(ModelError, match="there is no GGUF file"):
        model_folder("d/none.gguf")
    assert not any(cache.iterdir())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'hybrid_rl\[gguf\]'"):
        model_folder(str(tmp_path / "part.gguf"))


def test_a_run_saves_what_any_other_can_load(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    rows = [{"prompt": f"{number}+1="} for number in range(4)]
    keys = {
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "output_dir": str(tmp_path / "runs"),
    }
    with Trainer(str(tmp_path / "tiny.gguf"), spread, rows, max_steps=1, **keys) as trainer:
        trainer.fit()
        checkpoint = trainer.save()
    assert "quantization_config" not in (checkpoint / "config.json").read_text()
    shutil.rmtree(tmp_path / "cache")
    with Trainer(str(checkpoint), spread, rows, max_steps=2, resume=str(checkpoint), **keys) as trainer:
        trainer.fit()
