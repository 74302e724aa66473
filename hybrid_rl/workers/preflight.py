"""Comparison of ranks before a run: the same software, a device for each, and about the same speed.

Ranks work in step, so one slow rank slows all of them, and one that runs other code gives other numbers, both without
any error. Either is cheap to see before the first step and costly to find out after a day. What seems slow is measured
again, some times over a few seconds: a program that happened to use the same core is not a reason to refuse a run. A
CPU that stays slow only causes a warning, since the other program may be gone in a minute.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_rl.compat.native import is_available
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import HybridRLError
from hybrid_rl.workers.host import host_doubts

logger = logging.getLogger("hybrid_rl")

PRODUCT, COPY, ALL_REDUCE = "a matrix product", "a copy", "an all-reduce"

# By the kind of device: rows of the square matrices, and MiB of the copy.
SIZES = {"cuda": (4096, 256), "cpu": (1024, 32)}

# Healthy GPUs of a kind differ by some per cent. Ranks on CPUs share cores with each other and with strangers: the
# best of five runs differed up to 5-fold between four healthy ranks on two cores that twenty other programs used too.
MAX_SLOWDOWN = {"cuda": 5.0, "cpu": 20.0}

NUM_RUNS = 5
PAUSES = (0.3, 1.0, 2.0)  # seconds before measuring ranks again of which one seems slow


@dataclass(frozen=True)
class RankProbe:
    """Software, device and speed of a rank.

    device: kind and name. device_id: which one on its host, empty for CPUs. versions: of all that its numbers depend
    on. seconds: the best of a few runs of each test. doubts: what its host has too little of.
    """

    rank: int
    host: str
    device: str
    device_id: str
    num_threads: int
    versions: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return self.device.split()[0]


def probe_rank(context: RankContext) -> RankProbe:
    """Ask this process for its versions and measure its speed. With torch.distributed initialised all ranks must call
    it; takes below a second."""
    device = context.device
    name, device_id = "cpu", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        # Each instance of a MIG GPU is a device, and a rank on one sees no other.
        name, device_id = f"cuda {properties.name}", visible if visible.startswith("MIG") else str(properties.uuid)
    seconds = _measure_seconds(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the size of a cache will depend on the free memory of the device
    software = torch.get_num_threads(), versions()
    doubts = host_doubts(context.num_ranks)
    return RankProbe(context.rank, socket.gethostname(), name, device_id, *software, seconds, doubts)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of all that a rank's numbers depend on; "missing" if it is not installed."""
    version_of = {"python": platform.python_version()}
    for name in ("hybrid_rl", "torch", "transformers", "numpy", "ray"):
        try:
            version_of[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            version_of[name] = "missing"
    vllm = [f"{metadata.version(name)} ({name})" for name in metadata.packages_distributions().get("vllm", ())]
    version_of["vllm"] = vllm[0] if vllm else "missing"
    # Two checkouts have one version number, but not one set of sources.
    version_of["hybrid_rl"] += f" (sources {_source_digest()})"
    version_of["CUDA of torch"] = torch.version.cuda or "none"
    version_of["compiled extension"] = "built" if is_available() else "missing"
    return version_of


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=4)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@torch.inference_mode()
def _measure_seconds(device: torch.device) -> dict[str, float]:
    """Time the tests, which are large enough to show a device's speed and small enough to go unnoticed. On a core about
    15 ms each: a test shorter than the turns that programs take on a core would be a matter of luck."""
    is_cuda = device.type == "cuda"
    size, num_mib = SIZES[device.type]
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if is_cuda else torch.float32, device=device)
    source = torch.ones(num_mib << 18, device=device)
    target = torch.empty_like(source)
    message = torch.zeros((16 if is_cuda else 1) << 18, device=device)
    tests: dict[str, Callable[[], object]] = {
        PRODUCT: lambda: matrix @ matrix,
        COPY: lambda: target.copy_(source),
    }
    if dist.is_initialized() and dist.get_world_size() > 1:
        tests[ALL_REDUCE] = lambda: dist.all_reduce(message)
    return {name: _best_seconds(test, device) for name, test in tests.items()}


def _best_seconds(test: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    # The first run only prepares.
    for number in range(1 + NUM_RUNS):
        start = time.perf_counter()
        test()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            best = min(best, time.perf_counter() - start)
    return best


def preflight(probe: Callable[[], list[RankProbe]]) -> None:
    """Compare the ranks of a group. Raises HybridRLError with all that does not fit; warns of what is doubtful. probe:
    `RankGroup.probe_rank` of it."""
    problems, doubts = check(probe_ranks(probe))
    if problems:
        raise HybridRLError("\n - ".join(["the ranks do not fit together:", *problems]))
    for doubt in doubts:
        logger.warning("%s", doubt)


def probe_ranks(probe: Callable[[], list[RankProbe]]) -> list[RankProbe]:
    """Probe the ranks of a group. If one seems slow, all measure again, and the best time of each counts."""
    probes = probe()
    for pause in PAUSES:
        if not slow_ranks(probes):
            break
        time.sleep(pause)
        probes = [_best(*both) for both in zip(probes, probe(), strict=True)]
    return probes


def _best(before: RankProbe, now: RankProbe) -> RankProbe:
    return replace(now, seconds={test: min(s, before.seconds.get(test, s)) for test, s in now.seconds.items()})


def check(probes: Sequence[RankProbe]) -> tuple[list[str], list[str]]:
    """Compare ranks. Returns what does not fit between them, and what is doubtful, a sentence each: slow CPUs slow all
    ranks, and a host may have little of something, but the run may continue."""
    problems = []
    for name in dict.fromkeys(name for probe in probes for name in probe.versions):
        for odd, other, rest in _minorities([probe.versions.get(name, "missing") for probe in probes]):
            problems.append(
                f"{name} is {odd} on {_ranks(probes, other)} and {rest} on the others; "
                f"install the same versions everywhere"
            )
    for odd, other, rest in _minorities([probe.device_type for probe in probes]):
        problems.append(f"{_ranks(probes, other)} runs on {odd}, the others on {rest}; give all ranks the same kind")
    users: dict[tuple[str, str], list[int]] = {}
    for place, probe in enumerate(probes):
        users.setdefault((probe.host, probe.device_id), []).append(place)
    for (_, gpu), which in users.items():
        if gpu and len(which) > 1:
            problems.append(
                f"{_ranks(probes, which)} share the GPU {gpu}; each rank needs its own: lower num_ranks, and start Ray "
                f"with as many GPUs as there are"
            )
    slow = slow_ranks(probes)
    doubts = list(dict.fromkeys(f"{probe.host}: {doubt}" for probe in probes for doubt in probe.doubts))
    if all(probe.device_type == "cpu" for probe in probes):
        return problems, slow + doubts
    return problems + slow, doubts


def slow_ranks(probes: Sequence[RankProbe]) -> list[str]:
    """Name the ranks that are much slower than the others, a sentence each: that take more than MAX_SLOWDOWN times as
    long for a test as the median of the others."""
    problems = []
    for index, probe in enumerate(probes):
        limit = MAX_SLOWDOWN[probe.device_type]
        others = [other for other in probes if other is not probe]
        for test, seconds in probe.seconds.items():
            times = [other.seconds[test] for other in others if test in other.seconds]
            if times and not seconds <= limit * (usual := statistics.median(times)):
                problems.append(
                    f"{_ranks(probes, [index])} takes {seconds:.2g} s for {test}, {seconds / usual:.0f} times the "
                    f"{usual:.2g} s of the others (up to {limit:g} times is usual); all ranks wait for it: look for "
                    f"other programs on that device, and for throttling"
                )
    return problems


def _minorities(values: Sequence[Hashable]) -> list[tuple[Hashable, list[int], Hashable]]:
    """List every value but the most frequent one (the first of equals), with its places and the most frequent one."""
    usual = Counter(values).most_common(1)[0][0] if values else None
    return [
        (value, [i for i, other in enumerate(values) if other == value], usual)
        for value in dict.fromkeys(values)
        if value != usual
    ]


def _ranks(probes: Sequence[RankProbe], which: Sequence[int]) -> str:
    hosts = ", ".join(dict.fromkeys(probes[i].host for i in which))
    ranks = ", ".join(str(probes[i].rank) for i in which)
    return f"{'rank' if len(which) == 1 else 'ranks'} {ranks} ({hosts})"
