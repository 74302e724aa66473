"""Learning from samples of older or rounded weights: accuracy per sample and per second on the quickstart's task.

Each seed has its own task and warm start. From there the variants train on equally many samples, with the settings of
the quickstart: synchronous, partial rollouts, the same without correction, and one step off. In a process they take
turns step by step, in an order that rotates; every --eval-every steps the same code, outside the timed part, answers
the held-out sums greedily. Seeds are dealt out to --processes, of one thread each. Completions have at most 6 tokens,
so no step has a long tail: what can be won in seconds are rewards, which wait for --reward-seconds per group
(log-normal, its mean; 0 = no wait). Prints a line of JSON for each seed, and one that compares them all.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from benchmarks.partial import log_normal  # noqa: E402
from hybrid_rl import Trainer  # noqa: E402
from hybrid_rl.config import load_config  # noqa: E402
from hybrid_rl.extras.quickstart.command import SETTINGS  # noqa: E402
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer  # noqa: E402
from hybrid_rl.extras.quickstart.task import MAX_COMPLETION_TOKENS, Task, build_task, exact_answer  # noqa: E402
from hybrid_rl.extras.quickstart.warm_start import greedy_accuracy, warm_start  # noqa: E402

BASE = "synchronous"
FAR: dict[str, Any] = {"partial": True, "oversample": 96, "max_staleness": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "partial": {"partial": True},
    "partial, no correction": {"partial": True, "correction": "none"},
    "one step off": {"async_level": 1},
    # As completions are short, all that is begun is whole at once: with 96 more than a step takes, of three versions.
    "three versions old": FAR,
    "three versions old, no correction": {**FAR, "correction": "none"},
    # Samples of rounded weights, and of the same version.
    "int8": {"quantization": "int8"},
    "int8, no correction": {"quantization": "int8", "correction": "none"},
}
DEFAULT = ("synchronous", "partial", "partial, no correction", "one step off")


@dataclass
class Curve:
    """A variant of a seed: the accuracy at every evaluation, with the samples trained on and the seconds of training
    before it. mean_age: of tokens, over all steps, in policy versions; ess: effective sample size of the batches."""

    accuracies: list[float] = field(default_factory=list)
    num_samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    mean_age: float = 0.0
    ess: float = 1.0


Run = dict[str, Curve]  # of a seed, by variant


class Slow:
    """The reward of the task, after a wait for each group."""

    __name__ = "exact_answer"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def __call__(
        self, prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any
    ) -> list[float]:
        import asyncio

        await asyncio.sleep(log_normal(self._seconds, "wait", prompts[0], *completions))
        return exact_answer(prompts, completions, answer, **kwargs)


def run_seed(seed: int, given: Namespace) -> Run:
    """Warm-start the model of a seed, and train all variants from there."""
    torch.set_num_threads(1)
    logging.getLogger("hybrid_rl").setLevel(logging.ERROR)
    task, tokenizer = build_task(seed), build_tokenizer()
    model = build_model(tokenizer, seed)
    warm = warm_start(model, tokenizer, task, seed)
    return learn(model, warm.accuracy, task, seed, given)


def learn(model: Any, accuracy: float, task: Task, seed: int, given: Namespace) -> Run:
    """Return the curves of all variants, from copies of this model, which has this accuracy."""
    tokenizer = build_tokenizer()
    judged = copy.deepcopy(model)  # what is evaluated, so that evaluations touch no trainer
    curves = {name: Curve([accuracy], [0], [0.0]) for name in given.variants}
    seconds, ages, sizes = ({name: list[float]() for name in given.variants} for _ in range(3))
    with tempfile.TemporaryDirectory(prefix="hybrid-rl-age-") as folder:
        trainers = {name: make_trainer(copy.deepcopy(model), task, seed, Path(folder), name, given) for name in curves}
        try:
            for step in range(1, given.steps + 1):
                first = step % len(trainers)
                for name in (*given.variants[first:], *given.variants[:first]):
                    start = time.perf_counter()
                    metrics = trainers[name].step().metrics
                    seconds[name].append(time.perf_counter() - start)
                    ages[name].append(metrics["staleness/mean_age"])
                    sizes[name].append(metrics["mismatch/ess_tokens"])
                if step % given.eval_every == 0:
                    for name, curve in curves.items():
                        judged.load_state_dict(trainers[name].module.state_dict())
                        heldout_accuracy = greedy_accuracy(judged, tokenizer, task.heldout, MAX_COMPLETION_TOKENS)
                        curve.accuracies.append(heldout_accuracy)
                        curve.num_samples.append(step * given.prompts * given.generations)
                        curve.seconds.append(sum(seconds[name]))
        finally:
            for trainer in trainers.values():
                trainer.close()
    for name, curve in curves.items():
        curve.mean_age, curve.ess = fmean(ages[name]), fmean(sizes[name])
    return curves


def make_trainer(model: Any, task: Task, seed: int, folder: Path, name: str, given: Namespace) -> Trainer:
    """Make the Trainer of a variant. All have the same data and noise."""
    keys = {
        "seed": seed,
        "max_steps": given.steps,
        "output_dir": str(folder),
        "run_name": name.replace(",", "").replace(" ", "-"),
    }
    sizes = {"prompts_per_step": given.prompts, "num_generations": given.generations}
    quiet = {"log_level": "quiet", "score_by": "group"}
    settings = yaml.safe_load(SETTINGS.read_text())
    del settings["eval_steps"]  # evaluations are outside the timed part
    settings["warmup_steps"] = min(settings["warmup_steps"], given.steps // 6)  # of a run made shorter
    config, _ = load_config(None, {**settings, **keys, **sizes, **quiet, **VARIANTS[name]})
    reward = Slow(given.reward_seconds) if given.reward_seconds else exact_answer
    return Trainer(model, reward, task.train, tokenizer=build_tokenizer(), config=config)


def compare(runs: Sequence[Run], goal: float) -> dict[str, Any]:
    """Compare each variant with the synchronous one, over seeds. Differences are the variant's minus the synchronous
    one's of the same seed. is_within: whether its mean lies inside the interval of the synchronous mean. At equal
    seconds: when the faster of the two had trained on all samples."""
    base = [run[BASE] for run in runs]
    of_base = report.t_interval([curve.accuracies[-1] for curve in base])
    comparisons: dict[str, Any] = {}
    for name in runs[0]:
        own = [run[name] for run in runs]
        pairs = list(zip(own, base, strict=True))
        ends = [min(curve.seconds[-1] for curve in pair) for pair in pairs]
        at_equal = [[accuracy_at(curve, end) for curve in pair] for pair, end in zip(pairs, ends, strict=True)]
        reached = [report.reached_at(curve.accuracies, curve.seconds, goal) for curve in own]
        seconds = [value for value in reached if value is not None]
        final = report.t_interval([curve.accuracies[-1] for curve in own])
        comparisons[name] = {
            "final_accuracy": final,
            "is_within": of_base["low"] is not None and of_base["low"] <= final["mean"] <= of_base["high"],
            "accuracy_by_samples": [
                {"num_samples": samples, **report.t_interval([curve.accuracies[place] for curve in own])}
                for place, samples in enumerate(own[0].num_samples)
            ],
            "final_difference": report.t_interval([a.accuracies[-1] - b.accuracies[-1] for a, b in pairs]),
            "mean_difference": report.t_interval([fmean(a.accuracies) - fmean(b.accuracies) for a, b in pairs]),
            "difference_at_equal_seconds": report.t_interval([a - b for a, b in at_equal]),
            "seconds": report.spread([curve.seconds[-1] for curve in own]),
            "times_as_fast": median(b.seconds[-1] / a.seconds[-1] for a, b in pairs),
            "goal": {"accuracy": goal, "num_reached": len(seconds), "num_seeds": len(runs)}
            | {"median_seconds": median(seconds) if seconds else None},
            "mean_age": fmean(curve.mean_age for curve in own),
            "ess_tokens": fmean(curve.ess for curve in own),
        }
    return comparisons


def accuracy_at(curve: Curve, seconds: float) -> float:
    """Return the last accuracy that was measured after at most so many seconds of training."""
    return report.value_at(curve.accuracies, curve.seconds, seconds, before=curve.accuracies[0])


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Read the command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--seeds", type=report.positive, default=8, help="seeds, from --seed on")
    parser.add_argument("--processes", type=report.positive, default=2, help="seeds that run at a time")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=[*DEFAULT])
    parser.add_argument("--steps", type=report.positive, default=60, help="training steps of a variant")
    parser.add_argument("--eval-every", type=report.positive, default=5, help="steps between evaluations")
    parser.add_argument("--prompts", type=report.positive, default=32, help="prompts of a step")
    parser.add_argument("--generations", type=report.positive, default=8, help="samples of a prompt")
    parser.add_argument("--goal", type=float, default=0.75, help="accuracy to reach")
    parser.add_argument("--reward-seconds", type=float, default=0.0, help="mean wait of a group's reward")
    options = parser.parse_args(argv)
    if options.steps % options.eval_every:
        parser.error(
            f"--eval-every {options.eval_every} does not divide --steps {options.steps}: the end is not evaluated"
        )
    if BASE not in options.variants:
        parser.error(f"--variants must have {BASE!r}, with which the others are compared")
    return options


def main() -> None:
    """Run all seeds, and compare."""
    options = arguments()
    runs: dict[int, Run] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(options.processes, options.seeds), mp_context=context) as pool:
        futures = {
            pool.submit(run_seed, seed, options): seed for seed in range(options.seed, options.seed + options.seeds)
        }
        for future in as_completed(futures):
            seed = futures[future]
            runs[seed] = future.result()
            curves = {name: asdict(curve) for name, curve in runs[seed].items()}
            print_line("learning_age seed", {"seed": seed, "curves": curves}, options)
            ends = (f"{name} {c.accuracies[-1]:.3f} in {c.seconds[-1]:.1f} s" for name, c in runs[seed].items())
            report.progress(f"seed {seed}: {'; '.join(ends)}")
    print_line("learning_age", compare([runs[seed] for seed in sorted(runs)], options.goal), options)


def print_line(benchmark: str, details: dict[str, Any], given: Namespace) -> None:
    """Print a line whose numbers are all in its details: there are several sides."""
    report.print_line(
        benchmark,
        **dict.fromkeys(("ours", "peer", "ratio")),
        unit="share of held-out sums answered right; seconds of training",
        hardware=report.hardware(1, {}),
        settings=report.settings(given),
        details=details,
    )


if __name__ == "__main__":
    main()
