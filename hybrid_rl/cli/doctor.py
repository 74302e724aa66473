"""`hybrid-rl doctor`: this machine, and whether ranks fit together on it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hybrid_rl.cli.settings import Settings
from hybrid_rl.cli.tables import show, table, wide_console

if TYPE_CHECKING:
    from hybrid_rl.config import TrainerConfig
    from hybrid_rl.workers.preflight import RankProbe


def run_doctor(settings: Settings = None) -> None:
    """Describe this machine, start the ranks that the settings ask for, and compare them.

    The exit status is 1 if something does not fit; the problems are printed at the end.

    Examples:
      hybrid-rl doctor
      hybrid-rl doctor num_ranks=2
      hybrid-rl doctor device=cuda attention=varlen
    """
    from hybrid_rl.config import load_config, resolve
    from hybrid_rl.run.checks import check_attention
    from hybrid_rl.run.prepare import find_hardware
    from hybrid_rl.workers.preflight import check, versions

    console = wide_console()
    loaded, given = load_config(arguments=settings or [])
    facts = versions() | _describe_machine(Path(loaded.output_dir))
    show(console, table(("this machine", ""), facts.items()))
    print()
    hardware = find_hardware(loaded)
    config = resolve(loaded, given, hardware=hardware)
    check_attention(config, hardware)
    probes = _probe_ranks(config)
    tests = list(probes[0].seconds)
    rows = [
        (str(p.rank), p.host, p.device, str(p.num_threads), *(f"{1e3 * p.seconds[test]:.2f} ms" for test in tests))
        for p in probes
    ]
    show(console, table(("rank", "host", "device", "threads", *tests), rows))
    problems, doubts = check(probes)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)
    print("no problems found")


def _describe_machine(output_dir: Path) -> dict[str, str]:
    """List the resources of this machine that a run uses, by name."""
    import psutil
    import torch

    from hybrid_rl.process.cores import own_cores
    from hybrid_rl.sandbox import sandbox_strength

    memory = psutil.virtual_memory()
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.is_dir())
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    found = {
        "accelerators": ", ".join(f"{gpu.name} with {_gib(gpu.total_memory)}" for gpu in gpus) or "none",
        "cores": f"{own_cores()} of {os.cpu_count()} for this process",
        "memory": f"{_gib(memory.available)} of {_gib(memory.total)} free",
        f"disk of {output_dir}": f"{_gib(shutil.disk_usage(existing).free)} free",
    }
    shared = Path("/dev/shm")
    if shared.is_dir():
        found["shared memory, where ranks keep batches"] = f"{_gib(shutil.disk_usage(shared).free)} free"
    found["sandbox of programs"] = str(sandbox_strength())
    return found


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _probe_ranks(config: TrainerConfig) -> list[RankProbe]:
    """Start the ranks of a run without a model, query them, and end them."""
    from hybrid_rl.config import RayControllerConfig
    from hybrid_rl.controller import Backend, LocalBackend
    from hybrid_rl.run.start import RayRanks, local_device
    from hybrid_rl.training.balance import split_over_ranks
    from hybrid_rl.workers.base import WorkerBase
    from hybrid_rl.workers.groups import RankGroup
    from hybrid_rl.workers.preflight import probe_ranks

    ranks: Backend
    with contextlib.ExitStack() as closing:
        if isinstance(config.controller, RayControllerConfig):
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-rl-doctor-"))
            assert config.num_ranks != "auto"
            ray = RayRanks(config, Path(folder), closing)
            splitter = functools.partial(split_over_ranks, pair_cost=0.0)
            ranks = ray.start("doctor", WorkerBase, config.num_ranks, splitter)
        else:
            ranks = LocalBackend("doctor", WorkerBase, local_device(config.model.device))
            closing.callback(ranks.close)
        return probe_ranks(RankGroup(ranks))
