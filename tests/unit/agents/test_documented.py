"""The examples of docs/agents.md work as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hybrid_rl
from tests.callers import build_policy
from tests.no_pictures import draw_nothing

pytestmark = pytest.mark.slow  # the file as a whole

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
MODEL = '"Qwen/Qwen2.5-0.5B-Instruct"'
CALLS = [("multiply", {"a": 12, "b": 34}), *(("guess", {"number": number}) for number in (4, 8, 12))]
SMALL = {"max_steps": 1, "num_generations": 4, "prompts_per_step": 1, "max_prompt_length": 200, "log_completions": 0}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_trains(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny policy, for one step."""
    pytest.importorskip("openai" if "openai" in BLOCKS[number] else "hybrid_rl")
    draw_nothing(monkeypatch)
    model, tokenizer = build_policy(CALLS, favour={"4": 1.0})
    original = hybrid_rl.Trainer
    made = []

    def small(_: str, *arguments: Any, **keys: Any) -> hybrid_rl.Trainer:
        made.append(original(model, *arguments, tokenizer=tokenizer, output_dir=str(tmp_path), **(keys | SMALL)))
        return made[-1]

    monkeypatch.setattr(hybrid_rl, "Trainer", small)
    assert BLOCKS[number].count(MODEL) == 1
    exec(compile(BLOCKS[number], str(PAGE), "exec", dont_inherit=True), {"__name__": "example"})
    (trainer,) = made
    assert trainer.global_step == 1
    assert '"tokens"' in (trainer.run_folder / "samples.jsonl").read_text()
