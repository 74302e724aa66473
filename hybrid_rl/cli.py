"""The command line: `hybrid-rl keys`, `algorithms`, `plan`, `doctor` and `version`, and the shared `main` of the
recipes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from hybrid_rl.config import RayControllerConfig, TrainerConfig, load_config, resolve, visible_leaves
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.controller import Backend, LocalBackend
from hybrid_rl.errors import HybridRLError
from hybrid_rl.planning.rates import GPUS
from hybrid_rl.process.cores import own_cores
from hybrid_rl.workers.preflight import RankProbe, check, probe_ranks, versions

USAGE = """usage: hybrid-rl keys [WORD]         every configuration key with its default, or those that contain WORD
       hybrid-rl algorithms          every algorithm by name, with its paper and the keys that it sets
       hybrid-rl plan RUN --gpus 8 --gpu-memory 80GB    memory, phases and handoff of a run before it is started;
                                     RUN is a recipe, a YAML file, a preset, or KEY=VALUE (hybrid-rl plan --help)
       hybrid-rl doctor [KEY=VALUE]  this machine, and whether ranks (num_ranks=2) fit together on it
       hybrid-rl version             versions of this library and its dependencies"""

INTERRUPTED = 130  # the shell's convention for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `hybrid-rl`; returns the exit status."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command and command[0] == "keys" and len(command) <= 2:
        return print_keys(command[1] if len(command) == 2 else "")
    if command == ["algorithms"]:
        return print_algorithms()
    if command and command[0] == "plan":
        return show_plan(command[1:])
    if command and command[0] == "doctor":
        return run_doctor(command[1:])
    if command == ["version"]:
        print("\n".join(f"{name:20}{version}" for name, version in versions().items()))
        return 0
    asked_for_help = command in (["-h"], ["--help"], ["help"])
    print(USAGE, file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


def print_keys(word: str = "") -> int:
    """Print the configuration keys whose path or description contains `word`."""
    leaves = visible_leaves()
    for section, choice in CHOICES.items():
        for member in choice.members:
            for path, leaf in visible_leaves({section: member}).items():
                where = f"{section}.{choice.tag}={member}" if choice.tag else f"{section}, {member}"
                leaves.setdefault(path, replace(leaf, doc=f"{where}: {leaf.doc}"))
    found = [leaf for leaf in leaves.values() if word in leaf.path or word in leaf.doc]
    if not found:
        print(f"no key contains {word!r}; `hybrid-rl keys` lists all", file=sys.stderr)
        return 1
    table = _table(("key", "default", "meaning"), ((leaf.path, str(leaf.default), leaf.doc) for leaf in found))
    table.columns[0].no_wrap = True
    _show(_wide_console(), table)
    return 0


def print_algorithms() -> int:
    """Print the presets of `algorithm`, and the sections and members to combine instead."""
    rows = []
    for name, preset in PRESETS.items():
        settings = " ".join(f"{path}={value}" for path, value in preset.settings.items())
        rows.append((name, f"{preset.title}, {preset.source}", settings))
    console = _wide_console()
    _show(console, _table(("algorithm", "paper", "sets"), rows))
    for section in ("advantage", "policy_loss", "kl", "correction"):
        console.print(f"{section}: {', '.join(CHOICES[section].members)}", soft_wrap=True)
    return 0


def _wide_console() -> Console:
    """A console for tables. Piped output is meant for grep: one line per row."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def _show(console: Console, shown: RenderableType) -> None:
    """Print a table, or several. Piped output has no trailing spaces."""
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


PLAN_EXAMPLES = """
examples:
  hybrid-rl plan grpo model.path=Qwen/Qwen2.5-7B rollout.engine=vllm --gpus 8 --gpu H100
  hybrid-rl plan recipes/ppo.py model.path=models/mine max_completion_length=4096 --gpus 8 --gpu-memory 80GB
  hybrid-rl plan run.yaml --gpus 64 --gpu-memory 80GB --host-memory 2TB --layouts benchmarks/layouts

Only the model's config.json is read. No GPU, weights or tokenizer are needed. The exit status is 1 if the run would not
fit."""


def show_plan(arguments: Sequence[str]) -> int:
    """Print what a run would need and move, before anything of it is loaded.

    Returns 1 if it would not fit, or if it cannot be planned.
    """
    parser = argparse.ArgumentParser(
        prog="hybrid-rl plan",
        description="Memory, phases and handoff of a run, and shares of its step time, before it is started.",
        epilog=PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="*", metavar="RUN", help="recipe, YAML file or preset; and KEY=VALUE")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of all hosts; none for a run with device=cpu")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of one GPU, such as 80GB or 80GiB")
    parser.add_argument("--gpu", metavar="NAME", help=f"for shares of time, and its memory: {', '.join(GPUS)}")
    parser.add_argument("--host-memory", metavar="SIZE", help="of one host, for what may leave the GPUs, such as 1TB")
    parser.add_argument("--gpus-per-host", type=int, default=8, metavar="N", help="8 if it is not given")
    parser.add_argument("--layouts", type=Path, metavar="FOLDER", help="traces of vLLM's loader (benchmarks/layouts)")
    parser.add_argument("--json", action="store_true", help="all numbers as JSON, in bytes and seconds")
    try:
        asked = parser.parse_intermixed_args(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    # Imported here, so that no other command waits for it.
    from hybrid_rl.run.planning import plan_words
    from hybrid_rl.run.request import Machine

    machine = Machine(asked.gpus, asked.gpu_memory, asked.gpu, asked.host_memory, asked.gpus_per_host)
    try:
        plan = plan_words(asked.run, machine, layouts=asked.layouts)
    except HybridRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if asked.json:
        print(plan.to_json())
    else:
        _show(_wide_console(), plan)
    return 0 if plan.fits else 1


def run_doctor(arguments: Sequence[str]) -> int:
    """Describe this machine, start the ranks that the `key=value` arguments ask for, and compare them.

    Returns 1 if something does not fit; the problems are printed at the end.
    """
    # Imported here, so that no other command waits for them.
    from hybrid_rl.run.checks import check_attention
    from hybrid_rl.run.prepare import find_hardware

    console = _wide_console()
    try:
        loaded, given = load_config(arguments=arguments)
        facts = versions() | _describe_machine(Path(loaded.output_dir))
        _show(console, _table(("this machine", ""), facts.items()))
        print()
        hardware = find_hardware(loaded)
        config = resolve(loaded, given, hardware=hardware)
        check_attention(config, hardware)
        probes = _probe_ranks(config)
    except HybridRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    tests = list(probes[0].seconds)
    rows = [
        (str(p.rank), p.host, p.device, str(p.num_threads), *(f"{1e3 * p.seconds[test]:.2f} ms" for test in tests))
        for p in probes
    ]
    _show(console, _table(("rank", "host", "device", "threads", *tests), rows))
    problems, doubts = check(probes)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    if not problems:
        print("no problems found")
    return 1 if problems else 0


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _describe_machine(output_dir: Path) -> dict[str, str]:
    """List the resources of this machine that a run uses, by name."""
    memory = psutil.virtual_memory()
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.is_dir())
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    # Imported here, so that no other command waits for it.
    from hybrid_rl.sandbox import sandbox_strength

    found = {
        "accelerators": ", ".join(f"{gpu.name} with {_gib(gpu.total_memory)}" for gpu in gpus) or "none",
        "cores": f"{own_cores()} of {os.cpu_count()} for this process",
        "memory": f"{_gib(memory.available)} of {_gib(memory.total)} free",
        f"disk of {output_dir}": f"{_gib(shutil.disk_usage(existing).free)} free",
    }
    shared = Path("/dev/shm")
    if shared.is_dir():
        found["shared memory, where ranks keep batches"] = f"{_gib(shutil.disk_usage(shared).free)} free"
    found["sandbox of PythonTool"] = str(sandbox_strength())
    return found


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _probe_ranks(config: TrainerConfig) -> list[RankProbe]:
    """Start the ranks of a run without a model, query them, and end them."""
    from hybrid_rl.run.start import RayRanks, local_device
    from hybrid_rl.training.balance import split_over_ranks
    from hybrid_rl.workers.base import WorkerBase
    from hybrid_rl.workers.groups import RankGroup

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


def run_recipe(run: Callable[[list[str]], None]) -> None:
    """Run a recipe on the `key=value` arguments of the command line and exit.

    The library's own errors are printed as one message without a traceback (status 1); Ctrl-C gives status 130.
    """
    try:
        run(sys.argv[1:])
    except HybridRLError as error:
        # Notes hold additions of other ranks.
        print("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
