"""Versions in files: whole or not there, never another version's, and read by any number of engines."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.folders import MANIFEST_FILE
from hybrid_rl.resharding.handoff.base import PeerError
from hybrid_rl.resharding.handoff.disk import DiskSource, version_folder, write_version
from tests.unit.resharding.handoff.parts import (
    empty_engine,
    engine_trace,
    expected,
    globals_of,
    is_equal,
    plan_of,
    run_threads,
)


def read(root, version, num_parts=1, dtype=torch.float32):
    """What the ranks of an engine get."""
    engines = []
    for part in range(num_parts):
        source = DiskSource(root, version)
        trace = engine_trace(globals_of(), part, num_parts, dtype)
        engine = empty_engine(trace)
        with source.opened(version):
            delivered = source.deliver(plan_of(trace, source.layout(), 0), engine)
        # Read as it was written, in float32.
        assert delivered.link_bytes == {"disk": sum(4 * t.numel() for t in engine)}
        assert delivered.num_bytes == delivered.minimum_bytes == sum(t.nbytes for t in engine)
        source.close()
        engines.append(engine)
    return engines


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_an_engine_gets_its_part_of_the_newest_version(tmp_path, num_parts, dtype):
    tensors = globals_of()
    for version in range(3):
        tensors = {name: tensor * 1.5 for name, tensor in tensors.items()}
        folder = write_version(tmp_path, version, tensors)
        for part, engine in enumerate(read(tmp_path, version, num_parts, dtype)):
            assert is_equal(engine, expected(tensors, part, num_parts, dtype))
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_whole_tensors_are_read_too(tmp_path):
    tensors = globals_of()
    write_version(tmp_path, 1, tensors)
    source = DiskSource(tmp_path, 1)
    assert all(torch.equal(source.full(name), tensor) for name, tensor in tensors.items())
    with pytest.raises(HandoffError, match="the trainer has no weight 'absent'"):
        source.full("absent")


def test_a_version_without_its_manifest_is_not_there(tmp_path):
    folder = write_version(tmp_path, 7, globals_of())
    (folder / MANIFEST_FILE).unlink()
    with pytest.raises(HandoffError, match=r"does not hold policy version 7; it holds \[7\]"):
        DiskSource(tmp_path, 7)
    (folder / MANIFEST_FILE).write_text("{")
    with pytest.raises(HandoffError, match="manifest.json is damaged.*; write the version again"):
        DiskSource(tmp_path, 7)


def test_an_old_version_is_refused(tmp_path):
    folder = write_version(tmp_path, 3, globals_of())
    with pytest.raises(HandoffError, match=r"does not hold policy version 4; it holds \[3\]"):
        DiskSource(tmp_path, 4)
    shutil.copytree(folder, version_folder(tmp_path, 4))
    with pytest.raises(HandoffError, match="holds policy version 3, not 4; it was moved or copied"):
        DiskSource(tmp_path, 4)
    source = DiskSource(tmp_path, 3)
    with pytest.raises(HandoffError, match="holds policy version 3, not 4; open that version"), source.opened(4):
        pytest.fail("version 4 is not there")


def test_a_part_that_no_file_has_is_noticed(tmp_path):
    """A writer that forgot a tensor of the manifest: all hashes are right."""
    folder = write_version(tmp_path, 1, globals_of())
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["tensors"]["bias"] = ["float32", [5]]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(HandoffError, match=r"is incomplete: 1 of 1 parts of bias \[5\] are in none of its files"):
        DiskSource(tmp_path, 1)


def test_what_another_run_left_makes_room_for_a_new_one(tmp_path, caplog):
    """Left over: 3, 4 and 9 of runs that went further. The new run begins at 3."""
    new = {name: tensor + 1 for name, tensor in globals_of().items()}
    folder = write_version(tmp_path, 2, globals_of())
    for version in (3, 4, 9):
        shutil.copytree(folder, version_folder(tmp_path, version))
    assert not caplog.records
    for version in (3, 4):
        write_version(tmp_path, version, new)
        assert is_equal(read(tmp_path, version)[0], expected(new, 0, 1, torch.float32))
        assert [path.name for path in tmp_path.iterdir()] == [version_folder(tmp_path, version).name]
    assert [r.message for r in caplog.records] == [
        f"{tmp_path} held policy versions [3, 4, 9] of another run; version 3 takes their place"
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_that_is_replaced_or_removed_under_a_reader_is_refused(tmp_path, version):
    tensors = globals_of()
    write_version(tmp_path, 1, tensors)
    source, opened = DiskSource(tmp_path, 1), DiskSource(tmp_path, 1)
    opened.full("q")
    write_version(tmp_path, version, {name: tensor + 1 for name, tensor in tensors.items()})
    with pytest.raises(HandoffError, match="version-00000001 was replaced or removed while it was read; let one"):
        source.full("q")
    assert torch.equal(opened.full("q"), tensors["q"])  # what was open stays what it was


def test_readers_of_a_version_before_and_after_it_was_replaced_do_not_mix(tmp_path):
    write_version(tmp_path, 1, globals_of())

    def work(rank, gather, leave):
        if rank == 1:
            gather = replacing(gather)
        return DiskSource(tmp_path, 1, reader=rank, num_readers=2, gather=gather)

    def replacing(gather):
        def replaced(value):
            files, told = value
            return gather(({name: replace(content, digest="0") for name, content in files.items()}, told))

        return replaced

    errors = run_threads(work, 2)
    assert all("was replaced or removed while it was read" in str(error) for error in errors)


def test_a_file_of_the_name_of_a_version_is_not_touched(tmp_path):
    version_folder(tmp_path, 0).write_text("mine")
    with pytest.raises(HandoffError, match="files of policy version 0: NotADirectoryError: .*version-00000000'"):
        write_version(tmp_path, 0, globals_of())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    tensors = globals_of()
    write_version(tmp_path, 1, tensors)
    real = os.rename

    def rename(source, target):
        if ".partial" in str(source) and "replaced" not in str(source):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(HandoffError, match="files of policy version 1: OSError: .*No space left on device"):
        write_version(tmp_path, 1, {name: tensor + 1 for name, tensor in tensors.items()})
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]
    assert is_equal(read(tmp_path, 1)[0], expected(tensors, 0, 1, torch.float32))


def test_where_one_rank_cannot_write_there_is_no_version(tmp_path):
    tensors = globals_of()

    def work(rank, gather, leave):
        # Rank 0 holds a tensor that no file can.
        mine = {**tensors, "q": tensors["q"].to_sparse()} if rank == 0 else tensors
        write_version(tmp_path, 1, mine, rank=rank, gather=gather)

    first, second = run_threads(work, 2)
    assert isinstance(first, HandoffError) and "files of policy version 1" in str(first)
    assert isinstance(second, PeerError) and second.__cause__ is None  # repeats another's failure; none is gone
    assert "another participant failed over the files of policy version 1: rank 0: " in str(second)
    with pytest.raises(HandoffError, match="does not hold policy version 1; it holds none"):
        DiskSource(tmp_path, 1)
    assert not list(tmp_path.iterdir()), "half of a version takes space on a disk that may be full"


def test_what_a_killed_writer_left_is_no_version_and_goes_with_the_next(tmp_path):
    tensors = globals_of()
    write_version(tmp_path, 1, tensors)
    left_over = tmp_path / ".version-00000002.partial"
    shutil.copytree(version_folder(tmp_path, 1), left_over)
    with pytest.raises(HandoffError, match=r"does not hold policy version 2; it holds \[1\]"):
        DiskSource(tmp_path, 2)
    write_version(tmp_path, 3, tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000003"]


def test_readers_share_the_hashing_and_all_hear_of_damage(tmp_path):
    folder = write_version(tmp_path, 1, globals_of())
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))

    def work(rank, gather, leave):
        return DiskSource(tmp_path, 1, reader=rank, num_readers=2, gather=gather)

    first, second = run_threads(work, 2)
    assert isinstance(first, HandoffError) and "its content is not what was written" in str(first)
    assert isinstance(second, PeerError) and ": rank 0: HandoffError: " in str(second)
    assert "its content is not what was written" in str(second)
