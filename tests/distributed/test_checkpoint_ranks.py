"""Checkpoints of any number of ranks, read at any other, bit for bit; written by all or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hybrid_rl.checkpoint.background import BackgroundWrite
from hybrid_rl.checkpoint.manifest import check_checkpoint
from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, read_optimizer_into, read_state
from hybrid_rl.checkpoint.writing import begin_checkpoint, write_checkpoint
from hybrid_rl.errors import CheckpointError
from hybrid_rl.weights.boxes import local_box, local_tensor
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import gather

pytestmark = pytest.mark.slow

# Even, uneven, smaller than the number of ranks (some ranks hold nothing), scalar, without elements.
SHAPES = {"even.weight": (6, 4), "uneven.weight": (5, 3), "few.weight": (1, 7), "bias": (2,), "one": (), "none": (0, 3)}


def values(kind: str, name: str) -> Tensor:
    """The whole tensor: numbers that no other one has."""
    shape = SHAPES[name]
    start = 1000 * list(SHAPES).index(name) + 10_000 * ["exp_avg", "exp_avg_sq", "master"].index(kind)
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def state_of(mesh: DeviceMesh | None, *, filled: bool) -> dict[str, Any]:
    """An optimizer's state, plain or sharded; zeros if it is to be filled."""

    def tensor(kind: str, name: str) -> Tensor:
        whole = values(kind, name) if filled else torch.zeros(SHAPES[name])
        if mesh is None or not whole.dim():
            return whole
        return distribute_tensor(whole, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])

    kinds = {kind: {name: tensor(kind, name) for name in SHAPES} for kind in ("exp_avg", "exp_avg_sq", "master")}
    steps = {name: torch.tensor(7.0 if filled else 0.0) for name in SHAPES}
    return {**kinds, "step": steps, "schedule": {"last_epoch": 7 if filled else 0}}


def check(state: dict[str, Any]) -> None:
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        for name, tensor in state[kind].items():
            assert torch.equal(local_tensor(tensor), values(kind, name)[local_box(tensor)]), (kind, name)
    assert state["schedule"] == {"last_epoch": 7} and all(step == 7 for step in state["step"].values())


def read_and_write(rank: int, num_ranks: int, root: Path, earlier: list[str]) -> None:
    meshes = {
        f"{num_ranks}": init_device_mesh("cpu", (num_ranks,)),
        f"{num_ranks} copies": init_device_mesh("cpu", (num_ranks, 1)),
    }
    for name, mesh in meshes.items():
        for folder in earlier:
            state = state_of(mesh, filled=False)
            check(read_optimizer_into(root / folder, state))
            check({**state, "schedule": {"last_epoch": 7}})

        def save_model(folder: Path) -> None:
            if rank == 0:
                (folder / "weights").write_text("w")

        state = state_of(mesh, filled=True)
        write_checkpoint(root / name, save_model, state, {"global_step": 3}, rank=rank, gather=gather)
        assert read_state(root / name) == {"global_step": 3}


def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "1", lambda folder: None, state_of(None, filled=True), {"global_step": 3})
    run_ranks(read_and_write, 2, tmp_path, ["1"])
    run_ranks(read_and_write, 3, tmp_path, ["1", "2", "2 copies"])
    for folder in ("1", "2", "2 copies", "3", "3 copies"):
        check(read_optimizer_into(tmp_path / folder, state_of(None, filled=False)))
        assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        # An independent reader. It cannot place a tensor without elements.
        found = {f"exp_avg.{name}": torch.zeros(shape) for name, shape in SHAPES.items() if name != "none"}
        reader = HuggingFaceStorageReader(str(tmp_path / folder / OPTIMIZER_FOLDER))
        dcp.load(found, storage_reader=reader, no_dist=True)
        for key, tensor in found.items():
            assert torch.equal(tensor, values("exp_avg", key.removeprefix("exp_avg."))), key
    lost = tmp_path / "3" / OPTIMIZER_FOLDER / "shard-00002-model-00001-of-00001.safetensors"
    lost.unlink()
    state = state_of(None, filled=False)
    with pytest.raises(CheckpointError, match="is incomplete: none of its files has 8 elements of exp_avg.even.weight"):
        read_optimizer_into(tmp_path / "3", state)
    assert not any(tensor.any() for tensor in state["exp_avg"].values())


def write_while_training_goes_on(rank: int, num_ranks: int, root: Path) -> list[str]:
    """One checkpoint whose tensors change at once, and one that rank 1 cannot write; the errors of this rank."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    errors = []
    for name in ("checkpoint-3", "checkpoint-4"):
        state = state_of(mesh, filled=True)

        def save_model(folder: Path, sink: Any = None) -> None:
            (folder / f"weights-{rank}").write_text("w")

        with pytest.MonkeyPatch.context() as patch:
            if name == "checkpoint-4" and rank == 1:
                patch.setattr("hybrid_rl.checkpoint.snapshot.sync", failing_shards)
            step = {"global_step": int(name[-1])}
            begun = begin_checkpoint(root / name, save_model, state, step, rank=rank, gather=gather)
            assert isinstance(begun, BackgroundWrite)
            for tensor in (tensor for kind in ("exp_avg", "exp_avg_sq", "master") for tensor in state[kind].values()):
                local_tensor(tensor).zero_()
            if name == "checkpoint-3" or rank == 1:
                begun.join()
            # As the driver does between steps; the leader still waits for the part of rank 1.
            if any(gather(begun.progress().error)):
                begun.give_up()
            begun.join()
        errors.append(begun.progress().error)
    return errors


def test_ranks_write_in_the_background(tmp_path: Path) -> None:
    leader, other = run_ranks(write_while_training_goes_on, 2, tmp_path)
    assert leader == ["", "given up"] and other == ["", "OSError: Input/output error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]
    check_checkpoint(tmp_path / "checkpoint-3")
    check(read_optimizer_into(tmp_path / "checkpoint-3", state_of(None, filled=False)))
    assert {path.name for path in (tmp_path / "checkpoint-3").glob("weights-*")} == {"weights-0", "weights-1"}


# ---------------------------------------------------------------------------------------------------------- failures


def failing_shards(*_: Any) -> None:
    raise OSError("Input/output error")


def fail_somewhere(rank: int, num_ranks: int, root: Path) -> list[str]:
    """One attempt per place and rank; the errors of this rank."""
    errors = []
    mesh = init_device_mesh("cpu", (num_ranks,))
    for place, culprit in (("model", 1), ("model", 0), ("optimizer", 1), ("state", 0), ("folder", 0)):
        mine = rank == culprit

        def save_model(folder: Path, failing: bool = mine and place == "model") -> None:
            (folder / f"weights-{rank}").write_text("new")
            if failing:
                raise OSError("No space left on device")

        state = state_of(mesh, filled=True)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
            if mine and place == "optimizer":
                patch.setattr("hybrid_rl.resharding.folders.write_shards", failing_shards)
            write_checkpoint(
                root / ("thesis" if place == "folder" else "checkpoint-4"),
                save_model,
                state,
                {"global_step": object() if mine and place == "state" else 4},
                rank=rank,
                gather=gather,
            )
        errors.append(str(caught.value))
    return errors


def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("1")
    write_checkpoint(
        tmp_path / "checkpoint-4", lambda folder: None, state_of(None, filled=True), {"global_step": 4, "num_tokens": 1}
    )
    leader, other = run_ranks(fail_somewhere, 2, tmp_path)
    assert "rank 1: OSError: No space left" in leader[0] and "No space left" in other[0] and "rank 1:" not in other[0]
    assert "No space left" in leader[1] and "rank 0: OSError: No space left" in other[1]
    assert "rank 1: OSError: Input/output error" in leader[2] and "Input/output error" in other[2]
    assert "rank 0" in other[3] and "JSON" in other[3]
    assert "is not a checkpoint" in leader[4] and "is not a checkpoint" in other[4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "thesis"]
    assert read_state(tmp_path / "checkpoint-4") == {"global_step": 4, "num_tokens": 1}
    check(read_optimizer_into(tmp_path / "checkpoint-4", state_of(None, filled=False)))
