"""A hybrid worker on the tiny model, and batches that its own engine sampled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.validate import optimizer_steps_per_training_step
from hybrid_rl.controller import LocalBackend, RankContext
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.metrics.metric_sums import joined, largest
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.run.prepare import mini_batches
from hybrid_rl.workers.groups import HybridGroup
from hybrid_rl.workers.hybrid import HybridWorker
from hybrid_rl.workers.setup import RewardSetup, WorkerSetup
from tests.support.tiny import EOS_ID, build_model, build_tokenizer, ids_of, spread

PROMPTS = ("1+2=", "12+30=", "7", "3+4+5+6=")


class Bench:
    """A worker, the group that leases for it, and what a trainer would do with both."""

    def __init__(self, **keys: Any) -> None:
        num_training_steps, expected = keys.pop("num_training_steps", 4), keys.pop("expected", None)
        settings = {"prompts_per_step": 4, "num_generations": 3, "max_completion_length": 9, "learning_rate": 1e-2}
        loaded, given = load_config(settings | keys)
        self.config = resolve(loaded, given)
        self.module = build_model(dtype=getattr(torch, self.config.model.dtype))
        setup = WorkerSetup(
            model=self.module,
            tokenizer=build_tokenizer(),
            rewards=RewardSetup(spread, ()),
            config=self.config,
            num_optimizer_steps=num_training_steps * optimizer_steps_per_training_step(self.config),
            max_length=32,
            probe_ids=tuple(ids_of("1+2=")),
            expected=expected,
        )
        self.group = HybridGroup(LocalBackend("policy", lambda context: self.make(setup, context)))
        self.version = 0
        self.handoff = self.publish(0)

    def make(self, setup: WorkerSetup, context: RankContext) -> HybridWorker:
        self.worker = HybridWorker(setup, context)
        return self.worker

    @property
    def awake(self) -> frozenset[str]:
        return self.worker.leases.awake

    def publish(self, version: int) -> dict[str, float]:
        """Hand the weights to the engine; what it says."""
        return largest(self.group.update_weights(version))

    def memory(self) -> dict[str, float]:
        return largest(self.group.memory_metrics())

    def rollout(self, step: int = 1) -> Batch:
        """Samples of the present policy, with a reward each, dealt out over the mini-batches."""
        rows = [PromptRow(i, text, tuple(ids_of(text)), {}) for i, text in enumerate(PROMPTS)]
        batch = (
            Collector(self.group, ("spread",), max_failure_share=0.0)
            .rollout(
                rows,
                self.config.algorithm.num_generations,
                SamplingParams(max_tokens=9, temperature=self.config.rollout.temperature, stop_token_ids=(EOS_ID,)),
                self.version,
                TrainerState(step, 4, 0.0),
                purpose=f"train/{step}",
            )
            .batch
        )
        return batch.with_columns(mini_batch=mini_batches(batch["group"], self.config, step))

    def prepared(self, step: int = 1) -> Batch:
        """Scored, with advantages."""
        return self.group.advantages(self.group.score(self.rollout(step), step))

    def update(self, batch: Batch, step: int = 1) -> dict[str, float]:
        """The optimizer steps of a training step; their metrics."""
        return joined(self.group.update(batch, step))

    def train(self, step: int = 1) -> dict[str, float]:
        """One training step."""
        metrics = self.update(self.prepared(step), step)
        self.version = step
        self.handoff = self.publish(step)
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
