"""What a file holds is told by its content alone, and its mode is that of all other files."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.batch.rollout_files import save_batch
from hybrid_rl.process import files
from hybrid_rl.process.files import content_digest, save_tensors
from hybrid_rl.resharding.shards import write_shards


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("kind", ["tensors", "shards", "batch"])
def test_files_of_tensors_are_for_whom_the_umask_says(tmp_path: Path, umask: None, kind: str) -> None:
    """safetensors writes for this user alone."""
    path = tmp_path / "file.safetensors"
    if kind == "tensors":
        save_tensors({"a": torch.ones(2)}, path, {"format": "pt"})
    elif kind == "shards":
        path = write_shards(tmp_path, {"a": torch.ones(2)}, 0) or path
    else:
        save_batch(path, Batch({"rewards": torch.ones(2, dtype=torch.float64)}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_digest_is_that_of_the_blocks_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blake(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    path = tmp_path / "file"
    path.write_bytes(b"abcdefg")
    assert content_digest(path) == blake(blake(b"abcdefg")).hex()
    monkeypatch.setattr(files, "BLOCK_BYTES", 3)
    assert content_digest(path) == blake(blake(b"abc") + blake(b"def") + blake(b"g")).hex()
    path.write_bytes(b"")
    assert content_digest(path) == blake(b"").hex()
