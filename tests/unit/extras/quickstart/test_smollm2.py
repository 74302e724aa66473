"""The quickstart with SmolLM2: its problems, its reward, and the whole with a tiny model in its place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.cli import main
from hybrid_rl.config import load_config, resolve
from hybrid_rl.extras.quickstart import smollm2
from hybrid_rl.extras.quickstart.smollm2 import SETTINGS, build_sums, right_sum
from tests.support.tiny_gguf import write_llama

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="


def operands(row: dict[str, Any]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", row["prompt"][0]["content"])]


@pytest.mark.parametrize("seed", [0, 7])
def test_a_held_out_sum_is_not_trained_in_the_other_order_either(seed: int) -> None:
    task = build_sums(seed)
    trained = [tuple(operands(row)) for row in task.train]
    heldout = [frozenset(operands(row)) for row in task.heldout]
    assert len(heldout) == len(set(heldout)) == 150 and len(trained) == len(set(trained))
    assert not set(heldout) & set(map(frozenset, trained))
    assert len(trained) + sum(len(pair) for pair in heldout) == 61 * 61  # with both orders of what is held out
    for row in [*task.train, *task.heldout]:
        left, right = operands(row)
        assert row["prompt"][1] == {"role": "assistant", "content": f"{left} + {right} = "}
        assert left + right == int(row["answer"])
    assert task == build_sums(seed) != build_sums(seed + 1)


def test_the_last_number_is_the_answer() -> None:
    texts = ["62", "27 + 35 = 62.", "62 = 27 + 35", "162", "6 2", "none", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert right_sum([], completions, ["62"] * len(texts)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_settings_can_be_used() -> None:
    config, given = load_config(SETTINGS)
    assert resolve(config, given).optimizer.lr_scheduler_type == "linear"


def test_another_model_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--model", "llama"]) == 1
    assert "--model llama is not a model of the quickstart: choose small or smollm2" in capsys.readouterr().err


def test_what_cannot_run_is_refused_before_the_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "model_file", lambda package: pytest.fail("fetched"))
    assert main(["quickstart", "--model", "smollm2", "save_total_limit=2"]) == 1
    assert "checkpoints.save_total_limit=2 would do nothing" in capsys.readouterr().err


def test_the_whole_with_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_llama(tmp_path / "tiny.gguf", template=TEMPLATE)
    monkeypatch.setattr(smollm2, "model_file", lambda package: tmp_path / "tiny.gguf")
    keys = ["max_steps=2", "eval_steps=2", "prompts_per_step=2", "num_generations=4", "max_refills=0"]
    keys += [f"output_dir={tmp_path / 'runs'}"]
    assert main(["quickstart", "--model", "smollm2", "device=cpu", *keys]) == 0
    out = capsys.readouterr().out
    run = tmp_path / "runs" / "smollm2-quickstart"
    rows = json.loads((run / "comparison.json").read_text())
    assert [(row["name"], row["steps"]) for row in rows] == [("SmolLM2-135M-Instruct", 0), ("trained with maxrl", 2)]
    assert "What is " in out and "step 0" in out and "step 2" in out
    assert "quickstart --model smollm2 algorithm=gspo" in out and "report" in out
