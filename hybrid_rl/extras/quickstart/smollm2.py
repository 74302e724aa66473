"""The quickstart with a real model: SmolLM2-135M-Instruct learns sums that are asked in plain words.

The prompt of a row is what the user asks, "What is 27 + 35? Answer with the number only.", and how the answer begins,
"27 + 35 = ": left to itself the model begins in many ways, and would learn first to say a number at all.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid_rl.config import resolve
from hybrid_rl.extras.quickstart.command import Row, show_results
from hybrid_rl.extras.quickstart.package import SMOLLM2, model_file
from hybrid_rl.extras.quickstart.run import settings_of, train, training_rows
from hybrid_rl.extras.quickstart.task import Task
from hybrid_rl.models import load_model, load_tokenizer
from hybrid_rl.models.model_loading import model_folder
from hybrid_rl.run.prepare import find_hardware

SETTINGS = Path(__file__).with_name("smollm2.yaml")
NAME = "SmolLM2-135M-Instruct"
LARGEST = 60  # operand
NUM_HELDOUT = 150  # of 1891 pairs of numbers
NUM_SHOWN = 5  # samples, before and after

console = Console(highlight=False)


def build_sums(seed: int) -> Task:
    """Return sums of two numbers from 0 to `LARGEST`, the same for a seed, in random order: `NUM_HELDOUT` of numbers
    that are not added in training, in either order, and all others to train on."""
    rng = random.Random(seed)
    pairs = [(left, right) for left in range(LARGEST + 1) for right in range(left, LARGEST + 1)]
    rng.shuffle(pairs)
    heldout = [_row(*rng.sample(pair, 2)) for pair in pairs[:NUM_HELDOUT]]
    train = [
        _row(*order) for left, right in pairs[NUM_HELDOUT:] for order in dict.fromkeys([(left, right), (right, left)])
    ]
    rng.shuffle(train)
    return Task(train=train, heldout=heldout)


def _row(left: int, right: int) -> dict[str, Any]:
    question = f"What is {left} + {right}? Answer with the number only."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{left} + {right} = "}]
    return {"prompt": messages, "answer": str(left + right)}


def right_sum(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """Return TRL-style rewards: 1.0 if the last number of the completion is the answer, else 0.0."""
    numbers = [re.findall(r"\d+", completion[-1]["content"]) for completion in completions]
    return [float(matches[-1:] == [expected]) for matches, expected in zip(numbers, answer, strict=True)]


def train_smollm2(arguments: Sequence[str]) -> None:
    """Train the model on sums with the settings of smollm2.yaml under `key=value` arguments, and show the results.

    Raises what the Trainer raises, and ModelError if the model cannot be had."""
    config, given_keys = settings_of(SETTINGS, arguments)
    resolve(config, given_keys, hardware=find_hardware(config))  # what cannot run is refused before the download
    folder, task = model_folder(str(model_file(SMOLLM2))), build_sums(config.seed)
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"task: {len(task.train)} problems such as {task.train[0]['prompt'][0]['content']!r}, {len(task.heldout)} held "
        f"out; model: {NAME}, {size / 1e6:.0f}M parameters"
    )
    rows = training_rows(task, config)
    outcome = train(model, tokenizer, config, reward_funcs=right_sum, train_dataset=rows, eval_dataset=task.heldout)
    lines = [Row(NAME, outcome.curve[0], 0, 0.0)] if 0 in outcome.curve else []
    lines.append(Row(f"trained with {config.algorithm.name}", outcome.accuracy, outcome.steps, outcome.seconds))
    show_samples(outcome.run)
    show_results(outcome.run, lines, compares=False, command="quickstart --model smollm2")


def show_samples(run: Path) -> None:
    """Print a few held-out problems with the answers of the first and of the last evaluation of a run."""
    file = run / "eval-samples.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    steps = sorted({sample["step"] for sample in samples})
    if not steps:
        return
    first, last = (
        {sample["prompt"][-1]["content"]: sample for sample in samples if sample["step"] == step}
        for step in (steps[0], steps[-1])
    )
    table = Table(title="held-out samples", title_justify="left")
    for column in ("problem", f"step {steps[0]}", f"step {steps[-1]}"):
        table.add_column(column)
    for question in [question for question in first if question in last][:NUM_SHOWN]:
        table.add_row(question.partition("?")[0] + "?", first[question]["completion"], last[question]["completion"])
    console.print(table)
