"""What tests of leftovers in shared memory count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.memory import shared_memory

HOLD = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.write(b"x")
    file.flush()
    kept = file if sys.argv[2] == "open" else mmap.mmap(file.fileno(), 1)
    if sys.argv[2] == "mapped":
        file.close()
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Path:
    if not shared_memory.FOLDER.is_dir():
        pytest.skip("needs /dev/shm")
    return shared_memory.FOLDER


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_what_another_process_uses_is_not_left(folder: Path, tmp_path: Path, how: str) -> None:
    before = shared_memory.entries()
    own = folder / f"of-a-test-{tmp_path.name}-{how}"
    own.mkdir()
    try:
        command = [sys.executable, "-c", HOLD, str(own / "lock"), how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline() == b"\n"
            assert own.name not in shared_memory.left(before)
            other.kill()
        assert own.name in shared_memory.left(before)
        assert own.name not in shared_memory.left(before | {own.name})
    finally:
        (own / "lock").unlink(missing_ok=True)
        own.rmdir()
