"""Seconds of one training step of GRPO: this library against TRL's GRPOTrainer, or against itself over vLLM.

Both train the same weights on the same prompts with the same settings, each in a process of its own, and take turns
step by step. `vllm` is this library with rollout.engine=vllm, if that is installed: only the rollout differs. Prints
one line of JSON per work and number of threads.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import levels, peers, report  # noqa: E402
from benchmarks.side import Job  # noqa: E402
from benchmarks.workload import WORKS, Work, save_fitted  # noqa: E402

ALL = ("heavy-tail", "heavy-tail-256x8", "equal", "equal-128", "shared-prompt")
LEARNING_RATE = 1e-6  # too small to change the lengths while they are measured


def arguments() -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    levels.add_argument(parser)
    parser.add_argument("--work", choices=("all", *WORKS), default="heavy-tail")
    parser.add_argument("--steps", type=report.positive, default=20, help="training steps that count")
    parser.add_argument("--warmup", type=report.positive, default=2, help="steps before those")
    parser.add_argument("--micro-batch", type=report.positive, help="TRL's, in completions; default: the whole step")
    parser.add_argument("--tokens-per-micro-batch", type=report.positive, help="ours; default: the library's")
    parser.add_argument("--compare", choices=("trl", "vllm"), default="trl")
    parser.add_argument("--trl-gen", choices=("padded", "continuous"), default="padded", help="how TRL generates")
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL; default: an environment made here")
    parser.add_argument("--model", help="folder of a chat model, for works whose names begin with chat")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="learning rate")
    options = parser.parse_args()
    works = [WORKS[name] for name in (ALL if options.work == "all" else (options.work,))]
    if any((options.model is not None) != work.is_chat for work in works):
        parser.error("--model goes with works whose names begin with chat, and the other way round")
    for work in works:
        if options.micro_batch is not None and work.num_samples % options.micro_batch:
            parser.error(f"--micro-batch {options.micro_batch} does not divide {work.num_samples} completions")
    if options.compare == "vllm" and importlib.util.find_spec("vllm") is None:
        parser.error("--compare vllm: vLLM is not installed; make vllm installs it")
    return options


def main() -> None:
    """Measure every work with every number of threads."""
    options = arguments()
    levels.enter(options.cpu_level)
    python = peers.trl_python(options.trl_python) if options.compare == "trl" else None
    for name in ALL if options.work == "all" else (options.work,):
        for threads in options.threads:
            torch.set_num_threads(threads)
            with tempfile.TemporaryDirectory() as folder:
                measure(WORKS[name], threads, options, python, Path(folder))


def measure(work: Work, threads: int, given: Namespace, python: Path | None, folder: Path) -> None:
    """Run both sides in turns and print the line. python: of TRL; None = the peer is vLLM."""
    end_probability = None
    if given.model is None:
        report.progress(f"{work.name}, {threads} threads: fitting the model")
        end_probability = save_fitted(work, folder / "model", given.seed)
    job = Job(
        work=work,
        folder=str(given.model or folder / "model"),
        output=str(folder / "output"),
        num_steps=given.warmup + given.steps,
        threads=threads,
        seed=given.seed,
        learning_rate=given.lr,
        micro_batch=given.micro_batch,
        tokens_per_micro_batch=given.tokens_per_micro_batch,
        generation=given.trl_gen,
    )
    over_vllm = replace(job, output=str(folder / "vllm"), keys={"engine": "vllm"})
    with peers.ours(job) as ours, peers.trl(job, python) if python else peers.ours(over_vllm) as peer:
        for side in (ours, peer):
            side.wait_ready()
        if python:
            peers.check_versions(ours, peer)
        steps: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        for number in range(job.num_steps):
            for side, done in zip((ours, peer), steps, strict=True):
                done.append(side.step())
            seconds = [done[-1]["wall_seconds"] for done in steps]
            report.progress(f"step {number + 1} of {job.num_steps}: ours {seconds[0]:.3f} s, peer {seconds[1]:.3f} s")
    details = {
        **compare(*(done[given.warmup :] for done in steps)),
        "hybrid_rl": summary(steps[0], given.warmup, ours.ready),
        given.compare: summary(steps[1], given.warmup, peer.ready),
        "end_probability": end_probability,
    }
    report.print_line(
        "grpo_step",
        ours=details["hybrid_rl"]["wall_seconds"]["median"],
        peer=details[given.compare]["wall_seconds"]["median"],
        ratio=details["wall_ratio"],
        unit="seconds per training step",
        hardware=report.hardware(threads, {**peer.ready["versions"], **({} if python else vllm_versions())}),
        settings=report.settings(given, work=work.name, threads=threads, shape=vars(work)),
        details=details,
    )


def vllm_versions() -> dict[str, str]:
    """The version of vLLM, by the name of the package that it is from."""
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return {name: importlib.metadata.version(name) for name in set(names)}


def compare(ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """TRL by ours: above 1, we need less. `*_ratio` are ratios of medians, ratio_of_pairs is of steps side by side."""

    def column(steps: list[dict[str, Any]], name: str) -> list[float]:
        return [step[name] for step in steps]

    ratios = {
        name: report.ratio_of_medians(column(peer, f"{name}_seconds"), column(ours, f"{name}_seconds"))
        for name in ("wall", "cpu", "generation", "update")
    }
    pairs = [b / a for a, b in zip(column(ours, "wall_seconds"), column(peer, "wall_seconds"), strict=True)]
    per_token = [[step["wall_seconds"] / step["num_tokens"] for step in steps] for steps in (peer, ours)]
    return {
        **{f"{name}_ratio": ratio for name, ratio in ratios.items()},
        "ratio_per_token": report.ratio_of_medians(*per_token),
        "ratio_of_pairs": report.spread(pairs),
        "peak_rss_ratio": peer[-1]["peak_rss_bytes"] / ours[-1]["peak_rss_bytes"],
    }


def summary(steps: list[dict[str, Any]], warmup: int, ready: dict[str, Any]) -> dict[str, Any]:
    """What one side did. tokens and longest are means over the steps; peaks of memory count the warm-up too."""
    counted = steps[warmup:]
    peak, imports = steps[-1]["peak_rss_bytes"], ready["imports_rss_bytes"]
    return {
        "wall_seconds": report.spread([step["wall_seconds"] for step in counted]),
        **{
            f"{name}_seconds": median(step[f"{name}_seconds"] for step in counted)
            for name in ("cpu", "system", "generation", "update")
        },
        "num_tokens": fmean(step["num_tokens"] for step in counted),
        "longest_tokens": fmean(step["longest_tokens"] for step in counted),
        "reward": fmean(step["reward"] for step in counted),
        "rewards": [step["reward"] for step in steps],
        "peak_rss_bytes": peak,
        "imports_rss_bytes": imports,
        "peak_rss_above_imports_bytes": peak - imports,
        "warmup_wall_seconds": [step["wall_seconds"] for step in steps[:warmup]],
    }


if __name__ == "__main__":
    peers.run_script(main)
