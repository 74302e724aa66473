"""Sharded modules: every rank reads its own part, and the folder that they write is that of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from hybrid_rl.models import saving
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.models.saving import save_weights
from hybrid_rl.training.sharding.fsdp import ShardOptions, device_mesh, shard
from hybrid_rl.weights.boxes import Box, local_box, local_tensor
from hybrid_rl.weights.loading import load_weights
from hybrid_rl.weights.sources import FolderSource, ObjectSource
from tests.distributed.ranks import run_ranks
from tests.unit.models.checkpoints import NAMES, build_stored, everything

pytestmark = pytest.mark.slow
MANY = ["qwen2 tied", "llama", "gemma3", "gpt2", "qwen3 moe", "gpt-neox", "deepseek v3"]


def sharded(recipe: ModelRecipe, dtype: torch.dtype, num_ranks: int, dp_replicate: int = 1) -> Any:
    module = build_on_meta(recipe, dtype)
    options = ShardOptions(dp_replicate, num_ranks // dp_replicate, dtype)
    shard(module, device_mesh(options, "cpu"), options)
    load_weights(module, recipe.source, "cpu")
    return module


def check_parts(module: Any, whole: dict[str, torch.Tensor]) -> None:
    """Every part is bit for bit the part of the whole: parameters in fp32, buffers in the model's dtype."""
    found = everything(module)
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        expected = whole[name][local_box(tensor)].to(tensor.dtype)
        assert torch.equal(local_tensor(tensor), expected), name


def load_and_save(rank: int, num_ranks: int, root: Path, names: list[str], dp_replicate: int) -> list[int]:
    disable_progress_bar()
    read = []
    for name in names:
        recipe = ModelRecipe.of_folder(str(root / name))
        whole = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
        module = sharded(recipe, torch.bfloat16, num_ranks, dp_replicate)
        check_parts(module, everything(whole))
        if whole.config.tie_word_embeddings:
            assert module.get_input_embeddings().weight is module.get_output_embeddings().weight
        read.append(recipe.source.num_bytes_read)
        target = root / f"{name} from {num_ranks}"
        target.mkdir(exist_ok=True)
        save_weights(module, target, torch.bfloat16, is_writer=rank == 0, max_shard_bytes=20_000)
        check_parts(module, everything(whole))
        # Resuming reads into the memory that is there, which the optimizer knows.
        parts = [local_tensor(parameter) for parameter in module.parameters()]
        for part in parts:
            part.zero_()
        load_weights(module, FolderSource(str(root / name)), "cpu")
        check_parts(module, everything(whole))
        assert [part.data_ptr() for part in parts] == [local_tensor(p).data_ptr() for p in module.parameters()]
    return read


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("num_ranks", "dp_replicate", "names"),
    [
        (3, 1, ["qwen2 tied", "qwen3 moe"]),
        pytest.param(2, 1, MANY, marks=pytest.mark.sweep),
        pytest.param(4, 2, MANY[:1], marks=pytest.mark.sweep),
        pytest.param(3, 1, MANY, marks=pytest.mark.sweep),
    ],
)
def test_ranks_read_their_parts_and_write_the_whole(
    tmp_path: Path, num_ranks: int, dp_replicate: int, names: list[str]
) -> None:
    assert set(names) <= set(NAMES)
    for name in names:
        build_stored(name).save_pretrained(tmp_path / name)
    read = run_ranks(load_and_save, num_ranks, tmp_path, names, dp_replicate, deadline_seconds=280)
    for index, name in enumerate(names):
        stored = tensors_of(tmp_path / name)
        total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        buffers = (num_ranks - 1) * 100  # those of DeepSeek, which are not sharded
        per_rank = [num_bytes[index] for num_bytes in read]
        assert dp_replicate * total <= sum(per_rank) <= dp_replicate * total + buffers
        # Uneven dims: five experts over two ranks are three and two.
        assert max(per_rank) <= 1.2 * total / num_ranks * dp_replicate
        module = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        module.save_pretrained(tmp_path / "expected" / name)
        expected, written = tensors_of(tmp_path / "expected" / name), tensors_of(tmp_path / f"{name} from {num_ranks}")
        assert written.keys() == expected.keys()
        for key, tensor in expected.items():
            assert written[key].dtype == tensor.dtype and torch.equal(written[key], tensor), key


# ------------------------------------------------------------------------------------------------------ live modules


def load_objects(rank: int, num_ranks: int, recipe: ModelRecipe, whole: dict[str, torch.Tensor]) -> None:
    recipe.source.get = lambda data: data  # type: ignore[attr-defined]
    module = sharded(recipe, torch.float32, num_ranks)
    check_parts(module, whole)
    assert not module.get_input_embeddings().weight.requires_grad


def test_a_live_module_travels_through_a_store() -> None:
    module = build_stored("qwen3 moe")
    module.get_input_embeddings().weight.requires_grad_(False)
    source = ObjectSource.of(module, lambda data: data.copy())
    whole = {name: tensor.detach() for name, tensor in everything(module).items()}
    run_ranks(load_objects, 2, ModelRecipe.of_module(module, source), whole)


# ------------------------------------------------------------------------------------------------------------ memory


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class WatchedSource(FolderSource):
    """Measures the process after every read, the moment at which most is in memory."""

    peak = 0

    def read(self, name: str, box: Box) -> torch.Tensor:
        found = super().read(name, box)
        self.peak = max(self.peak, anonymous_bytes())
        return found


def peaks(rank: int, num_ranks: int, folder: str) -> tuple[int, int, int]:
    """Of loading, over what was there before; bytes read; peak of saving, over the loaded module."""
    source = WatchedSource(folder)
    recipe = ModelRecipe(source, path=folder)
    build_on_meta(recipe, torch.float32)  # what the first call imports is not weights
    before = anonymous_bytes()
    module = sharded(recipe, torch.float32, num_ranks)
    loaded, peak_of_saving = anonymous_bytes(), 0

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal peak_of_saving
        found = whole(*args, **options)
        peak_of_saving = max(peak_of_saving, anonymous_bytes())
        return found

    whole = saving.whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "whole", watched)
        target = Path(folder) / "saved"
        save_weights(module, target, torch.float32, is_writer=rank == 0, max_shard_bytes=20_000_000)
    return source.peak - before, source.num_bytes_read, peak_of_saving - loaded


def test_no_rank_ever_holds_the_full_model(tmp_path: Path) -> None:
    """200 MB over three ranks: loading, a rank's peak is its 67 MB and less than a few parameters (8 MB the largest);
    saving, a few of them with what gloo takes, and on the writer a file of 20 MB."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=11,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    module: Any = LlamaForCausalLM(config)
    full = sum(p.numel() * 4 for p in module.parameters())
    assert full > 190e6
    module.save_pretrained(tmp_path)
    del module
    for rank, (loading, read, saving_) in enumerate(run_ranks(peaks, 3, str(tmp_path), deadline_seconds=280)):
        assert read == pytest.approx(full / 3, rel=0.01)
        assert full / 3 * 0.9 < loading < full / 3 + 30e6
        assert saving_ < (90e6 if rank == 0 else 70e6)
    assert tensors_of(tmp_path).keys() == tensors_of(tmp_path / "saved").keys()


# ---------------------------------------------------------------------------------------------------------- failures


def save_into_nothing(rank: int, num_ranks: int, folder: str, missing: str) -> str:
    module = sharded(ModelRecipe.of_folder(folder), torch.float32, num_ranks)
    try:
        save_weights(module, Path(missing), torch.float32, is_writer=rank == 0, max_shard_bytes=10_000)
    except Exception as error:
        return type(error).__name__
    return "done"


def test_a_writer_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    build_stored("qwen2 tied").save_pretrained(tmp_path / "model")
    (tmp_path / "file").touch()
    outcomes = run_ranks(save_into_nothing, 2, str(tmp_path / "model"), str(tmp_path / "file" / "folder"))
    assert outcomes[0] != "done" and outcomes[1] == "done"
