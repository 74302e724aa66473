"""Two steps of GRPO on the cluster of two hosts; prints its metrics. usage: train.py FOLDER ADDRESS KEYS_AS_JSON"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hybrid_rl import Trainer
from tests.support.tiny import build_model, build_tokenizer, spread, sums

KEYS = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "stop_token_ids": [6, 7],
    "learning_rate": 1e-2,
    "max_steps": 2,
    "handoff.probe_steps": 1,
    "log_level": "quiet",
}
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1024}


def trained(folder: Path, address: str, keys: dict[str, object]) -> dict[str, object]:
    """Train in this folder; returns the metrics of the steps, and the logs of the ranks."""
    folder.mkdir()
    build_model(**SHAPE, tie_word_embeddings=False).save_pretrained(folder / "model")
    tokenizer = build_tokenizer()
    more: dict[str, object] = {"output_dir": str(folder / "runs"), "run_name": "run"}
    if address:
        more |= {"controller.address": address, "ray.placement": "spread", "ray.cpus_per_rank": 1}
    with Trainer(str(folder / "model"), spread, sums(48), tokenizer=tokenizer, **{**KEYS, **more, **keys}) as trainer:
        metrics = [dict(trainer.step().metrics) for _ in range(2)]
        logs = [path.read_text() for path in sorted((trainer.run_folder / "logs").glob("*.log"))] if address else []
        trainer.save(folder / "saved")
    return {"metrics": metrics, "logs": logs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("TELLS " + json.dumps(trained(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))), flush=True)
