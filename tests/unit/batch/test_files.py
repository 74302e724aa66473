"""Saved batches come back bit for bit; what cannot come back is refused, and so is what was damaged since."""

import json
import math
import struct
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hybrid_rl.batch.batch
import hybrid_rl.batch.rollout_files
from hybrid_rl.batch import FIELDS, Batch, Field, Jagged
from hybrid_rl.batch.rollout_files import load_batch, load_rollout, rollout_steps, save_batch, save_rollout
from hybrid_rl.errors import DataError, StorageError
from tests.support.batches import assert_same

NUMBERS = st.integers(-(2**63), 2**63 - 1)
# Lone halves of characters too: a Python string may hold them.
TEXT = st.text(st.characters(), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Some of the columns, any number of samples, 0 included."""
    num_samples = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(0, 4), min_size=num_samples, max_size=num_samples))
    one_length = [name for name, field in FIELDS.items() if field.align != "sequence"]  # the same rows fit all of them
    names = draw(st.lists(st.sampled_from(sorted(one_length)), min_size=1, unique=True))
    columns: dict[str, Any] = {}
    for name in names:
        field = FIELDS[name]
        if field.align == "object":
            columns[name] = draw(st.lists(JSON, min_size=num_samples, max_size=num_samples))
            continue
        count = num_samples if field.align == "sample" else sum(lengths)
        whole = {torch.int64: NUMBERS, torch.int16: st.integers(-1, 512), torch.bool: st.booleans()}
        element = whole.get(field.dtype, st.floats(width=32))
        values = torch.tensor(draw(st.lists(element, min_size=count, max_size=count)), dtype=field.dtype)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        columns[name] = values if field.align == "sample" else Jagged(values, offsets)
    return Batch(columns)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_round_trip(tmp_path: Path, batch: Batch) -> None:
    save_batch(tmp_path / "batch.safetensors", batch)
    assert_same(load_batch(tmp_path / "batch.safetensors"), batch)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


@pytest.mark.parametrize("text", ["\ud83d", "\ud83d\ude00", "\U0001f600", "\0", "\u2028", "\\", '"', "\r\n", "\ufeff"])
def test_text_of_any_kind(tmp_path: Path, text: str) -> None:
    """Halves of a character, alone and side by side, are not the character."""
    batch = Batch({"prompt": [text, {text: text}]})
    save_batch(tmp_path / "batch", batch)
    assert_same(load_batch(tmp_path / "batch"), batch)


def test_bfloat16_and_inner_dims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = MappingProxyType({**FIELDS, "hidden": Field("completion", torch.bfloat16, "actor", 0.0, "a test's own")})
    for module in (hybrid_rl.batch.batch, hybrid_rl.batch.rollout_files):
        monkeypatch.setattr(module, "FIELDS", fields)
    values = torch.tensor([[1.0, -0.0], [math.nan, 3e38], [1e-40, math.inf]]).bfloat16()
    batch = Batch({"hidden": Jagged(values, torch.tensor([0, 2, 2, 3]))})
    save_batch(tmp_path / "batch", batch)
    assert_same(load_batch(tmp_path / "batch"), batch)


def test_parts_of_other_tensors(tmp_path: Path) -> None:
    """Columns that share memory or skip elements: the file holds what they show."""
    base = torch.arange(12)
    ids = Jagged(base[::2], torch.tensor([0, 4, 6]))
    mask = ids.with_values(torch.ones(1, dtype=torch.bool).expand(6))
    batch = Batch({"completion_ids": ids, "completion_mask": mask, "group": base[3:5], "trajectory": base[4:6]})
    save_batch(tmp_path / "batch", batch)
    assert_same(load_batch(tmp_path / "batch"), batch)


def test_a_loaded_batch_does_not_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    save_batch(path, Batch({"group": torch.arange(10_000)}))
    loaded = load_batch(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size // 2))
    assert torch.equal(loaded["group"], torch.arange(10_000))


class Picture:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Picture(), r"column 'row', sample 1 is of type Picture"),
        ({"a": [1, Picture()]}, r"column 'row', sample 1\['a'\]\[1\] is of type Picture"),
        ({"a": (1, 2)}, r"sample 1\['a'\] is of type tuple"),
        ({"a": b"x"}, r"\['a'\] is of type bytes"),
        ({"a": torch.zeros(1)}, r"\['a'\] is of type Tensor"),
        ({3: 1}, r"sample 1 has the key 3 of type int"),
    ],
)
def test_objects_that_would_not_come_back(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        save_batch(tmp_path / "batch", Batch({"row": [{}, value]}))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch"
    batch = Batch({"group": torch.arange(3)})
    save_batch(path, batch)

    def fail(tensors: Any, target: Path, metadata: Any) -> None:
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(hybrid_rl.batch.rollout_files, "save_tensors", fail)
    with pytest.raises(StorageError, match="cannot write .*No space left on device; free space"):
        save_batch(path, Batch({"group": torch.arange(5)}))
    assert_same(load_batch(path), batch)
    assert [found.name for found in tmp_path.iterdir()] == ["batch"]


def rewritten(raw: bytes, change: Any) -> bytes:
    """The file with another header."""
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + size :]


def other_version(header: dict[str, Any]) -> None:
    header["__metadata__"]["format_version"] = "99"


def no_offsets(header: dict[str, Any]) -> None:
    header["prompt.offsets"] = header.pop("prompt_ids.offsets")


def unknown_column(header: dict[str, Any]) -> None:
    header["grupp"] = header.pop("group")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "damaged: write it again"),
        (lambda raw: raw[:5], "damaged: write it again"),
        (lambda raw: b"", "damaged: write it again"),
        (lambda raw: b"\xff" * len(raw), "damaged: write it again"),
        (lambda raw: raw.replace(b'["stop"', b'["stop '), "is damaged"),
        (lambda raw: raw.replace(b'["stop", "length"]', b'{"stop": "length"}'), "is damaged"),
        (lambda raw: raw.replace(struct.pack("<3q", 0, 2, 3), struct.pack("<3q", 0, 2, 9)), "is damaged: offsets must"),
        (lambda raw: rewritten(raw, no_offsets), "is damaged"),
        (lambda raw: rewritten(raw, unknown_column), "is damaged: unknown column 'grupp'"),
        (lambda raw: rewritten(raw, other_version), "not a batch of this version.*'99'"),
        (lambda raw: rewritten(raw, lambda header: header.pop("__metadata__")), "not a batch of this version"),
    ],
    ids=["half", "stump", "empty", "noise", "text", "no list", "offsets", "lost part", "column", "version", "foreign"],
)
def test_damaged_files(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "batch"
    prompts = Jagged(torch.arange(3), torch.tensor([0, 2, 3]))
    save_batch(path, Batch({"group": torch.tensor([1, 2]), "prompt_ids": prompts, "finish_reason": ["stop", "length"]}))
    raw = path.read_bytes()
    path.write_bytes(damage(raw))
    assert path.read_bytes() != raw
    with pytest.raises(DataError, match=message):
        load_batch(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the batch .*nothing: No such file"):
        load_batch(tmp_path / "nothing")


# --------------------------------------------------------------------------------------------------------- rollouts


def rollout(trajectories: list[int], turns: list[int] | None = None) -> Batch:
    columns: dict[str, Any] = {
        "trajectory": torch.tensor(trajectories, dtype=torch.int64),
        "prompt_ids": Jagged.from_rows([[number] * (number % 3) for number in trajectories], torch.int64),
        "row": [{"answer": str(number)} for number in trajectories],
    }
    if turns is not None:
        columns["turn"] = torch.tensor(turns, dtype=torch.int64)
    return Batch(columns)


def test_ranks_are_joined_in_the_order_of_trajectories(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    for rank, trajectories in enumerate([[4, 5, 0], [], [3, 1, 2]]):
        save_rollout(folder, 7, rank, 3, rollout(trajectories))
    assert_same(load_rollout(folder, 7), rollout([0, 1, 2, 3, 4, 5]))


def test_turns_of_a_trajectory_follow_each_other(tmp_path: Path) -> None:
    save_rollout(tmp_path, 1, 0, 2, rollout([8, 6, 8], [1, 0, 0]))
    save_rollout(tmp_path, 1, 1, 2, rollout([7, 7], [1, 0]))
    assert_same(load_rollout(tmp_path, 1), rollout([6, 7, 7, 8, 8], [0, 0, 1, 0, 1]))


def test_a_rank_without_samples_may_lack_columns(tmp_path: Path) -> None:
    save_rollout(tmp_path, 1, 0, 2, rollout([]).without("row"))
    save_rollout(tmp_path, 1, 1, 2, rollout([2, 1]))
    assert_same(load_rollout(tmp_path, 1), rollout([1, 2]))
    save_rollout(tmp_path, 2, 0, 1, rollout([]))
    assert load_rollout(tmp_path, 2).num_samples == 0


def test_steps_of_a_folder(tmp_path: Path) -> None:
    assert rollout_steps(tmp_path) == []
    for step in (1_000_000, 3, 20):
        for rank in range(2):
            save_rollout(tmp_path, step, rank, 2, rollout([rank]))
    (tmp_path / ".step-000099-rank-0000-of-0002.safetensors.12.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert rollout_steps(tmp_path) == [3, 20, 1_000_000]


def test_rollouts_that_are_not_complete(tmp_path: Path) -> None:
    paths = [save_rollout(tmp_path, 5, rank, 4, rollout([rank])) for rank in range(4)]
    paths[3].unlink()
    paths[1].unlink()
    with pytest.raises(DataError, match=r"lacks the rollout of step 5 from rank\(s\) \[1, 3\] of 4; copy"):
        load_rollout(tmp_path, 5)
    with pytest.raises(DataError, match=r"no rollout of step 6; it has steps \[5\]"):
        load_rollout(tmp_path, 6)
    save_rollout(tmp_path, 5, 0, 1, rollout([0]))
    with pytest.raises(DataError, match=r"step 5 from runs of \[1, 4\] ranks; delete"):
        load_rollout(tmp_path, 5)
    with pytest.raises(DataError, match="folder of rollouts .*elsewhere does not exist"):
        rollout_steps(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"needs the column trajectory, .*; the batch has \['group'"):
        save_rollout(tmp_path, 1, 0, 1, Batch({"group": torch.zeros(1, dtype=torch.int64)}))
    assert not list(tmp_path.glob("step-000001-*"))
