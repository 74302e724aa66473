"""The command line of every recipe: the quickstart without a model, your own data with one."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.cli import run_recipe
from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.errors import ConfigError
from hybrid_rl.run.prepare import find_hardware
from recipes.quickstart.kept import KeepStart, take_up
from recipes.quickstart.model import build_model, build_tokenizer
from recipes.quickstart.run import check, improve
from recipes.quickstart.task import Task, build_task
from recipes.quickstart.warm_start import (
    WARM_START_STEPS,
    SupervisedProgress,
    WarmStartReport,
    continue_supervised,
    warm_start,
)

SUPERVISED = (
    "more of the same demonstrations",
    "only right demonstrations",
)

console = Console(highlight=False)


class Row(NamedTuple):
    """A line of the closing table. accuracy: share of held-out problems; seconds: wall time."""

    name: str
    accuracy: float
    steps: int
    seconds: float


def start(script: str, doc: str | None, *, compares: bool = False) -> None:
    """Run a recipe as a script, with the settings in the YAML file beside it, and exit.

    compares: the quickstart ends with supervised learning for the same time.
    """
    settings = Path(script).with_suffix(".yaml")
    run_recipe(lambda arguments: main(arguments, settings, doc or "", compares=compares))


def main(arguments: list[str], settings: Path, doc: str, *, compares: bool = False) -> None:
    """Run on `key=value` arguments."""
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        console.print(doc, markup=False, soft_wrap=True)
        console.print("Every key: hybrid-rl keys. With a model, config=FILE.yaml is read first.")
        return
    reward, arguments = take("reward", arguments)
    file, arguments = take("config", arguments)
    config, given = load_config(file, arguments=arguments)
    if "algorithm.name" not in given:
        config, _ = load_config(file, {"algorithm": load_config(settings)[0].algorithm.name}, arguments)
    if config.model.path is None:
        if reward is not None or file is not None or config.data.train_path is not None:
            raise ConfigError("reward=, config= and data.train_path need a model of your own: set model.path too")
        quickstart(settings, arguments, compares=compares)
        return
    if reward is None and config.advantage.needs_rewards:
        raise ConfigError("reward=FILE.py:FUNCTION is missing: the function that scores completions")
    function = None if reward is None else load_reward(reward)
    with Trainer(reward_funcs=function, config=config) as trainer:
        trainer.fit()
        console.print(f"results: {trainer.run_folder}", soft_wrap=True)


def quickstart(settings: Path, arguments: Sequence[str], *, compares: bool) -> None:
    """Build the model, warm-start it, improve it, and compare on request."""
    config, given = load_config(settings, arguments=arguments)
    torch.set_num_threads(1)  # half a million parameters: a second thread would mostly wait for the first
    task, tokenizer = build_task(config.seed), build_tokenizer()
    # What cannot run is refused before the warm start; that keys do nothing, while it is known which ones were given.
    resolve(config, given, hardware=find_hardware(config))
    check(build_model(tokenizer, config.seed), tokenizer, task, config)
    model, warm = warm_started(task, tokenizer, config)
    supervised = [copy.deepcopy(model) for _ in range(2 if compares else 0)]
    outcome = improve(model, tokenizer, task, config, [KeepStart(model, config.seed, asdict(warm))])
    rows = [
        Row("supervised warm start", warm.accuracy, warm.steps, warm.seconds),
        Row(row_name(config), outcome.accuracy, outcome.steps, outcome.seconds),
    ]
    if compares and outcome.resumed_at:
        console.print("no comparison with supervised learning: this run was resumed, and its time is not that of all")
        compares = False
    if compares:
        rows += comparison(supervised, task, tokenizer, config.seed, outcome.seconds)
    show_results(outcome.run, rows, compares=compares)


def warm_started(
    task: Task, tokenizer: PreTrainedTokenizerFast, config: TrainerConfig
) -> tuple[Qwen2ForCausalLM, WarmStartReport]:
    """Build a model and warm-start it, with its progress on the console, unless a run is resumed that has kept that."""
    model = build_model(tokenizer, config.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"task: {len(task.train)} problems such as {task.train[0]['prompt']}{task.train[0]['answer']}, ", end=""
    )
    console.print(f"{len(task.heldout)} held out with other operands; model: Qwen2, {size / 1e6:.2f}M parameters")
    kept = take_up(model, config)
    if kept is not None:
        console.print("warm start: that of the run that is resumed")
        return model, WarmStartReport(kept["accuracy"], int(kept["steps"]), kept["seconds"])
    with warming(WARM_START_STEPS) as show:

        def on_progress(progress: SupervisedProgress) -> None:
            show(progress.step, progress.loss)

        warm = warm_start(model, tokenizer, task, config.seed, on_progress=on_progress)
    console.print(f"warm start: {warm.accuracy:.1%} held-out accuracy after {warm.steps} supervised steps")
    return model, warm


@contextlib.contextmanager
def warming(num_steps: int) -> Iterator[Callable[[int, float], None]]:
    """Show a warm start on the console, and say so if it is interrupted. Gives what is called with the number of steps
    done and the last loss."""
    what = "supervised warm start"
    if not console.is_terminal:
        console.print(f"{what}: {num_steps} steps")
    try:
        with console.status(f"{what}: {num_steps} steps") as status:

            def show(step: int, loss: float) -> None:
                line = f"{what}: step {step} of {num_steps}, loss {loss:.3f}"
                status.update(line)
                if not console.is_terminal and step % 100 == 0:
                    console.print(line)

            yield show
    except KeyboardInterrupt:
        console.print(f"interrupted in the {what}, before training; nothing of it is kept")
        raise


def row_name(config: TrainerConfig) -> str:
    """The name of the recipe's own training in the closing table."""
    if config.algorithm.name == "grpo":
        return "then GRPO, from right or wrong only"
    return f"then {PRESETS[config.algorithm.name].title}"


def comparison(
    models: Sequence[Qwen2ForCausalLM], task: Task, tokenizer: PreTrainedTokenizerFast, seed: int, seconds: float
) -> list[Row]:
    """Supervised learning from the same start for the same time: on the same demonstrations, and on right answers."""
    rows = []
    for model, from_answers, name in zip(models, (False, True), SUPERVISED, strict=True):
        waiting = f"for comparison: {name}, {seconds:.0f} s"
        if not console.is_terminal:
            console.print(waiting)
        with console.status(waiting):
            more = continue_supervised(model, tokenizer, task, seconds, seed, from_answers=from_answers)
        rows.append(Row(name, more.accuracy, more.steps, more.seconds))
    return rows


def show_results(run: Path, rows: Sequence[Row], *, compares: bool) -> None:
    """Print the closing table, and write it to comparison.json in the run folder."""
    table = Table(title="held-out greedy accuracy", title_justify="left")
    for column in ("", "accuracy", "steps", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(row.name, f"{row.accuracy:.1%}", str(row.steps), f"{row.seconds:.0f}")
    console.print(table)
    if compares:
        console.print("Supervised learning copies what it is shown; GRPO was shown no solution.")
    (run / "comparison.json").write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    console.print(f"curves, metrics and samples: {run}", soft_wrap=True)


def take(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split `name=VALUE`, which is not a configuration key, off the arguments."""
    found = [argument.removeprefix(f"{name}=") for argument in arguments if argument.startswith(f"{name}=")]
    return (found[-1] if found else None), [a for a in arguments if not a.startswith(f"{name}=")]


def load_reward(reference: str) -> Callable[..., Any]:
    """Import FUNCTION from FILE.py. Raises ConfigError if either is missing."""
    file, _, name = reference.rpartition(":")
    if not file or not Path(file).is_file():
        raise ConfigError(f"reward={reference!r} is not FILE.py:FUNCTION with an existing file")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    namespace: Mapping[str, Any] = vars(module)
    if name not in namespace:
        raise ConfigError(f"reward={reference!r}: {file} has no {name!r}")
    function: Callable[..., Any] = namespace[name]
    return function
