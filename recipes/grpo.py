"""GRPO, from nothing to a model that has learned: `make run`, or `python recipes/grpo.py [key=value ...]`.

Without a model it builds the quickstart (recipes/quickstart): a small Qwen2, its tokenizer, and sums to learn on. A
warm start imitates demonstrations that mostly forget the carry; GRPO, which is told only right or wrong, improves on
them. For comparison supervised learning goes on for the same time: on the same demonstrations, and on right answers.

With a model it trains that on your data, with your reward function, from the library's defaults:

    python recipes/grpo.py model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_path=train.jsonl reward=my_reward.py:score
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # a script is started with its own folder on the path, not the project's

from hybrid_rl import Trainer  # noqa: E402
from hybrid_rl.cli import run_recipe  # noqa: E402
from hybrid_rl.config import load_config, num_training_steps, resolve  # noqa: E402
from hybrid_rl.errors import ConfigError  # noqa: E402
from recipes.quickstart.model import build_model, build_tokenizer  # noqa: E402
from recipes.quickstart.task import build_task, exact_answer  # noqa: E402
from recipes.quickstart.warm_start import (  # noqa: E402
    WARM_START_STEPS,
    SupervisedProgress,
    continue_supervised,
    warm_start,
)

SUPERVISED = (
    "or then more of the same demonstrations",
    "or then demonstrations that are all right",
)

console = Console(highlight=False)


class Row(NamedTuple):
    """A line of the closing table. accuracy: share of held-out problems; seconds: wall time."""

    name: str
    accuracy: float
    steps: int
    seconds: float


def main(arguments: list[str]) -> None:
    """Run on `key=value` arguments."""
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        console.print(__doc__, markup=False, soft_wrap=True)
        console.print("Every key: hybrid-rl keys. With a model, config=FILE.yaml is read first.")
        return
    reward, arguments = take("reward", arguments)
    file, arguments = take("config", arguments)
    config, _ = load_config(file, arguments=arguments)
    if config.model.path is None:
        if reward is not None or file is not None or config.data.train_path is not None:
            raise ConfigError("reward=, config= and data.train_path go with a model of your own: set model.path too")
        quickstart(arguments)
        return
    if reward is None:
        raise ConfigError("reward=FILE.py:FUNCTION is missing: the function that scores completions")
    with Trainer(reward_funcs=load_reward(reward), config=config) as trainer:
        trainer.fit()
        console.print(f"results: {trainer.run_folder}", soft_wrap=True)


def quickstart(arguments: list[str]) -> None:
    """Build, warm start, improve by GRPO, compare."""
    config, given = load_config(HERE / "grpo.yaml", arguments=arguments)
    torch.set_num_threads(1)  # half a million parameters: a second thread would mostly wait for the first
    task, tokenizer = build_task(config.seed), build_tokenizer()
    num_training_steps(resolve(config, given), len(task.train))  # what cannot be is refused before the warm start
    model = build_model(tokenizer, config.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"task: {len(task.train)} problems such as {task.train[0]['prompt']}{task.train[0]['answer']}, ", end=""
    )
    console.print(f"{len(task.heldout)} held out with other operands; model: Qwen2, {size / 1e6:.2f}M parameters")
    with console.status("supervised warm start") as status:

        def show(progress: SupervisedProgress) -> None:
            line = f"supervised warm start: step {progress.step} of {WARM_START_STEPS}, loss {progress.loss:.3f}"
            status.update(line)
            if not console.is_terminal and progress.step % 100 == 0:
                console.print(line)

        warm = warm_start(model, tokenizer, task, config.seed, on_progress=show)
    console.print(f"warm start: {warm.accuracy:.1%} held-out accuracy after {warm.steps} supervised steps")
    supervised = [copy.deepcopy(model) for _ in range(2)]
    started = time.perf_counter()
    with Trainer(model, exact_answer, task.train, task.heldout, tokenizer=tokenizer, config=config) as trainer:
        metrics = trainer.fit()
        run, steps = trainer.run_folder, trainer.global_step
    seconds = time.perf_counter() - started
    rows = [
        Row("supervised warm start", warm.accuracy, warm.steps, warm.seconds),
        Row("then GRPO, told only right or wrong", metrics["eval/accuracy"], steps, seconds),
    ]
    for copied, from_answers, name in zip(supervised, (False, True), SUPERVISED, strict=True):
        waiting = f"for comparison: {name}, {seconds:.0f} s"
        if not console.is_terminal:
            console.print(waiting)
        with console.status(waiting):
            more = continue_supervised(copied, tokenizer, task, seconds, config.seed, from_answers=from_answers)
        rows.append(Row(name, more.accuracy, more.steps, more.seconds))
    show_results(run, rows)


def show_results(run: Path, rows: list[Row]) -> None:
    """The closing table, also written to comparison.json in the run folder."""
    table = Table(title="held-out greedy accuracy", title_justify="left")
    for column in ("", "accuracy", "steps", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(row.name, f"{row.accuracy:.1%}", str(row.steps), f"{row.seconds:.0f}")
    console.print(table)
    console.print("Supervised learning copies what it is shown; GRPO was shown no solution.")
    (run / "comparison.json").write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    console.print(f"curves, metrics and samples: {run}", soft_wrap=True)


def take(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split `name=VALUE`, which is no configuration key, off the arguments."""
    found = [argument.removeprefix(f"{name}=") for argument in arguments if argument.startswith(f"{name}=")]
    return (found[-1] if found else None), [a for a in arguments if not a.startswith(f"{name}=")]


def load_reward(reference: str) -> Callable[..., Any]:
    """The function FUNCTION of FILE.py. Raises ConfigError where either is missing."""
    file, _, name = reference.rpartition(":")
    if not file or not Path(file).is_file():
        raise ConfigError(f"reward={reference!r} is not FILE.py:FUNCTION with a file that exists")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    namespace: Mapping[str, Any] = vars(module)
    if name not in namespace:
        raise ConfigError(f"reward={reference!r}: {file} has no {name!r}")
    function: Callable[..., Any] = namespace[name]
    return function


if __name__ == "__main__":
    run_recipe(main)
