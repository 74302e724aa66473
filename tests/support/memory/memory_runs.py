"""Runs with and without a trainer's side that moves, watched, and compared to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hybrid_rl import Trainer
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.memory.cycle import ENGINE_WEIGHTS, KV_CACHE
from hybrid_rl.training.run_cycle import MemoryPhases, memory_phases
from tests.support.inside.trainers import crew_of
from tests.support.memory.memory_watch import MemoryWatch, Recorder
from tests.support.optimizer_state import read_optimizer
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, spread, sums
from tests.unit.workers.test_reward_model import classifier

# What a run has, and the phases of each of its steps. Every handoff is probed; the second half of a probe ends a step.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {
        "keys": {"beta": 0.05, "old_logprobs": "recompute"},
        "offload": ["actor", "optimizer", "reference"],
        "phases": {"generate", "score_actor", "score_reference", "update", "publish", "check"},
    },
    "ppo": {
        "keys": {"algorithm": "ppo", "beta": 0.05, "critic_learning_rate": 1e-3, "old_logprobs": "recompute"},
        "offload": ["actor", "optimizer", "reference", "critic", "critic_optimizer", "reward_models"],
        "phases": {
            *("generate", "reward", "score_actor", "score_reference", "score_critic"),
            *("update_critic", "update", "publish", "check"),
        },
    },
}
KEYS = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 5,
    "learning_rate": 1e-3,
    "prompts_per_mini_batch": 2,
    "handoff.probe_steps": 1,
    "handoff.verify_steps": 1,
}
CLOCK_AND_MEMORY = ("timing/", "perf/", "memory/", "step_time")


@contextmanager
def folders(path: Path) -> Iterator[Callable[..., Trainer]]:
    """Make Trainers of the tiny model whose runs are in this folder, and close them. A case may be named, which gives
    its keys and, for ppo, a reward model. offload: all that the case says, nothing, or these."""
    made: list[Trainer] = []
    judge = path / "judge"
    classifier("llama", vocab_size=len(VOCABULARY)).save_pretrained(judge)
    build_tokenizer().save_pretrained(judge)

    def make(case: str = "grpo", *, offload: bool | list[str] = True, **keys: Any) -> Trainer:
        rewards = [keys.pop("reward", spread), *([str(judge)] if "reward" in CASES[case]["phases"] else [])]
        tags = CASES[case]["offload"] if offload is True else offload or []
        chosen = {**KEYS, **CASES[case]["keys"], "memory.offload": tags, **keys}
        chosen = {"output_dir": str(path / "runs"), "run_name": f"{case}-{bool(offload)}", **chosen}
        if chosen.get("engine") == "inplace":
            del chosen["handoff.verify_steps"]  # nothing is copied
        model = chosen.pop("model", None) or build_model(**chosen.pop("shape", {}))
        made.append(Trainer(model, rewards, sums(12), tokenizer=build_tokenizer(), **chosen))
        return made[-1]

    try:
        yield make
    finally:
        for trainer in made:
            trainer.close()


def watched_run(
    make: Callable[..., Trainer], case: str, num_steps: int, *, offload: bool, engine_sleeps: bool = True, **keys: Any
) -> Path:
    """Train, hold every step of every rank against the table, save, and return the run folder."""
    trainer = make(case=case, offload=offload, max_steps=num_steps, save_steps=num_steps, **keys)
    recorder = Recorder(trainer)
    for _ in range(num_steps):
        recorder.step()
    phases = phases_of(trainer)
    assert phases.offload == (set(CASES[case]["offload"]) if offload else set())
    engine = {ENGINE_WEIGHTS, KV_CACHE} if engine_sleeps else set()
    watch = MemoryWatch(phases.cycle, phases.offload | engine, CASES[case]["phases"])
    for rank, steps in enumerate(recorder.ranks):
        assert len(steps) == num_steps
        assert watch.problems(steps) == [], f"rank {rank}"
    trace = json.loads(trainer.save_memory_trace(trainer.run_folder / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(trainer.policy.num_ranks))
    trainer.close()
    return trainer.run_folder


def phases_of(trainer: Trainer) -> MemoryPhases:
    """Return residents and cycle of a Trainer."""
    return memory_phases(
        trainer.config, has_reward_models=bool(crew_of(trainer).run.rewards.runner(trainer.config).entries.models)
    )


def compare(mine: Path, theirs: Path) -> None:
    """Assert that two runs are equal to the bit: metrics but for times and memory, samples, weights and optimizers."""
    assert comparable(mine) == comparable(theirs) and comparable(mine)
    samples = sorted(path.name for path in mine.glob("samples*.jsonl"))
    assert samples
    for name in samples:
        assert read_jsonl(mine / name) == read_jsonl(theirs / name)
    (first,), (second,) = (sorted(folder.glob("checkpoint-*")) for folder in (mine, theirs))
    compare_checkpoints(first, second)


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Read the metrics of the steps of a run, without what differs from run to run."""
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if line["step"]]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK_AND_MEMORY)} for line in lines]


def compare_checkpoints(first: Path, second: Path) -> None:
    """Assert that weights and optimizers of two checkpoints are equal to the bit."""
    names = weight_files(first)
    assert names and names == weight_files(second)
    for name in names:
        mine, theirs = load_file(first / name), load_file(second / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items()), name
    for part in (".", "critic"):
        if (first / part / "optimizer").exists():
            one, other = read_optimizer(first / part), read_optimizer(second / part)
            assert str(one) == str(other)
            for kind in ("exp_avg", "exp_avg_sq", "step", "master"):
                assert all(torch.equal(tensor, other[kind][key]) for key, tensor in one[kind].items())


def weight_files(checkpoint: Path) -> list[str]:
    """Names of the files of models in a checkpoint."""
    files = (path.relative_to(checkpoint) for path in checkpoint.rglob("*.safetensors"))
    return sorted(str(path) for path in files if "optimizer" not in path.parts)
