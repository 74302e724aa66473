"""The quickstart from warm start to closing table: `hybrid-rl quickstart`, and every recipe without a model."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from hybrid_rl.config import TrainerConfig, resolve
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.extras.quickstart.kept import KeepStart, take_up
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer
from hybrid_rl.extras.quickstart.run import check, improve, settings_of
from hybrid_rl.extras.quickstart.task import Task, build_task
from hybrid_rl.extras.quickstart.warm_start import (
    STEPS_PER_EVALUATION,
    WARM_START_STEPS,
    SupervisedReport,
    continue_supervised,
    warm_start,
)
from hybrid_rl.run.prepare import find_hardware

SETTINGS = Path(__file__).with_name("grpo.yaml")  # those of recipes/grpo.yaml, for installations without recipes

SUPERVISED = (
    "more of the same demonstrations",
    "only right demonstrations",
)

console = Console(highlight=False)


@dataclass(frozen=True)
class Row:
    """A line of the closing table. accuracy: share of held-out problems; seconds: wall time."""

    name: str
    accuracy: float
    steps: int
    seconds: float


def quickstart(settings: Path, arguments: Sequence[str], *, compares: bool) -> None:
    """Build the model, warm-start it, improve it, and compare on request."""
    config, given_keys = settings_of(settings, arguments)
    torch.set_num_threads(1)  # half a million parameters: a second thread would mostly wait for the first
    task, tokenizer = build_task(config.seed), build_tokenizer()
    # What cannot run is refused before the warm start; that keys do nothing, while it is known which ones were given.
    resolve(config, given_keys, hardware=find_hardware(config))
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
) -> tuple[Qwen2ForCausalLM, SupervisedReport]:
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
        return model, SupervisedReport(kept["accuracy"], int(kept["steps"]), kept["seconds"])
    with warming(WARM_START_STEPS) as show:
        warm = warm_start(model, tokenizer, task, config.seed, on_progress=show)
    console.print(f"warm start: {warm.accuracy:.1%} held-out accuracy after {warm.steps} supervised steps")
    return model, warm


@contextlib.contextmanager
def warming(num_steps: int) -> Iterator[Callable[[int, float], None]]:
    """Show a warm start on the console, and say so if it is interrupted. Gives what is called with the number of steps
    done and the last loss."""
    phase = "supervised warm start"
    if not console.is_terminal:
        console.print(f"{phase}: {num_steps} steps")
    try:
        with console.status(f"{phase}: {num_steps} steps") as status:
            begin = time.perf_counter()

            def show(step: int, loss: float) -> None:
                left = (time.perf_counter() - begin) / step * (num_steps - step)
                line = f"{phase}: step {step} of {num_steps}, loss {loss:.3f}, about {left:.0f} s left"
                status.update(line)
                if not console.is_terminal and (step % 100 == 0 or step == STEPS_PER_EVALUATION):
                    console.print(line)

            yield show
    except KeyboardInterrupt:
        console.print(f"interrupted in the {phase}, before training; nothing of it is kept")
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


def show_results(run: Path, rows: Sequence[Row], *, compares: bool, command: str = "quickstart") -> None:
    """Print the closing table, and write it to comparison.json in the run folder. command: what to type again."""
    table = Table(title="held-out greedy accuracy", title_justify="left")
    for column in ("", "accuracy", "steps", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(row.name, f"{row.accuracy:.1%}", str(row.steps), f"{row.seconds:.0f}")
    console.print(table)
    if compares:
        console.print("Supervised learning copies what it is shown; GRPO was shown no solution.")
    (run / "comparison.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    show_what_is_next(run, command)


def show_what_is_next(run: Path, again: str) -> None:
    """Print where the results of a run are, and commands to go on with. again: the command that has trained."""
    run = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
    picture, program = run / "curves.png", own_program()
    if picture.is_file():
        console.print(f"picture of the curves: {picture}", soft_wrap=True)
    console.print(f"metrics and samples:   {run}", soft_wrap=True)
    console.print("\nnext:")
    for command, description in (
        (f"{program} report {run}", "the run as a web page: curves, phases, samples"),
        (f"{program} {again} algorithm=gspo", "the same with another algorithm"),
        (f"{program} train model.path=... data.train_path=... reward=...", "your model, data and reward"),
    ):
        console.print(f"  {command}", soft_wrap=True, markup=False)
        console.print(f"      {description}", style="dim")


def own_program() -> str:
    """Return what to type for `hybrid-rl` here: its path if it is not the one that the shell finds."""
    installed = Path(sys.executable).with_name("hybrid-rl")
    program = shutil.which("hybrid-rl")
    if not installed.is_file() or (program is not None and Path(program).resolve() == installed.resolve()):
        return "hybrid-rl" if program is not None else f"{Path(sys.executable).name} -m hybrid_rl"
    here = Path.cwd()
    return str(installed.relative_to(here) if installed.is_relative_to(here) else installed)
