"""An adapter run that goes on with other numbers of ranks is the run that did not, and its base model is the same."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from tests.support.tiny import build_model, build_tokenizer, ids_of, spread, sums

pytestmark = pytest.mark.slow  # processes are started

TARGETS = ["q_proj", "v_proj", "down_proj"]
KEYS: dict[str, Any] = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "beta": 0.05}
KEYS |= {"learning_rate": 1e-2, "save_steps": 1}


def test_one_rank_then_two_then_one(tmp_path: Path, forked_ranks: Any) -> None:
    """It begins with the adapter of a PeftModel, whose base exists in memory only."""
    model = peft.get_peft_model(build_model(), peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.manual_seed(len(name))
                parameter.normal_(std=0.05)

    def train(run: str, max_steps: int, num_ranks: int, **keys: Any) -> Path:
        settings = KEYS | {"output_dir": str(tmp_path / "runs"), "run_name": run, "tokenizer": build_tokenizer()} | keys
        with Trainer(
            copy.deepcopy(model), spread, sums(12), max_steps=max_steps, num_ranks=num_ranks, **settings
        ) as one:
            one.fit()
            if num_ranks == 2:
                one.save(merged=True)
            return one.run_folder

    straight = train("straight", 3, 1)
    changing = train("changing", 1, 1)
    assert train("changing", 2, 2, resume="auto") == changing == train("changing", 3, 1, resume="auto")
    for step in (1, 2, 3):
        mine, theirs = (
            load_file(run / f"checkpoint-{step}" / "adapter_model.safetensors") for run in (changing, straight)
        )
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)  # sums of two ranks
    records = [
        json.loads((run / f"checkpoint-{step}" / "trainer_state.json").read_text())["base"]
        for run, step in ((changing, 1), (changing, 2), (changing, 3), (straight, 3))
    ]
    assert all(record["hashes"] == records[0]["hashes"] for record in records)
    assert [path.name for path in changing.glob("base-*")] == [Path(records[0]["path"]).name]

    ids = torch.tensor([ids_of("3+4=7")])
    by_peft = peft.PeftModel.from_pretrained(build_model(), str(changing / "checkpoint-2"))
    merged = AutoModelForCausalLM.from_pretrained(changing / "merged-2")
    torch.testing.assert_close(merged(ids).logits, by_peft(ids).logits, atol=1e-6, rtol=0)

    keys = KEYS | {"output_dir": str(tmp_path / "runs"), "max_steps": 1}
    with Trainer(str(changing / "checkpoint-3"), spread, sums(12), num_ranks=2, **keys) as going_on:
        start = load_file(going_on.save() / "adapter_model.safetensors")
    end = load_file(changing / "checkpoint-3" / "adapter_model.safetensors")
    assert start.keys() == end.keys() and all(torch.equal(start[name], end[name]) for name in start)
