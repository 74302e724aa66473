"""A hybrid worker on the tiny model, and batches that its own engine sampled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.validate import optimizer_steps_per_training_step
from hybrid_rl.controller import LocalBackend, WorkerGroup
from hybrid_rl.data import PromptRow
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout import SamplingParams
from hybrid_rl.rollout.client import GroupRolloutClient
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.workers import HybridWorker, WorkerSetup
from tests.tiny import EOS_ID, build_model, ids_of, spread

PROMPTS = ("1+2=", "12+30=", "7", "3+4+5+6=")


class Bench:
    """A worker, the group that leases for it, and what a trainer would do with both."""

    def __init__(self, **keys: Any) -> None:
        num_training_steps = keys.pop("num_training_steps", 4)
        settings = {"prompts_per_step": 4, "num_generations": 3, "max_completion_length": 9, "learning_rate": 1e-2}
        loaded, given = load_config(settings | keys)
        self.config = resolve(loaded, given)
        self.module = build_model(dtype=getattr(torch, self.config.model.dtype))
        setup = WorkerSetup(
            self.module,
            self.config,
            num_training_steps * optimizer_steps_per_training_step(self.config),
            max_length=32,
            probe_ids=tuple(ids_of("1+2=")),
        )
        self.worker = HybridWorker(setup)
        self.group = WorkerGroup(HybridWorker, LocalBackend("policy", lambda: self.worker))
        self.version = 0
        self.handoff = self.group.publish_weights(0)

    @property
    def awake(self) -> frozenset[str]:
        return self.worker.leases.awake

    def rollout(self, step: int = 1) -> Batch:
        """Samples of the present policy, with a reward each."""
        collector = Collector(GroupRolloutClient(self.group), None, str, seed=0, max_failure_share=1.0)
        rows = [PromptRow(i, text, tuple(ids_of(text)), {}) for i, text in enumerate(PROMPTS)]
        batch = collector.rollout(
            rows,
            self.config.algorithm.num_generations,
            SamplingParams(max_tokens=9, temperature=self.config.rollout.temperature, stop_token_ids=(EOS_ID,)),
            self.version,
            TrainerState(step, 4, 0.0),
            purpose=f"train/{step}",
        ).batch
        rewards = torch.tensor(spread([ids.tolist() for ids in batch["completion_ids"]]), dtype=torch.float64)
        return batch.with_columns(rewards=rewards)

    def prepared(self, step: int = 1) -> Batch:
        """Scored, with advantages."""
        return self.group.advantages(self.group.score(self.rollout(step), step))

    def train(self, step: int = 1) -> dict[str, float]:
        """One training step."""
        metrics = self.group.update(self.prepared(step), step)
        self.version = step
        self.handoff = self.group.publish_weights(step)
        return metrics


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**keys: Any) -> Bench:
        made.append(Bench(**keys))
        return made[-1]

    yield make
    for bench in made:
        bench.group.close()
