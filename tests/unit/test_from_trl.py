"""TRL's documented GRPO quickstart, with the lines changed that have to be."""

import difflib
import os
from pathlib import Path

import pytest

from tests.support.tiny import build_model, build_tokenizer, sums

pytestmark = pytest.mark.slow  # a step at the defaults: 128 completions of up to 512 tokens

# docs/source/grpo_trainer.md, Quick start (TRL 1.10.0.dev0, f2cd57710).
THEIRS = """\
# train_grpo.py
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
OURS = """\
# train_grpo.py
from datasets import load_dataset
from hybrid_rl import Trainer as GRPOTrainer
from hybrid_rl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""


def test_trls_quickstart_runs_with_two_changed_lines(tmp_path: Path, monkeypatch) -> None:
    changed = [line for line in difflib.ndiff(THEIRS.splitlines(), OURS.splitlines()) if line.startswith("+ ")]
    assert len(changed) == 2
    monkeypatch.chdir(tmp_path)
    build_model(max_position_embeddings=640).save_pretrained("model")
    build_tokenizer(chat=True).save_pretrained("model")
    rows = [{"prompt": row["prompt"], "solution": row["answer"]} for row in sums(16, chat=True)]
    script = OURS.replace("Qwen/Qwen2.5-0.5B-Instruct", "model")  # no hub here: a model and data of this machine
    script = script.replace('load_dataset("trl-lib/DeepMath-103K", split="train")', "Dataset.from_list(rows)")
    names = {"rows": rows}
    exec("from datasets import Dataset\n" + script, names)
    trainer = names["trainer"]
    assert trainer.global_step == 1 and trainer.config.algorithm.name == "grpo"
    metrics = (trainer.run_folder / "metrics.jsonl").read_text()
    assert "rewards/accuracy_reward/mean" in metrics and os.path.samefile(trainer.run_folder.parents[1], tmp_path)
    trainer.close()
