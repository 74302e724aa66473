"""Writes a tiny model, its data and a recipe of two steps on two CPU ranks. usage: recipe.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.hosts.train import SHAPE
from tests.support.tiny import build_model, build_tokenizer

RECIPE = """
model: {{path: "{folder}/model", device: cpu}}
data: {{train_path: "{folder}/rows.jsonl"}}
algorithm: grpo
num_ranks: 2
ray: {{placement: spread}}
prompts_per_step: 2
num_generations: 2
max_completion_length: 4
max_steps: 2
output_dir: {folder}/runs
run_name: run
"""

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    build_model(**SHAPE, tie_word_embeddings=False).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(RECIPE.format(folder=folder))
