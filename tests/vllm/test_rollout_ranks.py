"""vLLM on ranks that only generate: each version of the weights goes from the files into the engine, and nothing else
of the policy is on these ranks."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.batch import BatchRef
from tests.distributed.test_rollout_ranks import WaitsForWeights
from tests.support.engines.replayed import gaps_by_version
from tests.support.tiny import build_model, build_tokenizer, sums
from tests.vllm.test_partial import KEYS, SHAPE
from tests.vllm.test_trainer_ranks import short_folder as short_folder

pytestmark = pytest.mark.slow

NUM_STEPS = 4
APART = {
    "rollout_ranks": 1,
    "handoff.probe_steps": 1,
    "handoff.probe_tolerance": 1e-5,
    "handoff.verify_steps": 1,
    "save_steps": 1,
}


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a policy version without adapters, as the checkpoint of that step has them."""
    path = folder / "run" / f"checkpoint-{step}"
    if not step:
        return build_model(**SHAPE).state_dict()
    if (path / "adapter_config.json").exists():
        return PeftModel.from_pretrained(build_model(**SHAPE), path).merge_and_unload().state_dict()
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="all weights"),
        pytest.param(
            {"num_ranks": 2, "rollout_ranks": 2, "tensor_parallel_size": 2}, id="shared engine", marks=pytest.mark.sweep
        ),
        pytest.param({"num_ranks": 2, "rollout_ranks": 2}, id="two engines", marks=pytest.mark.sweep),
        pytest.param({"lora.r": 4, "lora_alpha": 32}, id="merged", marks=pytest.mark.sweep),
        pytest.param(
            {"lora.r": 4, "lora_alpha": 32, "peft.modules_to_save": ["norm"]},
            id="trained whole",
            marks=pytest.mark.sweep,
        ),
        pytest.param({"lora.r": 4, "lora_alpha": 32, "handoff.lora": "adapter"}, id="adapter", marks=pytest.mark.sweep),
    ],
)
def test_every_token_has_the_version_of_the_weights_that_made_it(keys, tmp_path, short_folder):
    """Newer weights come in the middle of completions; every handoff is proved byte by byte and on the trainer's
    probe."""
    keys = {**KEYS, **APART, **keys, "max_steps": NUM_STEPS, "output_dir": str(tmp_path), "run_name": "run"}
    keys["ray.env_vars"] = {"TMPDIR": str(short_folder)}
    with Trainer(build_model(**SHAPE), WaitsForWeights(), sums(40), tokenizer=build_tokenizer(), **keys) as trainer:
        results = [trainer.step() for _ in range(NUM_STEPS)]
        steps = [one.batch.load() if isinstance(one.batch, BatchRef) else one.batch for one in results]
    weights, ages = {step: weights_at(tmp_path, step) for step in range(NUM_STEPS)}, Counter[int]()
    num_mixed = 0
    for version, batch in enumerate(steps):
        gap, _, found = gaps_by_version(build_model(**SHAPE), weights, batch, version)
        assert gap < 1e-5
        ages.update(found if version else {})
        num_mixed += sum(len(set(row.tolist())) > 1 for row in batch["policy_version"])
    assert num_mixed and ages[0] and max(ages) <= trainer.config.buffer.max_staleness
    for result in results:
        metrics = result.metrics
        assert metrics["handoff/probe_gap"] < 1e-5 and metrics["timing/verify"] > 0
        assert 0 < metrics["ranks/generating_busy"] <= 1 and 0 < metrics["ranks/training_busy"] <= 1
        assert "memory/actor_bytes" in metrics and "memory/engine_weights_bytes" in metrics
    if keys.get("handoff.lora") == "adapter":
        assert metrics["handoff/bytes"] == metrics["handoff/adapter_bytes"]
