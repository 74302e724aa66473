"""Every benchmark for GPUs runs through on a CPU with its smallest sizes and prints its lines."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from tests.gpu import machine, run
from tests.support.kills.forked import Forked

pytestmark = pytest.mark.slow
BENCHMARKS = sorted((run.ROOT / "benchmarks").glob("gpu_*.py"))
KEYS = {"benchmark", "ours", "peer", "ratio", "unit", "hardware", "settings"}
# What a smoke test must have measured, whatever else is there.
EXPECTED = {
    "gpu_rollout": {"gpu_rollout heavy-tail 2x2", "gpu_rollout equal 2x2"},
    "gpu_step": {"gpu_step 0.5B heavy-tail", "gpu_step 0.5B shared-prompt"},
    "gpu_attention": {"gpu_attention training heavy-tail sdpa", "gpu_attention decode ragged"},
    "gpu_logprobs": {"gpu_logprobs 0.5B"},
    "gpu_handoff": {"gpu_handoff handoff", "gpu_handoff bandwidth"},
    "gpu_strided_copy": {"gpu_strided_copy "},
    "gpu_limits": {"gpu_limits device copy", "gpu_limits pinned to device", "gpu_limits bf16 product"},
    "gpu_sleep": {"gpu_sleep"},
    "gpu_region": {"gpu_region 2 MiB pieces"},
    "gpu_offload": {"gpu_offload sleep", "gpu_offload wake", "gpu_offload step 0.5B"},
    "gpu_decode": {"gpu_decode"},
    "gpu_memory_plan": {"gpu_memory_plan 0.5B inplace"},
    "gpu_cycles": {"gpu_cycles vllm"},
    "gpu_quickstart": {"gpu_quickstart accuracy"},
}
STARTS_VLLM = ("gpu_handoff", "gpu_sleep", "gpu_decode", "gpu_cycles")  # some 20 s each


def test_there_is_one_for_each_thing_that_is_measured() -> None:
    assert {path.stem for path in BENCHMARKS} == EXPECTED.keys()


ORDINARY = [path for path in BENCHMARKS if path.stem not in STARTS_VLLM]


LONG = ("gpu_attention", "gpu_quickstart")  # half of the time that all others take


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.sweep] * (path.stem in LONG), id=path.stem) for path in ORDINARY],
)
def test_benchmark_runs_through(path: Path, forked: Forked) -> None:
    done = forked.run(str(path), "--device", "cpu", "--tiny", environment=os.environ)
    assert done.returncode == 0, done.stderr
    check(path, done.stdout)


@pytest.mark.sweep
@pytest.mark.parametrize("path", sorted({*BENCHMARKS} - {*ORDINARY}), ids=lambda path: path.stem)
def test_benchmark_of_vllm_runs_through(path: Path) -> None:
    command = [sys.executable, str(path), "--device", "cpu", "--tiny"]
    outcome = machine.run_limited(command, run.ROOT, 240, machine.child_environment(run.ROOT))
    assert outcome.status == "passed", outcome.output
    check(path, outcome.output)


def check(path: Path, output: str) -> None:
    """The lines of a benchmark: those that it must have, and what every line has."""
    lines = run.benchmark_lines(output)
    assert output.strip().splitlines()[-1].startswith("{")  # the last line is one of them
    names = {line["benchmark"] for line in lines}
    assert all(any(name.startswith(wanted) for name in names) for wanted in EXPECTED[path.stem]), names
    for line in lines:
        assert line.keys() >= KEYS
        assert line["settings"]["tiny"] is True and line["settings"]["dtype"] == "bfloat16"
        numbers = [line[key] for key in ("ours", "peer", "ratio") if line[key] is not None]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
