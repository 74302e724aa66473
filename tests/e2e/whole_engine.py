"""The driver of `test_whole_engine.py`: two ranks on Ray that train with FSDP2 and generate with vLLM in turn.

`python -m tests.e2e.whole_engine FOLDER CASE NUM_STEPS` starts a run or goes on with it. Every step is written to
`record.jsonl`: how far the engine's logprobs are from those of the weights that made the tokens, what the memory of the
ranks did, and by which workers. Two files in the folder ask for a death each: `kill-rank` and `kill-driver`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl import Callback, Trainer
from hybrid_rl.memory.history import StepMemory
from tests.support.agents.callers import build_policy
from tests.support.engines.replayed import gaps_by_version
from tests.support.memory.memory_runs import phases_of
from tests.support.memory.memory_watch import MemoryWatch
from tests.support.plugins.no_pictures import draw_nothing
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, sums
from tests.unit.workers.test_reward_model import classifier

RANK_DIES_IN, DRIVER_DIES_AFTER = 8, 14  # training steps
FOLDER = "WHOLE_ENGINE_FOLDER"  # environment of the ranks
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}  # the smallest of vLLM's on CPUs
CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 20, "b": 3})]
FAVOUR = {"k": 3.0}
KEYS: dict[str, Any] = {
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "rollout.engine_args.block_size": 32,
    "kv_cache_memory_bytes": 2**23,
    "engine_args.per_request_seeds": True,
    "num_ranks": 2,
    "handoff.probe_steps": 1,
    "handoff.probe_tolerance": 1e-5,
    "handoff.verify_steps": 1,
    "save_steps": 3,
    "save_total_limit": 2,
    "max_restarts": 2,
    "run_name": "run",
    "resume": "auto",
    "log_level": "quiet",
    "learning_rate": 1e-2,
}
CASES: dict[str, dict[str, Any]] = {
    "grpo, tensor parallel, agents": {
        "tensor_parallel_size": 2,
        "handoff.transport": "auto",
        "beta": 0.01,
        "old_logprobs": "recompute",
        "memory.offload": ["actor", "optimizer", "reference"],
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 60,
        "max_prompt_length": 60,
        "max_tool_calling_iterations": 3,
    },
    "ppo, two replicas, partial": {
        "algorithm": "ppo",
        "handoff.transport": "distributed",
        "beta": 0.01,
        "critic_learning_rate": 1e-2,
        "reward_weights": [1.0, 0.1],
        "memory.offload": ["actor", "optimizer", "reference", "critic", "critic_optimizer", "reward_models"],
        "prompts_per_step": 8,
        "num_generations": 2,
        "max_completion_length": 12,
        "rollout.partial": True,
        "oversample": 4,
    },
}
# Of every step, whose handoffs are all proved.
PHASES: dict[str, set[str]] = {
    "grpo, tensor parallel, agents": {"generate", "score_actor", "score_reference", "update", "publish", "check"},
    "ppo, two replicas, partial": {
        *("generate", "reward", "score_actor", "score_reference", "score_critic"),
        *("update_critic", "update", "publish", "check"),
    },
}


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: the other
    """
    return a + b


def right_calls(completions: Sequence[Sequence[Mapping[str, Any]]], trainer_state: Any, **_: Any) -> list[float]:
    """The share of three possible calls that were made, and gave 23."""
    die_if_asked(trainer_state.global_step)
    return [sum(one["role"] == "tool" and one["content"] == "23" for one in said) / 3 for said in completions]


def digits(completions: Sequence[str], trainer_state: Any, **_: Any) -> list[float]:
    """The share of twelve possible tokens that are digits."""
    die_if_asked(trainer_state.global_step)
    return [sum(char.isdigit() for char in text) / 12 for text in completions]


def die_if_asked(step: int) -> None:
    """End this process at once if it is rank 1 and that was asked for: other ranks are in the middle of their work."""
    import torch.distributed as dist

    mark = Path(os.environ["WHOLE_ENGINE_FOLDER"]) / "kill-rank"
    if step == RANK_DIES_IN and dist.get_rank() == 1 and mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Record(Callback):
    """Writes what happened in each step, and ends the driver if it is asked to."""

    def __init__(self, folder: Path, case: str, model: Any) -> None:
        self._folder, self._case, self._model = folder, case, model
        self._weights = {0: {name: tensor.clone() for name, tensor in model.state_dict().items()}}
        for path in folder.glob("weights-*"):
            self._weights[int(path.name.partition("-")[2])] = AutoModelForCausalLM.from_pretrained(path).state_dict()
        self._policy: Any = None
        self._memory: list[list[StepMemory]] = []
        self._num_groups = 0

    def on_step_end(self, trainer: Any, step: int, batch: Any, metrics: Mapping[str, float]) -> None:
        if trainer.policy is not self._policy:  # at the start, and after every restart
            self._policy, self._num_groups = trainer.policy, self._num_groups + 1
            self._memory = [[] for _ in range(trainer.policy.num_ranks)]
        for mine, steps in zip(self._memory, trainer.policy.memory_history(), strict=True):
            mine.append(steps[-1])
        phases = phases_of(trainer)
        watch = MemoryWatch(phases.cycle, phases.offload, PHASES[self._case])
        gap, other_gap, ages = gaps_by_version(self._model, self._weights, batch, step - 1)
        line = {
            "step": step,
            "workers": [os.getpid(), self._num_groups],
            "gap": gap,
            "gap_to_the_version_before": other_gap,
            "ages": ages,
            "problems": [watch.problems(steps) for steps in self._memory],
            "bytes": [bytes_by_phase(steps[-1]) for steps in self._memory],
        }
        with (self._folder / "record.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        saved = trainer.save(self._folder / f"weights-{step}")
        self._weights[step] = AutoModelForCausalLM.from_pretrained(saved).state_dict()
        mark = self._folder / "kill-driver"
        if step == DRIVER_DIES_AFTER and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def bytes_by_phase(step: StepMemory) -> dict[str, dict[str, int]]:
    """The bytes of every resident as a phase ends, the last time in a step."""
    found = {}
    for phase in step.phases:
        held = dict(step.before)
        for level in step.levels:
            if level.at <= phase.end:
                held[level.tag] = level.num_bytes
        found[phase.name] = held
    return found


def drive(folder: Path, case: str, num_steps: int, **keys: Any) -> Path:
    """Train to a step, from the newest checkpoint if there is one. Returns the run folder."""
    keys = {**KEYS, **CASES[case], "output_dir": str(folder), "max_steps": num_steps, **keys}
    keys["ray.env_vars"] = {FOLDER: str(folder)} | {
        name: os.environ[name] for name in ("TMPDIR",) if name in os.environ
    }
    if "agents" in case:
        model, tokenizer = build_policy(CALLS, favour=FAVOUR, **SHAPE)
        rows = [{"prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(40)]
        rewards: list[Any] = [right_calls]
        keys["tools"] = [add]
    else:
        model, tokenizer, rows = build_model(**SHAPE, tie_word_embeddings=False), build_tokenizer(), sums(40)
        judge = folder / "judge"
        if not judge.exists():
            classifier("llama", vocab_size=len(VOCABULARY)).save_pretrained(judge)
            tokenizer.save_pretrained(judge)
        rewards = [digits, str(judge)]
    # A module that is passed could not be loaded again for the reference, which restarts need.
    start = folder / "model"
    if not start.exists():
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
    record = Record(folder, case, model)
    with (
        pytest.MonkeyPatch.context() as patch,
        Trainer(str(start), rewards, rows, tokenizer=tokenizer, callbacks=[record], **keys) as trainer,
    ):
        draw_nothing(patch)
        trainer.fit()
    return trainer.run_folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    drive(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
