"""The parts of `make gpu` in the order of risk: a build, a smoke stage of two minutes, tests, benchmarks.

A part is one process. What breaks most of the others comes first, so that a run that is cut short has told what
matters; `seconds` is what a part should take on an H100, by which a run with a budget decides whether to start it.
They are estimates until a report has measured them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BUILD, SMOKE, TESTS, BENCHMARKS = "build", "smoke", "tests", "benchmarks"
STAGES = (BUILD, SMOKE, TESTS, BENCHMARKS)
UNLISTED_SECONDS = {TESTS: 60.0, BENCHMARKS: 120.0}
# A part that takes so many times its estimate hangs.
PATIENCE, LEAST_LIMIT_SECONDS = 4.0, 90.0


@dataclass(frozen=True)
class Part:
    """One process. file: relative to the repository; arguments: pytest's or the script's; seconds: expected."""

    name: str
    stage: str
    file: str
    seconds: float
    arguments: tuple[str, ...] = field(default=())

    @property
    def limit_seconds(self) -> float:
        """After this it is killed."""
        return max(LEAST_LIMIT_SECONDS, PATIENCE * self.seconds)


def _smoke(name: str, file: str, selection: str, seconds: float = 9.0) -> Part:
    return Part(f"smoke_{name}", SMOKE, f"tests/gpu/{file}.py", seconds, ("-k", selection))


def _test(name: str, seconds: float) -> Part:
    return Part(name, TESTS, f"tests/gpu/{name}.py", seconds)


def _benchmark(name: str, seconds: float, *arguments: str) -> Part:
    suffix = "".join(f"_{word}" for word in arguments if not word.startswith("--"))
    return Part(name + suffix, BENCHMARKS, f"benchmarks/{name}.py", seconds, arguments)


LISTED: tuple[Part, ...] = (
    Part("build", BUILD, "setup.py", 60.0),
    # Each shows in some ten seconds that one thing works at all; the tests that follow show how far.
    _smoke("copy_kernel", "test_strided_copy", "kernel_was_built or (to_the_bit and float32-bfloat16)"),
    _smoke("decode_kernel", "test_decode_kernel", "float64 and float32"),
    _smoke("graph", "test_graphs", "outlive_the_nights"),
    _smoke("attention", "test_attention", "contract"),
    _smoke("model_by_name", "test_trainer", "by_name", 12.0),
    _smoke("fsdp", "test_fsdp", "one_rank", 12.0),
    _smoke("ipc", "test_ipc", "", 14.0),
    _smoke("two_vllm_trainers", "test_vllm_trainers", "", 45.0),
    _test("test_strided_copy", 30.0),
    _test("test_decode_kernel", 40.0),
    _test("test_sampling", 20.0),
    _test("test_logprobs", 60.0),
    _test("test_region", 40.0),
    _test("test_graphs", 40.0),
    _test("test_engine_contract", 100.0),
    _test("test_engine_families", 90.0),
    _test("test_attention", 20.0),
    _test("test_training", 60.0),
    _test("test_trainer", 60.0),
    _test("test_fsdp", 20.0),
    _test("test_low_rank", 20.0),
    _test("test_ipc", 30.0),
    _test("test_offload", 20.0),
    _test("test_host_optimizer", 15.0),
    _test("test_vllm", 60.0),
    _test("test_vllm_compiled", 120.0),
    _test("test_vllm_trainers", 60.0),
    _test("test_vllm_quantised", 240.0),
    _benchmark("gpu_limits", 20.0),
    _benchmark("gpu_handoff", 60.0, "--shape", "0.5B"),
    _benchmark("gpu_handoff", 120.0, "--shape", "7B"),
    _benchmark("gpu_strided_copy", 40.0),
    _benchmark("gpu_region", 30.0),
    _benchmark("gpu_offload", 120.0),
    _benchmark("gpu_sleep", 90.0, "--shape", "0.5B"),
    _benchmark("gpu_sleep", 120.0, "--shape", "7B"),
    _benchmark("gpu_decode", 240.0),
    _benchmark("gpu_step", 150.0, "--shape", "0.5B"),
    _benchmark("gpu_step", 150.0, "--shape", "7B"),
    _benchmark("gpu_memory_plan", 60.0, "--shape", "0.5B"),
    _benchmark("gpu_memory_plan", 150.0, "--shape", "0.5B", "--engine", "vllm"),
    _benchmark("gpu_memory_plan", 150.0, "--shape", "7B"),
    _benchmark("gpu_cycles", 210.0),
    _benchmark("gpu_quickstart", 90.0),
    _benchmark("gpu_rollout", 150.0),
    _benchmark("gpu_attention", 90.0),
    _benchmark("gpu_logprobs", 60.0),
)


def parts_of(root: Path, only: Sequence[str] = ()) -> list[Part]:
    """The parts of a checkout, in order; files that are not listed come last in their stage.

    only: stages, parts or stems of files; everything if empty. The build is always among them. Raises ValueError for a
    name that is none of these.
    """
    found = [part for part in LISTED if (root / part.file).exists()]
    known = {part.file for part in LISTED}
    for stage, pattern in ((TESTS, "tests/gpu/test_*.py"), (BENCHMARKS, "benchmarks/gpu_*.py")):
        files = [path.relative_to(root).as_posix() for path in sorted(root.glob(pattern))]
        found += [Part(Path(file).stem, stage, file, UNLISTED_SECONDS[stage]) for file in files if file not in known]
    found.sort(key=lambda part: STAGES.index(part.stage))
    if unknown := [name for name in only if not any(name in _names(part) for part in found)]:
        names = dict.fromkeys([*STAGES, *(part.name for part in found)])
        raise ValueError(f"{', '.join(unknown)}: no such part or stage; there are {', '.join(names)}")
    return [part for part in found if not only or part.stage == BUILD or any(name in _names(part) for name in only)]


def piece_of(parts: Sequence[Part], number: int, count: int) -> list[Part]:
    """The `number`-th (from 1) of `count` runs of neighbours that take about equally long; the build is in each."""
    build = [part for part in parts if part.stage == BUILD]
    others = [part for part in parts if part.stage != BUILD]
    total, before, chosen = sum(part.seconds for part in others), 0.0, []
    for part in others:
        middle = before + part.seconds / 2
        if int(middle / total * count) == number - 1:
            chosen.append(part)
        before += part.seconds
    return build + chosen


def _names(part: Part) -> Iterable[str]:
    return (part.name, part.stage, Path(part.file).stem) if part.stage != SMOKE else (part.name, part.stage)
