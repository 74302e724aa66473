"""The hybrid worker: actor, reference and rollout engine of one rank, in one process. They meet only here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.algos import Needs
from hybrid_rl.batch import Batch, SampleKey
from hybrid_rl.batch.files import save_rollout
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.checkpoint.writing import write_checkpoint
from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.engines.base import KV_CACHE, RolloutRequest, SamplingParams
from hybrid_rl.errors import ConfigError, HandoffError
from hybrid_rl.logging.report import JsonLines
from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS, OPTIMIZER, REFERENCE, REWARD_MODELS
from hybrid_rl.metrics import MetricSums, now
from hybrid_rl.models.likeness import check_fingerprint
from hybrid_rl.rollout.demonstrations import DEMONSTRATION, Demonstrations
from hybrid_rl.rollout.judged import judge_encoder
from hybrid_rl.rollout.late import merge_late
from hybrid_rl.rollout.records import sample_records
from hybrid_rl.rollout.scored import RolloutCall, RolloutReport, RolloutTask, ScoredRollout
from hybrid_rl.sharding.build import build_model
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.estimate import AdvantageSpec, with_advantages
from hybrid_rl.training.plan import Plan, PlanSpec
from hybrid_rl.training.skipped import SkippedUpdate
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.residents import module_resident, optimizer_resident
from hybrid_rl.workers.reward_model import RewardModels
from hybrid_rl.workers.roles import CRITICS, SCORING, Roles
from hybrid_rl.workers.rollout_side import rollout_side
from hybrid_rl.workers.setup import WorkerSetup, demonstration_encoder

# The cache wakes after the handoff, when nothing is staged or gathered any more.
PUBLISHING = frozenset({ACTOR, ENGINE_WEIGHTS})
GENERATING = PUBLISHING | {KV_CACHE}
TRAINING = frozenset({ACTOR, OPTIMIZER, REFERENCE}) | CRITICS

PROBE_TOKENS = 4
FIRST_PROBES = 3  # handoffs in a row that are probed before the schedule: the start, and two updates
PROBE_REQUEST = -1
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def causes(gap: float, proof: str | None) -> str:
    """Explain why engine and trainer may differ, likeliest cause first. gap: of their logprobs, NaN or inf if one of
    them gives none. proof: as `RolloutSide.proof` gives it."""
    if not math.isfinite(gap):
        return "the weights, or numbers that one of them computes from them, are not finite"
    others = "own code for the architecture, an argument of the engine, an activation, hook or buffer changed by hand"
    if proof is None:
        return (
            f"the engine does not hold the trainer's weights (they were not compared in this handoff; verify_steps=1 "
            f"does), or it computes differently ({others})"
        )
    return (
        f"the engine computes this architecture differently ({others}); {proof}. rollout.engine=inplace or hf runs the "
        "trainer's own modules; probe_tolerance accepts such a gap"
    )


class HybridWorker(WorkerBase):
    """One rank that trains and generates with the same weights."""

    def __init__(self, setup: WorkerSetup, context: RankContext) -> None:
        super().__init__(context)
        config = setup.config
        self._config = config
        self._plan_spec, self._advantages = PlanSpec.of(config), AdvantageSpec.of(config)
        self._probe_ids = setup.probe_ids
        self._num_unproved = FIRST_PROBES  # handoffs still to be probed whatever the schedule says
        self._version: int | None = None  # of the actor's weights, from their publication to the next update
        self._tokenizer = setup.tokenizer
        model = build_model(setup.model, config, context, is_trained=True)
        model.verify()
        model.check_length(setup.max_length)
        if setup.fingerprint is not None:
            check_fingerprint(model, setup.fingerprint)
        self._roles = Roles(setup, context)
        self._actor = Actor(
            model,
            config,
            context,
            num_optimizer_steps=setup.num_optimizer_steps,
            reference=self._roles.reference_model,
        )
        self._side = rollout_side(setup, model, context)
        self._client = self._side.client
        self._engine = self._client.engine
        if self._engine.kv_cache_tokens < setup.engine_length:
            raise ConfigError(
                f"the KV cache holds {self._engine.kv_cache_tokens} tokens, but prompt and completion may take "
                f"{setup.engine_length}; raise kv_cache_memory_bytes, leave it out, or lower max_completion_length"
            )
        self._rewards = setup.rewards.runner(config)
        self._samples: JsonLines | None = None
        self._demonstrations = Demonstrations(demonstration_encoder(setup.tokenizer, config), setup.decode)
        longest = model.length_limit
        limits = (setup.engine_length, self._engine.kv_cache_tokens, *([] if longest is None else [longest.num_tokens]))
        self._rollout = ScoredRollout(
            self._client,
            self._rewards,
            setup.decode,
            seed=config.seed,
            encode=judge_encoder(setup.tokenizer, config.data.chat_template_kwargs),
            max_length=min(limits),
        )
        entries = self._rewards.entries
        self._reward_models = RewardModels(entries.models, entries.names, setup.tokenizer, config, context)
        self._reward_models.check_prompts(setup.first_prompt)
        trained = (module_resident(ACTOR, model.module), optimizer_resident(self._actor.optimizer))
        for resident in (self._reward_models.resident, *trained, *self._roles.residents, *self._side.residents):
            self.leases.add(resident)

    # ------------------------------------------------------------------------------------------------ training

    def _plan(self, batch: Batch, step: int) -> Plan:
        return self._plan_spec.plan(batch, step, self._context, self._actor.model.device)

    @dispatch(split="groups", collect="concat", needs=SCORING)
    def score(self, batch: Batch, step: int) -> Batch:
        """Add the columns that the algorithm needs: logprobs of policy, reference and teacher, values."""
        plan = self._plan(batch, step)
        batch = batch.with_columns(**self._actor.columns(batch, plan))
        return batch.with_columns(**self._roles.columns(batch, plan))

    @dispatch(split="groups", collect="concat")
    def advantages(self, batch: Batch) -> Batch:
        """Add advantages, one per completion token, and returns if there is a critic; needs whole groups."""
        return with_advantages(batch, self._advantages, self._context, self._actor.kl_weight.beta)

    @dispatch(split="groups", collect="all", needs=TRAINING)
    def update(self, batch: Batch, step: int) -> MetricSums:
        """Take all optimizer steps of a training step. Returns this rank's part of their metrics."""
        plan = self._plan(batch, step)
        self._version = None
        sums = self._roles.update_critic(batch, plan)
        if not self._roles.is_warmup(step):
            sums.merge(self._actor.update(batch, plan, step - 1))
            self._roles.after_update(self._actor, step)
        # Ranks that have the same samples report them once.
        return sums if self._context.is_data_leader else MetricSums()

    @dispatch(collect="leader")
    def skipped_updates(self) -> dict[str, SkippedUpdate | None]:
        """Return the last update that policy and critic each skipped."""
        return {"policy": self._actor.skipped, "critic": self._roles.skipped_update}

    # ------------------------------------------------------------------------------------------------- rollout

    @dispatch(collect="all")
    def update_weights(self, version: int) -> dict[str, float]:
        """Hand the actor's weights to the engine as this policy version, and prove byte by byte and on a probe, each as
        often as configured, that it has them and computes with them. Leases PUBLISHING, and GENERATING for the probe.

        Raises HandoffError if it does not: the run stops before anything is generated with such weights.
        """
        self._version = None
        with self.lease(PUBLISHING):
            report = self._side.publish(version)
            metrics = {
                "handoff/version": float(report.version),
                "handoff/bytes": float(report.num_bytes),
                "timing/handoff": report.seconds,
            }
            if report.link_bytes:
                metrics["handoff/minimum_bytes"] = float(report.minimum_bytes)
            metrics |= {f"handoff/{link}_bytes": float(size) for link, size in report.link_bytes.items()}
            with self._or_invalidate():
                verified = self._side.verify(version)
            metrics |= verified
        if self._is_probed(version):
            with self.lease(GENERATING), self._or_invalidate():
                start = now()
                metrics["handoff/probe_gap"] = self._probe(version, self._side.proof(verified))
                metrics["timing/probe"] = now() - start
            self._num_unproved -= 1
        self._version = version
        return metrics

    @dispatch(collect="all")
    def update_weights_again(self, version: int) -> dict[str, float]:
        """Do the same for a version that the engine already holds, if its weights were changed by somebody else."""
        self._invalidate()
        return self.update_weights(version)

    def _is_probed(self, version: int) -> bool:
        """Whether this handoff is probed. All ranks are, or none; a rank that failed alone makes all probe."""
        every = self._config.rollout.probe_steps
        if not every:
            return False
        return any(self._context.gather(self._num_unproved > 0)) or version % every == 0

    def _publish_lost(self, version: int) -> None:
        """Publish this version again if it was published and an engine has lost it since. If that fails, the next call
        tries again: the actor's weights have not changed."""
        # A rank may have failed alone the last time; all publish together.
        stands = self._context.gather((self._version == version, self._engine.policy_version < 0))
        if not all(was_published for was_published, _ in stands) or not any(is_lost for _, is_lost in stands):
            return
        self._invalidate()
        try:
            self.update_weights(version)
        finally:
            self._version = version

    def _invalidate(self) -> None:
        """Have the engine generate nothing until it is given weights, and probe the handoffs that follow again."""
        self._num_unproved = FIRST_PROBES
        self._engine.invalidate()

    @contextmanager
    def _or_invalidate(self) -> Iterator[None]:
        """Invalidate the engine if the block fails."""
        try:
            yield
        except BaseException:
            self._invalidate()
            raise

    def _probe(self, version: int, proof: str | None) -> float:
        request = RolloutRequest(
            PROBE_REQUEST,
            self._probe_ids,
            SamplingParams(max_tokens=min(PROBE_TOKENS, self._config.rollout.max_completion_length), temperature=0.0),
        )
        answer = self._client.generate([request], version)[0]
        token_ids = torch.tensor([*self._probe_ids, *answer.completion_ids], device=self._actor.model.device)
        targets = torch.arange(len(self._probe_ids), len(token_ids), device=token_ids.device)
        with torch.no_grad():
            expected, _ = self._actor.model.packed_logprobs(token_ids, [len(token_ids)], targets, 1.0)
        gap = float((expected.cpu() - torch.tensor(answer.logprobs)).abs().max())
        tolerance = self._config.rollout.probe_tolerance or PROBE_TOLERANCE[self._actor.model.dtype]
        if not gap <= tolerance:
            raise HandoffError(
                f"policy version {version}: engine and trainer differ by {gap:.3g} in the logprobs of the probe prompt "
                f"(tolerance {tolerance:g}): {causes(gap, proof)}"
            )
        return gap

    @dispatch(split="items", collect="concat")
    def rollout(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Generate and score samples of this rank's prompts. Leases GENERATING, and before it PUBLISHING if the engine
        has given up its weights since they were published: it sleeps without a copy."""
        self._actor.optimizer.check()
        self._publish_lost(call.version)
        with self.lease(GENERATING | {REWARD_MODELS}):
            batch, report = self._rollout.run(tasks, call)
            if call.is_scored and self._rewards.entries.models:
                late = self._reward_models.late_scores(batch)
                batch, report.failures = merge_late(batch, report.failures, self._rewards, late)
        return batch, report

    @dispatch(split="items", collect="concat")
    def demonstrations(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Score the dataset's own completions of this rank's prompts."""
        return self._demonstrations.run(tasks, call)

    # --------------------------------------------------------------------------------------------- samples as text

    @dispatch(split="groups", collect="leader", objects=True)
    def log_samples(self, batch: Batch, step: int, folder: Path, first: tuple[int, int]) -> None:
        """Append this rank's samples to its file in the run folder; samples that cannot be written now wait. first:
        the smallest group and trajectory of the step."""
        context = self._context
        if not context.is_data_leader:
            return
        name = "samples.jsonl" if context.num_data_ranks == 1 else f"samples-rank{context.data_rank}.jsonl"
        if self._samples is None:
            self._samples = JsonLines(folder / name)
        names = [DEMONSTRATION] if Needs.DEMONSTRATIONS in self._config.advantage.needs else self._rewards.names
        self._samples.write(sample_records(step, batch, names, first))

    @dispatch(split="groups", collect="all", objects=True)
    def texts(self, batch: Batch) -> list[tuple[SampleKey, str, str, float]]:
        """Return key, prompt, completion and reward of this rank's samples."""
        columns = (sample_keys(batch), map(str, batch["prompt"]), batch["completion"])
        return list(zip(*columns, batch["rewards"].tolist(), strict=True))

    @dispatch(collect="all")
    def flush_samples(self) -> Path | None:
        """Write the samples that wait. Returns the file if that fails."""
        return None if self._samples is None or self._samples.flush() else self._samples.path

    @dispatch(split="groups", collect="leader", objects=True)
    def save_rollout(self, batch: Batch, step: int, folder: Path) -> None:
        """Write this rank's samples so that they can be replayed."""
        if self._context.is_data_leader:
            save_rollout(folder, step, self._context.data_rank, self._context.num_data_ranks, batch)

    def close(self) -> None:
        """Stop scoring and generating."""
        self._rewards.close()
        self._side.close()

    # --------------------------------------------------------------------------------------------- checkpoints

    @dispatch(collect="leader", needs=TRAINING)
    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write a checkpoint: weights, tokenizer, optimizer, and the driver's state."""
        self._actor.optimizer.check()

        def save_model(target: Path) -> None:
            self._actor.save_model(target)
            self._roles.save_models(target)
            if self._context.rank == 0:
                self._tokenizer.save_pretrained(target)

        optimizer = self._actor.optimizer_state()
        write_checkpoint(
            folder,
            save_model,
            optimizer,
            state,
            parts=self._roles.optimizer_state(),
            rank=self._context.rank,
            gather=self._context.gather,
        )

    @dispatch(collect="leader", needs=TRAINING)
    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self._version = None
        self._actor.load(folder)
        self._roles.load_models(folder)
