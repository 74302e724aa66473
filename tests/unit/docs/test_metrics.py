"""docs/metrics.md names every metric that runs log, and none that nothing logs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from tests.support.tiny import build_model, build_tokenizer, sums
from tests.unit.docs.blocks import PAGES
from tests.unit.docs.test_pages import texts

pytestmark = pytest.mark.slow

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.1, "correction": "tis", "eval_temperature": 0.7, "num_generations_eval": 2},
    "ppo": {"algorithm": "ppo"},
    "dapo": {"algorithm": "dapo", "overlong_buffer": 4, "top_entropy_quantile": 0.5, "entropy_target": 0.5},
}


def names() -> Iterator[str]:
    """The names of the first columns of the page's tables, with braces written out."""
    for row in re.findall(r"^\| (`[^|]+) \|", PAGES["docs/metrics.md"], re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            choices = [part.split(",") for part in re.split(r"\{(.*?)\}", name)]
            yield from ("".join(choice) for choice in itertools.product(*choices))


NAMES = tuple(names())
PATTERNS = re.compile("|".join(re.escape(name).replace(r"\*", ".+") for name in NAMES))


@pytest.mark.parametrize("name", RUNS)
def test_every_metric_of_a_run_is_named(name: str, tmp_path: Path) -> None:
    def right(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text) % 2) for text in completions]

    keys = {"max_steps": 1, "prompts_per_step": 2, "max_completion_length": 8, "num_generations": 4} | RUNS[name]
    data, folder = sums(8), str(tmp_path)
    with Trainer(
        build_model(), right, data, data[:2], tokenizer=build_tokenizer(), output_dir=folder, **keys
    ) as trainer:
        trainer.fit()
    logged = {key for line in (trainer.run_folder / "metrics.jsonl").open() for key in json.loads(line)}
    assert [key for key in sorted(logged) if not PATTERNS.fullmatch(key)] == []


def test_every_named_metric_is_in_the_code() -> None:
    """As a text, or by a text with a part filled in."""
    patterns = [
        re.compile(re.escape(text).replace("…", ".+"))
        for text in texts()
        if re.fullmatch(r"[\w@/.…]+", text) and len(text.replace("…", "")) >= 4
    ]
    whole = set(texts())

    def is_said(name: str) -> bool:
        first, _, rest = name.partition("/")
        return name in whole or {f"{first}/", rest} <= whole or any(p.fullmatch(name) for p in patterns)

    assert [name for name in NAMES if not is_said(name.replace("*", "x"))] == []
