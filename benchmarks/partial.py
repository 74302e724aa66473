"""Seconds of a training step with heavy-tailed completions: synchronous, partial, one step off, and both.

Completions end by themselves, with a mean of a tenth of the limit: geometric (a model whose probability of EOS was
fitted, `workload.py`), or with `--lengths lognormal` at a length that depends on the seed of the sample alone. The
variants take turns, one training step after the other, each in a process of its own; a step trains on the same number
of samples. `--reward-seconds` makes a reward wait for each group: log-normal, with this mean. Prints one line of JSON.

With `--rollout-ranks n` the variants "apart" and "partial, apart" have n ranks that only generate beside those of
`--ranks`, and the line says which share of a step both sides worked. "synchronous, all ranks" has as many in all, which
train and generate in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import Work, load, rows, save_fitted, spread  # noqa: E402
from hybrid_rl import Trainer  # noqa: E402
from hybrid_rl.engines.base import FinishReason, Generation, derive_seed  # noqa: E402
from hybrid_rl.engines.guards import Generator  # noqa: E402

SIGMA = 1.0  # of the logarithm of lengths and waits
MEAN_SHARE = 0.1  # of the limit
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "partial": {"partial": True},
    "one step off": {"async_level": 1},
    "partial, one step off": {"partial": True, "async_level": 1},
}
APART: dict[str, dict[str, Any]] = {"apart": {}, "partial, apart": {"partial": True}}
ALL_RANKS = "synchronous, all ranks"
FIRST_RUN = 4  # steps before any is counted: compilers, caches, and a buffer that fills


def log_normal(mean: float, *seed: int | str) -> float:
    """Draw a log-normal number with this mean."""
    normal = np.random.default_rng(derive_seed(*seed)).standard_normal()
    return mean * math.exp(SIGMA * normal - SIGMA**2 / 2)


def end_by_schedule() -> None:
    """Have every engine of this process end completions at the length of their seeds."""
    extend = Generator._extend

    def scheduled(self: Generator, generation: Generation, token: int, logprob: float) -> FinishReason | None:
        extend(self, generation, token, logprob)
        params, made = generation.request.params, len(generation.tokens)
        if made >= params.max_tokens:
            return "length"
        return "stop" if made >= log_normal(MEAN_SHARE * params.max_tokens, "length", params.seed) else None

    Generator._extend = scheduled  # type: ignore[method-assign]


class Reward:
    """A reward that differs between samples, after a wait for each group if `seconds` is above 0."""

    __name__ = "spread"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        if self._seconds:
            import asyncio

            await asyncio.sleep(log_normal(self._seconds, "wait", *(str(ids) for ids in completion_ids)))
        return spread(completion_ids)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Alternate the steps of the variants, and return their seconds, and how much faster they are than the first."""
    seconds: dict[str, list[float]] = {name: [] for name in options.variants}
    metrics: dict[str, list[dict[str, float]]] = {name: [] for name in options.variants}
    with tempfile.TemporaryDirectory(prefix="hybrid-rl-partial-") as folder, ExitStack() as running:
        save_fitted(work_of(options), Path(folder) / "model", 0)
        processes = {name: running.enter_context(process_of(options, Path(folder), name)) for name in options.variants}
        for step in range(FIRST_RUN + options.steps):
            for name, process in processes.items():
                process.send("step")
                taken, step_metrics = process.recv()
                if step >= FIRST_RUN:
                    seconds[name].append(taken)
                    metrics[name].append(step_metrics)
    means = {name: statistics.fmean(its) for name, its in seconds.items()}
    medians = {name: statistics.median(its) for name, its in seconds.items()}

    def mean(metric: str) -> dict[str, float]:
        return {
            name: round(statistics.fmean(values.get(metric, 0.0) for values in its), 4) for name, its in metrics.items()
        }

    first = options.variants[0]
    return {
        "benchmark": "partial",
        **{name: value for name, value in vars(options).items() if name != "variants"},
        "seconds_per_step": {name: round(value, 4) for name, value in means.items()},
        "median_seconds": {name: round(value, 4) for name, value in medians.items()},
        "faster": {name: round(means[first] / value, 2) for name, value in means.items()},
        "faster_by_medians": {name: round(medians[first] / value, 2) for name, value in medians.items()},
        "mean_length": mean("completions/mean_length"),
        "generating_busy": mean("ranks/generating_busy"),
        "training_busy": mean("ranks/training_busy"),
        "handoff_seconds": mean("timing/handoff"),
        "handoff_write_seconds": mean("timing/handoff_write"),
        "generation_seconds": mean("timing/rollout"),
        "update_seconds": mean("timing/update"),
        "reward_seconds_waited": mean("timing/reward"),
        "mean_age": mean("staleness/mean_age"),
        "idle_share": mean("engine/idle_share"),
    }


def work_of(options: argparse.Namespace) -> Work:
    """Return the work that the command line describes."""
    return Work(
        "partial",
        hidden_size=options.hidden,
        num_layers=options.layers,
        mean_length=MEAN_SHARE * options.limit,
        max_completion_length=options.limit,
        prompts_per_step=options.prompts,
        num_generations=options.generations,
    )


@contextmanager
def process_of(options: argparse.Namespace, folder: Path, name: str) -> Iterator[Connection]:
    """Start the process of a variant; for whatever is sent to it, it takes a training step and answers."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=take_steps, args=(there, options, folder, name))
    process.start()
    there.close()  # so that the end of the process is the end of what is read here
    try:
        yield here
    finally:
        here.close()
        process.join()


def take_steps(pipe: Connection, options: argparse.Namespace, folder: Path, name: str) -> None:
    """Take a training step whenever something comes, and answer with its seconds and metrics, until the pipe closes."""
    if options.lengths == "lognormal":
        end_by_schedule()
    with make_trainer(options, work_of(options), folder, keys_of(options, name)) as trainer:
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            start = time.perf_counter()
            metrics = dict(trainer.step().metrics)
            pipe.send((time.perf_counter() - start, metrics))


def keys_of(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the keys in which a variant differs from the others."""
    keys: dict[str, Any] = {"num_ranks": options.ranks}
    if name in APART:
        keys |= {**APART[name], "rollout_ranks": options.rollout_ranks}
    elif name == ALL_RANKS:
        keys["num_ranks"] += options.rollout_ranks
    else:
        keys |= VARIANTS[name]
    if options.cpus_per_rank is not None and (keys["num_ranks"] > 1 or name in APART):
        keys["ray.cpus_per_rank"] = options.cpus_per_rank
    return keys


def make_trainer(options: argparse.Namespace, work: Work, folder: Path, variant: dict[str, Any]) -> Trainer:
    """Make the Trainer of a variant. All have the same model, data and noise."""
    model, tokenizer = load(folder / "model")
    held = {"oversample": options.oversample, "max_staleness": options.max_staleness} if "partial" in variant else {}
    return Trainer(
        model,
        Reward(options.reward_seconds),
        rows(work, 512, 0),
        tokenizer=tokenizer,
        prompts_per_step=work.prompts_per_step,
        num_generations=work.num_generations,
        max_completion_length=work.max_completion_length,
        max_num_seqs=options.max_num_seqs,
        max_steps=10_000,
        learning_rate=1e-6,  # lengths stay what they were fitted to
        engine=options.engine,
        score_by="group",
        log_level="quiet",
        output_dir=str(folder / "runs"),
        **variant,
        **{name: value for name, value in held.items() if value is not None},
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*VARIANTS, *APART, ALL_RANKS]
    parser.add_argument("--variants", nargs="+", choices=names, default=[*VARIANTS])
    parser.add_argument("--engine", default="inplace")
    parser.add_argument("--lengths", choices=["geometric", "lognormal"], default="geometric")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rollout-ranks", type=int, default=0, help="of variants that need more ranks")
    parser.add_argument("--cpus-per-rank", type=int, help="of variants with several processes")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--limit", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--oversample", type=int)
    parser.add_argument("--max-staleness", type=int)
    parser.add_argument("--reward-seconds", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    apart = {*APART, ALL_RANKS} & {*options.variants}
    if bool(apart) != bool(options.rollout_ranks):
        parser.error(f"--rollout-ranks is for --variants {', '.join([*APART, ALL_RANKS])}: give both, or neither")
    if options.lengths == "lognormal" and (options.engine != "inplace" or options.ranks > 1 or apart):
        parser.error("--lengths lognormal tells the engine of this process when to end: it needs inplace and one rank")
    print(json.dumps(compare(options)))


if __name__ == "__main__":
    main()
