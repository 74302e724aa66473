"""`hybrid-rl doctor`: this machine, and whether ranks fit together on it."""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from hybrid_rl.cli.key_values import Settings
from hybrid_rl.cli.tables import show, table, wide_console
from hybrid_rl.cli.version import NOT_INSTALLED, installed, version_of
from hybrid_rl.errors import REPORT_EXTRA

# Name, use, and how to get it if that is not pip install NAME.
OPTIONAL = (
    ("ray", "several ranks, such as num_ranks=2", ""),
    ("vllm", "rollout.engine=vllm", "GPUs: pip install vllm; CPUs: make vllm in a clone"),
    ("flash-attn", "attention=flash_attn on GPUs", ""),
    ("peft", "adapters: lora.r=8, peft_config=", ""),
    ("matplotlib", "curves.png and memory.png of a run", REPORT_EXTRA),
    ("plotly", "hybrid-rl report", REPORT_EXTRA),
    ("pandas", "batch.to_pandas()", REPORT_EXTRA),
    ("tensorboard", "report_to=tensorboard", ""),
    ("wandb", "report_to=wandb", ""),
    ("trackio", "report_to=trackio", ""),
    ("mlflow", "report_to=mlflow", ""),
    ("math-verify", "math_reward", ""),
    ("openai", "LLMJudge", ""),
    ("reasoning-gym", "its tasks as data and environments", ""),
)
OPTIONAL_NAMES = frozenset(name for name, _, _ in OPTIONAL)
NO_EXTENSION = (
    "missing: PyTorch's operators replace it, and give the same results; steps of small models on a CPU take about 1.4 "
    "times as long. It is compiled by make install in a clone, which needs a C++ compiler"
)
NO_KERNELS = (
    "not built: the copies and checks of a handoff, and those of weights in host memory, take PyTorch's slower forms. "
    "They are compiled with the library from source, with nvidia-cuda-nvcc and nvidia-cuda-cccl of torch's CUDA"
)

if TYPE_CHECKING:
    from hybrid_rl.config import TrainerConfig
    from hybrid_rl.workers.preflight import RankProbe


def run_doctor(settings: Settings = None) -> None:
    """Describe this machine and what is installed, start the ranks that the settings ask for, and compare them.

    The exit status is 1 if something does not fit; the problems are printed at the end.

    Examples:
      hybrid-rl doctor
      hybrid-rl doctor num_ranks=2
      hybrid-rl doctor device=cuda attention=varlen
    """
    console = wide_console()
    with Console(stderr=True).status("importing PyTorch and looking at this machine"):
        from hybrid_rl.config import load_config, resolve
        from hybrid_rl.run.checks import check_attention
        from hybrid_rl.run.prepare import find_hardware
        from hybrid_rl.workers.preflight import check

        loaded, given_keys = load_config(arguments=settings or [])
        facts = _describe_machine(Path(loaded.output_dir))
    show(console, table(("this machine", ""), facts.items()))
    print()
    show(console, table(("optional", "", "for"), optional_parts()))
    print()
    hardware = find_hardware(loaded)
    config = resolve(loaded, given_keys, hardware=hardware)
    check_attention(config, hardware)
    probes = _probe_ranks(config)
    tests = list(probes[0].seconds)
    rows = [
        (str(p.rank), p.host, p.device, str(p.num_threads), *(f"{1e3 * p.seconds[test]:.2f} ms" for test in tests))
        for p in probes
    ]
    show(console, table(("rank", "host", "device", "threads", *tests), rows))
    print(what_is_normal(probes[0].device_type))
    problems, doubts = check(probes)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)
    print("no problems found")


def optional_parts() -> list[tuple[str, str, str]]:
    """Return name, version and use of the packages that only some runs need, and how to get those that are missing."""
    parts = []
    for name, use, remedy in OPTIONAL:
        version = installed()["vllm"] if name == "vllm" else version_of(name)
        how = remedy or f"pip install {name}"
        parts.append((name, version, f"{use}; {how}" if version == NOT_INSTALLED else use))
    numa = ctypes.util.find_library("numa")
    use = "vLLM on CPUs"
    parts.append(("libnuma", numa or NOT_INSTALLED, use if numa else f"{use}; Debian and Ubuntu: apt install libnuma1"))
    return parts


def what_is_normal(device_type: str) -> str:
    """Say what the tests of a rank are, and how long they take on hardware that is not slowed down."""
    from hybrid_rl.workers.preflight import COPY, PRODUCT, SIZES

    size, mebibytes = SIZES[device_type]
    kind = "bfloat16" if device_type == "cuda" else "float32"
    times = (
        "0.2 to 2 ms each on a GPU for data centres"
        if device_type == "cuda"
        else "10 to 60 ms and 3 to 20 ms on an idle core; more if other programs use it"
    )
    return (
        f"{PRODUCT}: {size} x {size}, {kind}; {COPY}: {mebibytes} MiB; normal: {times}. Ranks wait for the slowest one."
    )


def _describe_machine(output_dir: Path) -> dict[str, str]:
    """List the resources of this machine that a run uses, by name."""
    import psutil
    import torch

    from hybrid_rl.compat import native
    from hybrid_rl.extras.sandbox import sandbox_strength
    from hybrid_rl.process.cores import own_cores
    from hybrid_rl.workers.host import limits
    from hybrid_rl.workers.preflight import versions

    memory = psutil.virtual_memory()
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.is_dir())
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    facts = {name: version for name, version in versions().items() if name not in OPTIONAL_NAMES}
    if facts["compiled extension"] == "missing":
        facts["compiled extension"] = NO_EXTENSION
    if gpus and native.why_missing("cuda") is not None:
        facts["kernels for CUDA"] = NO_KERNELS
    facts |= {
        "accelerators": ", ".join(f"{gpu.name} with {_gib(gpu.total_memory)}" for gpu in gpus) or _no_gpu(),
        "cores": f"{own_cores()} of {os.cpu_count()} for this process",
        "memory": f"{_gib(memory.available)} of {_gib(memory.total)} free",
        f"disk of {output_dir}": f"{_gib(shutil.disk_usage(existing).free)} free",
    }
    shared = Path("/dev/shm")
    if shared.is_dir():
        facts["shared memory, where ranks keep batches"] = f"{_gib(shutil.disk_usage(shared).free)} free"
    facts["limits"] = limits()
    facts["sandbox of programs"] = str(sandbox_strength())
    return facts


def _no_gpu() -> str:
    from hybrid_rl.run.gpus import without_gpu

    hardware = without_gpu()
    if hardware.is_broken:
        return f"none that can be used: {hardware.missing}"
    return f"none, so: CPU only ({hardware.missing})" if hardware.is_overlooked else "none, so: CPU only"


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
        return probe_ranks(RankGroup(ranks).probe_rank)
