"""verl's GSM8K GRPO command (examples/grpo_trainer/run_qwen2-7b.sh at b178a3cd5), mapped with the table alone."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybrid_rl import Trainer
from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.names import habit_of
from hybrid_rl.rewards import math_reward
from tests.support.tiny import build_model, build_tokenizer, sums

# As in the script, with what each key becomes by its record; None: the table says to leave it out.
ACTOR, ROLLOUT, MODEL, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))
SCRIPT: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "algorithm.adv_estimator": ("grpo", {"advantage": "grpo"}),
    "data.train_files": ("train.parquet", {"train_path": "train.parquet"}),
    "data.val_files": ("test.parquet", {"eval_path": "test.parquet"}),
    "data.train_batch_size": (1024, {"prompts_per_step": 1024}),
    "data.max_prompt_length": (512, {"max_prompt_length": 512}),
    "data.max_response_length": (1024, {"max_completion_length": 1024}),
    "data.filter_overlong_prompts": (True, {"overlong_prompts": "drop"}),
    "data.truncation": ("error", None),  # overlong_prompts has one value, and verl filters first
    f"{MODEL}.path": ("Qwen/Qwen2-7B-Instruct", {"model.path": "model"}),
    f"{ACTOR}.optim.lr": (1e-6, {"learning_rate": 1e-6}),
    f"{MODEL}.use_remove_padding": (True, None),
    f"{ACTOR}.ppo_mini_batch_size": (256, {"prompts_per_mini_batch": 256}),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (40, {"tokens_per_micro_batch": 16384}),
    f"{ACTOR}.use_kl_loss": (True, {"kl": "loss", "use_bias_correction_kl": False}),
    f"{ACTOR}.kl_loss_coef": (0.001, {"beta": 0.001}),
    f"{ACTOR}.kl_loss_type": ("low_var_kl", {"kl_estimator": "k3"}),
    f"{ACTOR}.entropy_coeff": (0, {"entropy_coef": 0}),
    f"{MODEL}.enable_gradient_checkpointing": (True, {"gradient_checkpointing": True}),
    f"{ACTOR}.fsdp_config.param_offload": (False, None),
    f"{ACTOR}.fsdp_config.optimizer_offload": (False, None),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (40, None),
    f"{ROLLOUT}.tensor_model_parallel_size": (2, {"tensor_parallel_size": 2}),
    f"{ROLLOUT}.name": ("vllm", {"rollout.engine": "vllm"}),
    f"{ROLLOUT}.gpu_memory_utilization": (0.6, None),  # kv_cache_memory_bytes is in bytes; None is a good default
    f"{ROLLOUT}.n": (5, {"num_generations": 5}),
    f"{REF}.log_prob_micro_batch_size_per_gpu": (40, None),
    f"{REF}.fsdp_config.param_offload": (True, {"memory.offload": ["reference"]}),
    "algorithm.use_kl_in_reward": (False, None),
    "trainer.critic_warmup": (0, None),
    "trainer.logger": (["console", "wandb"], {"report_to": ["wandb"]}),
    "trainer.project_name": ("verl_grpo_example_gsm8k", None),
    "trainer.experiment_name": ("qwen2_7b_function_rm", {"run_name": "qwen2_7b_function_rm"}),
    "trainer.n_gpus_per_node": (8, {"num_ranks": 8}),
    "trainer.nnodes": (1, None),
    "trainer.save_freq": (20, {"save_steps": 20}),
    "trainer.test_freq": (5, {"eval_steps": 5}),
    "trainer.total_epochs": (15, {"num_train_epochs": 15}),
}
# On a machine without GPUs, vLLM and wandb, with a model of some thousand parameters.
SMALL = {"prompts_per_step": 4, "prompts_per_mini_batch": 2, "max_completion_length": 8, "num_train_epochs": 1}
SMALL |= {"max_prompt_length": 32, "num_ranks": 1, "eval_steps": 1, "save_steps": 1, "tokens_per_micro_batch": 256}
LEFT_OUT = {"rollout.engine", "tensor_parallel_size", "report_to", "memory.offload"}


def mapped() -> dict[str, Any]:
    return {key: value for _, keys in SCRIPT.values() for key, value in (keys or {}).items()}


def test_every_key_is_answered_in_one_table_with_the_name_that_was_used() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({name: value for name, (value, _) in SCRIPT.items()})
    text = str(caught.value)
    unknown = [name for name in SCRIPT if name != "data.max_prompt_length"]  # the one that is the same here
    assert text.startswith(f"{len(unknown)} keys cannot be used") and "no such key" not in text
    for name, (_, keys) in SCRIPT.items():
        habit = habit_of(name)
        assert name in text or (habit is not None and habit.kind == "same")
        for key in keys or {}:
            words = f"{habit.here} {habit.note}" if habit else name
            assert key.rpartition(".")[2] in words, (name, key)


def test_the_mapped_command_is_a_configuration() -> None:
    config, _ = load_config(mapped() | {"num_ranks": 8})
    assert (config.rollout.engine, config.rollout.ranks_per_engine, config.num_ranks) == ("vllm", 2, 8)
    assert config.kl.kl_estimator == "k3" and config.memory.offload == ["reference"]


@pytest.mark.slow
def test_the_mapped_command_runs_on_verls_own_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_model().save_pretrained("model")
    build_tokenizer(chat=True).save_pretrained("model")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": row["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": place},
        }
        for place, row in enumerate(sums(8, chat=True))
    ]
    for name in ("train.parquet", "test.parquet"):
        pq.write_table(pa.Table.from_pylist(rows), name)
    keys = {key: value for key, value in mapped().items() if key not in LEFT_OUT} | SMALL
    with Trainer(reward_funcs=math_reward(), **keys) as trainer:
        trainer.fit()
        assert trainer.global_step == 2 and (trainer.run_folder / "checkpoint-2").is_dir()
        assert trainer.run_folder.name == "qwen2_7b_function_rm"
        assert trainer.evaluate()["eval/accuracy"] >= 0
