"""The hybrid worker: actor, reference and rollout engine of one rank, in one process. Only here do they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_rl.algos import ALGORITHMS
from hybrid_rl.batch import Batch
from hybrid_rl.checkpoint import read_optimizer, write_checkpoint
from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.schema import InPlaceRolloutConfig
from hybrid_rl.controller import dispatch
from hybrid_rl.errors import ConfigError, HandoffError, NotYetSupportedError
from hybrid_rl.metrics import now
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.rollout import EngineStats, FinishedSample, RolloutRequest, SamplingParams, generate
from hybrid_rl.rollout.base import KV_CACHE
from hybrid_rl.rollout.inplace import InPlaceEngine
from hybrid_rl.workers.actor import Actor
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.reference import Reference
from hybrid_rl.workers.residents import (
    ACTOR,
    OPTIMIZER,
    REFERENCE,
    kv_cache_resident,
    module_resident,
    optimizer_resident,
)
from hybrid_rl.workers.step import options_of

GENERATING = frozenset({ACTOR, KV_CACHE})
TRAINING = frozenset({ACTOR, OPTIMIZER})
SCORING = frozenset({ACTOR, REFERENCE})

PROBE_TOKENS = 4
PROBE_REQUEST = -1
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class WorkerSetup:
    """What a rank needs to build itself. probe_ids: the prompt on which engine and trainer are compared; decode: token
    ids to text, in which stop strings are looked for."""

    module: PreTrainedModel
    config: TrainerConfig
    num_optimizer_steps: int
    max_length: int
    probe_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None = None


class HybridWorker(WorkerBase):
    """One rank that trains and generates with the same weights."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__()
        config = setup.config
        self._config = config
        self._probe_ids = setup.probe_ids
        self._algorithm = ALGORITHMS[config.algorithm.name]
        model = CausalLM(setup.module, config.model.attention)
        model.check_length(setup.max_length)
        model.verify()
        needs_reference = config.algorithm.beta > 0 or "ref_logprobs" in self._algorithm.needs
        self._reference = Reference(model) if needs_reference else None
        self._actor = Actor(model, self._algorithm, config, num_optimizer_steps=setup.num_optimizer_steps)
        if not isinstance(config.rollout, InPlaceRolloutConfig):
            raise NotYetSupportedError(f"rollout.engine={config.rollout.engine} does not work yet; use inplace")
        self._engine = InPlaceEngine(
            model, config.rollout.inplace, max_length=setup.max_length, decode=setup.decode
        )
        if self._engine.kv_cache_tokens < setup.max_length:
            raise ConfigError(
                f"kv_cache_memory_bytes={config.rollout.inplace.kv_cache_memory_bytes} holds "
                f"{self._engine.kv_cache_tokens} tokens, but prompt and completion may take {setup.max_length}; "
                f"raise it, leave it out, or lower max_completion_length"
            )
        self.leases.add(module_resident(ACTOR, model.module))
        self.leases.add(optimizer_resident(self._actor.optimizer))
        # Without a KL term the reference is a resident of no bytes, so that one declaration of needs serves both cases.
        self.leases.add(
            module_resident(REFERENCE, self._reference.model.module if self._reference else torch.nn.Module())
        )
        self.leases.add(kv_cache_resident(self._engine))

    # ------------------------------------------------------------------------------------------------ training

    @dispatch(split="groups", collect="concat", needs=SCORING)
    def score(self, batch: Batch, step: int) -> Batch:
        """Add the logprobs that the algorithm needs: old_logprobs (recompute, rollout) and ref_logprobs."""
        plan = self._actor.plan(batch, step)
        mode = self._config.algorithm.old_logprobs
        if mode == "recompute":
            batch = batch.with_columns(old_logprobs=self._actor.logprobs(batch, plan))
        elif mode == "rollout":
            batch = batch.with_columns(old_logprobs=batch["rollout_logprobs"])
        if self._reference is not None:
            temperature = self._config.rollout.temperature
            batch = batch.with_columns(ref_logprobs=self._reference.logprobs(batch, plan, temperature))
        return batch

    @dispatch(split="groups", collect="concat")
    def advantages(self, batch: Batch) -> Batch:
        """Add advantages, one per completion token; needs whole groups."""
        per_sample = self._algorithm.advantage(
            batch["rewards"], batch["group"], **options_of(self._config.algorithm, self._algorithm.advantage_options)
        )
        completions = batch["completion_ids"]
        return batch.with_columns(advantages=completions.with_values(per_sample.float()[completions.row_index()]))

    @dispatch(split="groups", collect="leader", needs=TRAINING)
    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimizer steps of a training step."""
        return self._actor.update(batch, self._actor.plan(batch, step))

    # ------------------------------------------------------------------------------------------------- rollout

    @dispatch(collect="leader", needs=GENERATING)
    def publish_weights(self, version: int) -> dict[str, float]:
        """Hand the actor's weights to the engine as this policy version, and prove on a probe that it uses them.

        Raises HandoffError where engine and trainer give other logprobs than the tolerance allows: the run stops before
        anything is generated with such weights.
        """
        report = self._engine.update_weights(TensorSource.of(self._actor.model.module), version)
        metrics = {
            "handoff/version": float(report.version),
            "handoff/bytes": float(report.num_bytes),
            "timing/handoff": report.seconds,
        }
        every = self._config.rollout.probe_steps
        if every and version % every == 0:
            start = now()
            metrics["handoff/probe_gap"] = self._probe(version)
            metrics["timing/probe"] = now() - start
        return metrics

    def _probe(self, version: int) -> float:
        request = RolloutRequest(
            PROBE_REQUEST,
            self._probe_ids,
            SamplingParams(max_tokens=min(PROBE_TOKENS, self._config.rollout.max_completion_length), temperature=0.0),
        )
        answer = generate(self._engine, [request], version)[0]
        token_ids = torch.tensor([*self._probe_ids, *answer.completion_ids], device=self._actor.model.device)
        targets = torch.arange(len(self._probe_ids), len(token_ids), device=token_ids.device)
        with torch.no_grad():
            expected, _ = self._actor.model.packed_logprobs(token_ids, [len(token_ids)], targets, 1.0)
        gap = float((expected.cpu() - torch.tensor(answer.logprobs)).abs().max())
        tolerance = self._config.rollout.probe_tolerance or PROBE_TOLERANCE[self._actor.model.dtype]
        if not gap <= tolerance:
            raise HandoffError(
                f"policy version {version}: engine and trainer differ by {gap:.3g} in the logprobs of the probe prompt "
                f"(tolerance {tolerance:g}); the engine does not hold the trainer's weights, or they are not finite"
            )
        return gap

    @dispatch(collect="leader", needs=GENERATING)
    def submit(self, requests: Sequence[RolloutRequest], version: int) -> list[int]:
        """Queue requests for weights of this version."""
        return self._engine.submit(requests, version)

    @dispatch(collect="leader", needs=GENERATING)
    def step(self) -> list[FinishedSample]:
        """One engine step; what finished."""
        return self._engine.step()

    @dispatch(collect="leader", needs=GENERATING)
    def abort_all(self) -> list[FinishedSample]:
        """End every request and return them, so that the engine is empty."""
        self._engine.pause("abort")
        try:
            return self._engine.step()
        finally:
            self._engine.resume()

    @dispatch(collect="leader")
    def engine_stats(self) -> EngineStats:
        """Counters of the engine."""
        return self._engine.stats()

    # --------------------------------------------------------------------------------------------- checkpoints

    @dispatch(collect="leader", needs=TRAINING)
    def save(self, folder: Path, state: dict[str, Any], tokenizer: Any) -> None:
        """Write a checkpoint: weights, tokenizer, optimizer, and the driver's state."""

        def save_model(target: Path) -> None:
            self._actor.save_model(target)
            tokenizer.save_pretrained(target)

        write_checkpoint(folder, save_model, self._actor.optimizer.state_dict(), state)

    @dispatch(collect="leader", needs=TRAINING)
    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self._actor.load(folder, read_optimizer(folder))
