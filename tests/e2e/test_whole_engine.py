"""The library in one sentence, in one test: one driver, ranks on Ray that train with FSDP2 and generate with vLLM in
turn, through resharding, phases of memory and proved handoffs; and a run that outlives the death of a rank and of the
driver, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid_rl.logging.run_folder import read_jsonl
from tests.distributed.conftest import wait_until
from tests.e2e.whole_engine import CASES, DRIVER_DIES_AFTER, KEYS, PHASES, RANK_DIES_IN, drive
from tests.support.libraries.torch_names import inductor_folder
from tests.support.memory.shared_memory import entries, used

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
TOKEN = "WHOLE_ENGINE_TOKEN"  # in the environment of all processes of a run
NUM_STEPS = 20
TOLERANCE = 1e-5


class Traces:
    """What runs leave on this machine. folder: of their temporary files; its path is short, as those of sockets are."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token
        self._before = shared_memory()

    def processes(self) -> list[str]:
        """Command lines of processes of these runs that are still there."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(TOKEN) == self.token:
                    found.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
            except psutil.Error:  # it has ended by now, or is a zombie of somebody else
                continue
        return found

    def files(self) -> list[str]:
        """Temporary files, and pieces of shared memory that nobody uses and that were not there before. PyTorch keeps
        precompiled headers in the temporary folder, whatever TORCHINDUCTOR_CACHE_DIR says: they are a cache."""
        cache = self.folder / Path(inductor_folder()).name
        kept = {cache, *cache.glob("precompiled_headers"), *cache.glob("precompiled_headers/**/*")}
        left = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path not in kept]
        return left + sorted(shared_memory() - self._before - used())


def shared_memory() -> set[str]:
    """Names of POSIX and of System V pieces of shared memory and semaphores."""
    found = entries()
    for kind in ("shm", "sem"):
        lines = (Path("/proc/sysvipc") / kind).read_text().splitlines()[1:]
        found |= {f"{kind} {line.split()[1]}" for line in lines}
    return found


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    with tempfile.TemporaryDirectory(prefix="whole", dir="/tmp") as folder:
        token = uuid.uuid4().hex
        # A cache that is meant to stay, as it is without a folder of our own.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", inductor_folder())
        monkeypatch.setenv(TOKEN, token)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield Traces(Path(folder), token)


def check_steps(folder: Path, case: str, num_steps: int) -> list[dict[str, Any]]:
    """Hold every step of a run against what must be true of each; returns their metrics."""
    metrics = [line for line in read_jsonl(folder / "run" / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in metrics] == [*range(1, num_steps + 1)]
    for line in metrics:
        assert line["handoff/probe_gap"] < TOLERANCE and line["timing/verify"] > 0
        assert line["handoff/bytes"] == line["handoff/minimum_bytes"] > 0
        assert "handoff/reloaded_bytes" not in line
        if "partial" not in case:
            assert line["sampling/sampling_logp_difference/max"] < TOLERANCE
    record = read_jsonl(folder / "record.jsonl")
    assert max(line["gap"] for line in record) < TOLERANCE
    # Weights of a neighbouring version would be noticed.
    assert min(line["gap_to_the_version_before"] for line in record if line["step"] > 1) > 10 * TOLERANCE
    assert [line["problems"] for line in record] == [[[], []]] * len(record)
    # Optimizers have no state before the first update of a run.
    sizes = [line for line in record if line["step"] > 1]
    assert [differences(line["bytes"], sizes[0]["bytes"], PHASES[case]) for line in sizes] == [[]] * len(sizes)
    assert sizes[0]["bytes"][0].keys() >= {"generate", "update", "publish"}
    for by_phase in sizes[0]["bytes"]:
        for tag in CASES[case]["memory.offload"]:
            assert {held.get(tag, 0) > 0 for held in by_phase.values()} == {False, True}, f"{tag} never moves"
    return metrics


def differences(mine: list[Any], theirs: list[Any], phases: Collection[str]) -> list[str]:
    """Residents of which two steps hold another number of bytes in the same of these phases, on the same rank. Other
    phases, of saving, are not in every step."""
    return [
        f"rank {rank}, {phase}: {tag} {one[phase].get(tag, 0)} instead of {other[phase].get(tag, 0)}"
        for rank, (one, other) in enumerate(zip(mine, theirs, strict=True))
        for phase in sorted(phases)
        for tag in sorted(one[phase].keys() | other[phase].keys())
        if one[phase].get(tag, 0) != other[phase].get(tag, 0)
    ]


@pytest.mark.timeout(600)
def test_ranks_train_and_generate_in_turn_and_leave_nothing(tmp_path: Path, traces: Traces) -> None:
    case, num_steps = next(iter(CASES)), 3
    drive(tmp_path, case, num_steps, prompts_per_step=2)
    check_steps(tmp_path, case, num_steps)
    wait_until(lambda: not traces.processes(), "processes are left", 30)
    assert traces.files() == []


@pytest.mark.e2e_full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_loses_a_rank_and_its_driver_learns_and_leaves_nothing(
    tmp_path: Path, traces: Traces, case: str
) -> None:
    command = [sys.executable, "-m", "tests.e2e.whole_engine", str(tmp_path), case, str(NUM_STEPS)]
    for name in ("kill-rank", "kill-driver"):
        (tmp_path / name).touch()
    statuses = []
    for attempt in range(2):
        with (tmp_path / f"output-{attempt}").open("w+") as output:
            driver = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=900, check=False)
            output.seek(0)
            text = output.read()
        statuses.append(driver.returncode)
        assert driver.returncode == (0 if attempt else -signal.SIGKILL), text[-6000:]
        if attempt == 0:
            assert "Restart 1 of at most 2" in text and f"after training step {RANK_DIES_IN - 1}" in text
        # Ranks and Ray itself end without their driver.
        wait_until(lambda: not traces.processes(), f"processes are left: {traces.processes()}", 60)
    assert not list(tmp_path.glob("kill-*"))
    metrics = check_steps(tmp_path, case, NUM_STEPS)
    assert traces.files() == []
    record = read_jsonl(tmp_path / "record.jsonl")
    workers = [tuple(line["workers"]) for line in record]
    runs = [[line["step"] for line in record if tuple(line["workers"]) == one] for one in dict.fromkeys(workers)]
    # Each went on after its newest checkpoint, which may still have been written as its driver died.
    assert [run[0] for run in runs][:2] == [1, RANK_DIES_IN - (RANK_DIES_IN - 1) % KEYS["save_steps"]]
    assert [run[-1] for run in runs] == [RANK_DIES_IN - 1, DRIVER_DIES_AFTER, NUM_STEPS]
    assert DRIVER_DIES_AFTER - 2 * KEYS["save_steps"] < runs[2][0] <= DRIVER_DIES_AFTER + 1
    rewards = [line["reward"] for line in metrics]
    first, last = statistics.fmean(rewards[:4]), statistics.fmean(rewards[-4:])
    assert last > first + 0.15, rewards
    if "partial" in case:
        assert any(int(age) > 0 and count for line in record for age, count in line["ages"].items())
