"""`hybrid-rl eval`: a checkpoint or a model evaluated, or two of them compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_rl.cli.generate import checkpoint_of
from hybrid_rl.cli.key_values import take
from hybrid_rl.cli.running import say_lookup
from hybrid_rl.cli.tables import show, table, wide_console
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_rl.extras.evaluations.evaluations import Evaluation
    from hybrid_rl.metrics.paired import PairedTest


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A checkpoint, a run's folder, any model's name, or an earlier eval.json."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA... KEY=VALUE", help="Files with prompts, each a set of its own, and keys."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this one, on the same prompts and noise."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A new folder for the results; runs/eval-... if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as JSON, without the samples.")] = False,
) -> None:
    """Evaluate a checkpoint, and say whether it is better than another.

    The table has the accuracy with its 95 % interval, pass@k and majority@k if there are several samples per prompt,
    and the accuracy that a smaller budget of tokens would have had. A checkpoint brings the limits and templates that
    it was trained with; any key overrides them, and config=FILE.yaml has keys too. reward= is a function
    FILE.py:FUNCTION or a ready-made one (math_reward, exact_match); of several the first says what is right.

    With --against the difference is tested prompt by prompt, so that chance is told from progress. Two earlier
    evaluations (their folders, or eval.json) are compared without generating again.

    Examples:
      hybrid-rl eval runs/first/checkpoint-100 gsm8k.jsonl reward=math_reward
      hybrid-rl eval Qwen/Qwen2.5-0.5B-Instruct gsm8k.jsonl math.parquet \\
          reward=math_reward eval_temperature=1 num_generations_eval=16
      hybrid-rl eval runs/first/checkpoint-100 gsm8k.jsonl reward=math_reward \\
          --against runs/first/checkpoint-50
      hybrid-rl eval runs/eval-new --against runs/eval-old
    """
    from hybrid_rl.extras.evaluations.evaluations import Evaluation

    def load(which: str, folder: Path | None) -> Evaluation:
        if Evaluation.is_kept(Path(which)):
            return Evaluation.read(Path(which))
        other = against if which is model else model
        return _generate(
            which, words or [], folder, None if other is None or not Evaluation.is_kept(Path(other)) else other
        )

    if against is not None and _place(model) == _place(against):
        raise ConfigError(f"--against {against} is {model} itself, so there is nothing to compare: name another one")
    if Evaluation.is_kept(Path(model)) and words and (against is None or Evaluation.is_kept(Path(against))):
        raise ConfigError(
            f"{model} is an earlier evaluation, which is only read: leave out {', '.join(words)}, or name a model"
        )
    candidate = load(model, out)
    baseline = None if against is None else load(against, None if out is None else out.with_name(f"{out.name}-against"))
    tests = {} if baseline is None else candidate.against(baseline)
    if as_json:
        print(json.dumps(_numbers(candidate, baseline, tests), indent=2))
        return
    for evaluation in (candidate, *([] if baseline is None else [baseline])):
        _print(evaluation)
    if baseline is None:
        return
    if differing := candidate.differences(baseline):
        print(f"Not only the models differ: {'; '.join(differing)}.\n")
    for name, test in tests.items():
        print((f"{name}: " if name else "") + test.verdict(*_names(baseline, candidate)))


def _place(name: str) -> Path:
    """Return what tells models and evaluations apart: their folder, whether or not their file is named."""
    from hybrid_rl.extras.evaluations.evaluations import EVAL_FILE

    path = Path(name)
    return (path.parent if path.name == EVAL_FILE else path).resolve()


def _generate(model: str, words: Sequence[str], folder: Path | None, kept: str | None) -> Evaluation:
    """Evaluate a model. kept: an earlier evaluation that it is compared with. Raises ConfigError if reward or data are
    missing."""
    model = checkpoint_of(model)
    anew = "" if kept is None else f" ({kept} is only read, but {model} has to be evaluated for the comparison)"
    from hybrid_rl.cli.train import MADE_REWARDS, PLAIN_REWARDS, load_reward
    from hybrid_rl.config import load_config
    from hybrid_rl.config.config_text import key_values

    rewards, rest = take("reward", words)
    files, rest = take("config", rest)
    settings = [word for word in rest if re.match(r"[\w.]+=", word)]
    paths = [word for word in rest if word not in settings]
    if not rewards:
        raise ConfigError(
            "reward=FILE.py:FUNCTION is missing: the function that says what is right, or the name of a ready-made "
            f"one: {', '.join((*PLAIN_REWARDS, *MADE_REWARDS))}{anew}"
        )
    config, given_keys = load_config(files[-1] if files else None, arguments=settings)
    if not paths and config.data.eval_path is None:
        raise ConfigError(f"the data is missing: give a file with prompts, such as gsm8k.jsonl{anew}")
    functions = [load_reward(reference) for reference in rewards]
    # Imported here, after what can be refused without it.
    from hybrid_rl.extras.evaluations.checkpoints import evaluate_checkpoint

    keys = {key.path: key.value for key in key_values(config) if key.path in given_keys}
    say_lookup(model)
    return evaluate_checkpoint(model, _named(paths), functions, folder=folder, **keys)


def _named(paths: Sequence[str]) -> Any:
    """Return several files as sets that have the names of the files, a single one as it is, none as None."""
    if len(paths) < 2:
        return paths[0] if paths else None
    names = [Path(path).name.partition(".")[0].rpartition(":")[2] for path in paths]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"sets are named by their files, and {', '.join(paths)} have names in common: name them with "
            "data.eval_path.NAME=PATH instead"
        )
    return dict(zip(names, paths, strict=True))


def _print(evaluation: Evaluation) -> None:
    """Print the shares of an evaluation with their intervals, and where it is."""
    rows: list[tuple[str, ...]] = []
    for name, samples in evaluation.sets.items():
        shares = samples.estimates()
        for metric, estimate in shares.items():
            rows.append((name, metric, *_shown(estimate), str(estimate.num_prompts)))
        for budget, estimate in (samples.within() if shares else {}).items():
            if budget != samples.budget:
                rows.append((name, f"accuracy within {budget} tokens", *_shown(estimate), str(estimate.num_prompts)))
        if not shares:
            unknown = "rewards other than 0 and 1, or none: set success_reward"
            why = unknown if samples.right is None else "no prompt has a reward"
            rows.append((name, "accuracy", "-", why, str(len(samples.prompts))))
        reward = evaluation.metrics.get(f"eval/{name}/reward" if name else "eval/reward")
        rows.append((name, "mean reward", "-" if reward is None else f"{reward:.4f}", "", str(len(samples.prompts))))
    titles = ["set", "metric", "value", "95 % interval", "prompts"]
    if set(evaluation.sets) == {""}:
        titles, rows = titles[1:], [row[1:] for row in rows]
    step = "" if evaluation.step is None else f", after step {evaluation.step}"
    print(f"{evaluation.model}{step}")
    show(wide_console(), table(titles, rows))
    if evaluation.folder is not None:
        print(f"samples and numbers: {evaluation.folder}")
    print()


def _shown(found: Any) -> tuple[str, str]:
    return f"{100 * found.value:.1f} %", f"{100 * found.low:.1f} to {100 * found.high:.1f}"


def _names(baseline: Evaluation, found: Evaluation) -> tuple[str, str]:
    """Return what tells two evaluations apart: their models, or, of one model, their folders."""
    if baseline.model != found.model:
        return baseline.model, found.model
    return str(baseline.folder), str(found.folder)


def _numbers(found: Evaluation, baseline: Evaluation | None, tests: Mapping[str, PairedTest]) -> dict[str, Any]:
    """Return what --json prints."""

    def without_samples(evaluation: Evaluation) -> dict[str, Any]:
        return {name: value for name, value in evaluation.to_json().items() if name != "samples"}

    numbers = without_samples(found)
    if baseline is not None:
        numbers["against"] = without_samples(baseline)
        numbers["comparison"] = {
            name: {**vars(test), "is_noise": test.is_noise, "verdict": test.verdict(*_names(baseline, found))}
            for name, test in tests.items()
        }
        numbers["differences"] = found.differences(baseline)
    return numbers
