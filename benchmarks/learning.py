"""Speed of learning: exact-match accuracy per sample and per second, this library against TRL's GRPOTrainer.

A random model learns sums such as "3+4=" by GRPO alone, over several seeds. Both sides start from the same weights,
see the same prompts in the same order with the same settings, and take turns step by step, each in a process of its
own. Every --eval-every steps both write their weights and the same code, outside the timed part, answers every sum
with them, greedily. Prints one line of JSON per number of threads.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, report  # noqa: E402
from benchmarks.side import Job  # noqa: E402
from benchmarks.workload import EOS_ID, PAD_ID, Work, all_sums, build_model, load, save_model  # noqa: E402

SIDES = ("hybrid_rl", "trl")


@dataclass
class Curve:
    """One side of one seed: the accuracy at every evaluation, with the samples and seconds of training before it."""

    accuracies: list[float] = field(default_factory=list)
    num_samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def arguments() -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--seeds", type=report.positive, default=8, help="runs of both sides, from --seed on")
    parser.add_argument("--steps", type=report.positive, default=300, help="training steps of a run")
    parser.add_argument("--eval-every", type=report.positive, default=25, help="steps between evaluations")
    parser.add_argument("--goal", type=float, default=0.75, help="accuracy to reach")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-operand", type=report.positive, default=4)
    parser.add_argument("--max-completion-length", type=report.positive, default=4)
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL; default: an environment made here")
    options = parser.parse_args()
    if options.steps % options.eval_every:
        parser.error(
            f"--eval-every {options.eval_every} does not divide --steps {options.steps}: the end is not evaluated"
        )
    return options


def main() -> None:
    """Run every seed with every number of threads."""
    options = arguments()
    python = peers.trl_python(options.trl_python)
    work = Work(
        "sums", max_operand=options.max_operand, max_completion_length=options.max_completion_length, reward="sum"
    )
    for threads in options.threads:
        torch.set_num_threads(threads)
        runs: list[dict[str, Curve]] = []
        versions: dict[str, str] = {}
        for seed in range(options.seed, options.seed + options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                curves, versions = run_seed(work, seed, threads, options, python, Path(folder))
            runs.append(curves)
            report.progress(f"seed {seed}: {', '.join(final_words(*pair) for pair in curves.items())}")
        details = {**compare(runs, options.goal), "runs": [{n: vars(c) for n, c in run.items()} for run in runs]}
        report.print_line(
            "learning",
            ours=details["seconds"]["hybrid_rl"]["median"],
            peer=details["seconds"]["trl"]["median"],
            ratio=details["seconds_ratio"],
            unit=f"seconds of training to {runs[0]['trl'].num_samples[-1]} samples",
            hardware=report.hardware(threads, versions),
            settings=report.settings(options, threads=threads, shape=vars(work)),
            details=details,
        )


def final_words(name: str, curve: Curve) -> str:
    """The result of a run, for the person who waits."""
    return f"{name} {curve.accuracies[-1]:.2f} in {curve.seconds[-1]:.1f} s"


def run_seed(
    work: Work, seed: int, threads: int, given: Namespace, python: Path, folder: Path
) -> tuple[dict[str, Curve], dict[str, str]]:
    """Both curves of a seed, and the peer's versions."""
    save_model(build_model(work, seed), folder / "model")
    model, tokenizer = load(folder / "model")
    job = Job(work, str(folder / "model"), str(folder / "output"), given.steps, threads, seed, given.lr)
    curves = {name: Curve() for name in SIDES}
    seconds = dict.fromkeys(SIDES, 0.0)
    with peers.ours(job) as ours, peers.trl(job, python) as peer:
        sides = dict(zip(SIDES, (ours, peer), strict=True))
        for side in sides.values():
            side.wait_ready()
        peers.check_versions(ours, peer)
        for step in range(1, given.steps + 1):
            for name, side in sides.items():
                seconds[name] += side.step()["wall_seconds"]
            if step % given.eval_every == 0:
                for name, side in sides.items():
                    side.save(folder / "weights.pt")
                    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
                    curves[name].accuracies.append(accuracy(model, tokenizer, work))
                    curves[name].num_samples.append(step * work.num_samples)
                    curves[name].seconds.append(seconds[name])
        return curves, peer.ready["versions"]


def accuracy(model: Any, tokenizer: PreTrainedTokenizerFast, work: Work) -> float:
    """The share of all sums that the model answers right, greedily, by transformers' own generate."""
    model.eval()
    problems = all_sums(work.max_operand)
    inputs = tokenizer([row["prompt"] for row in problems], return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=work.max_completion_length,
        do_sample=False,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return fmean(float(text.strip() == row["answer"]) for text, row in zip(texts, problems, strict=True))


def compare(runs: list[dict[str, Curve]], goal: float) -> dict[str, Any]:
    """Compare the curves. Differences are ours minus TRL's of the same seed; ratios are TRL's divided by ours, so above
    1 we are better. at_equal_seconds: both at the time when the faster side of the seed finished."""
    per_seed = [run["trl"].seconds[-1] / run["hybrid_rl"].seconds[-1] for run in runs]
    at_equal = {name: [accuracy_at(run, name) for run in runs] for name in SIDES}
    return {
        "final_accuracy": {name: fmean(run[name].accuracies[-1] for run in runs) for name in SIDES},
        "final_accuracy_difference": report.t_interval(
            [run["hybrid_rl"].accuracies[-1] - run["trl"].accuracies[-1] for run in runs]
        ),
        "mean_accuracy_difference": report.t_interval(
            [fmean(run["hybrid_rl"].accuracies) - fmean(run["trl"].accuracies) for run in runs]
        ),
        "goal": {name: reaching(runs, name, goal) for name in SIDES},
        "at_equal_seconds": {name: fmean(values) for name, values in at_equal.items()},
        "at_equal_seconds_difference": report.t_interval(
            [a - b for a, b in zip(at_equal["hybrid_rl"], at_equal["trl"], strict=True)]
        ),
        "seconds": {name: report.spread([run[name].seconds[-1] for run in runs]) for name in SIDES},
        "seconds_ratio": median(per_seed),
        "seconds_ratio_per_seed": report.spread(per_seed),
    }


def accuracy_at(run: dict[str, Curve], name: str) -> float:
    """A side's last accuracy when the faster side of the seed finished; 0 if it had not been evaluated yet."""
    curve = run[name]
    return report.value_at(curve.accuracies, curve.seconds, min(c.seconds[-1] for c in run.values()), before=0.0)


def reaching(runs: list[dict[str, Curve]], name: str, goal: float) -> dict[str, Any]:
    """How many seeds reached the goal, and the medians of samples and seconds over those that did."""
    samples = [report.reached_at(run[name].accuracies, run[name].num_samples, goal) for run in runs]
    seconds = [report.reached_at(run[name].accuracies, run[name].seconds, goal) for run in runs]
    costs = {"num_samples": [s for s in samples if s is not None], "seconds": [s for s in seconds if s is not None]}
    return {
        "accuracy": goal,
        "num_reached": len(costs["seconds"]),
        "num_seeds": len(runs),
        **{f"median_{key}": median(values) if values else None for key, values in costs.items()},
    }


if __name__ == "__main__":
    peers.run_script(main)
