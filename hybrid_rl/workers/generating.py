"""The half of a rank that generates: its engine, the handoff of weights to it, rollouts and rewards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from hybrid_rl.batch import Batch
from hybrid_rl.batch.origins import check_origins
from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.buffer_keys import HeldConfig
from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.cycle import REWARD_MODELS, Cycle
from hybrid_rl.metrics.metric_sums import now
from hybrid_rl.models import CausalLM
from hybrid_rl.models.grid_linear import train_on_grid
from hybrid_rl.models.packed.likeness import check_fingerprint
from hybrid_rl.process import progress
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.completion_stream import CompletionStream
from hybrid_rl.rollout.deferred_scores import merge_late
from hybrid_rl.rollout.held_files import held_text
from hybrid_rl.rollout.hold_rule import HeldPrompt
from hybrid_rl.rollout.judged import judge_encoder
from hybrid_rl.rollout.stream import GroupStream
from hybrid_rl.rollout.trajectory_stream import TrajectoryStream
from hybrid_rl.training.sharding.build import build_model
from hybrid_rl.workers.agent_rollout import episode_settings
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.handoff_probe import HandoffProbe
from hybrid_rl.workers.replicas import check_replicas
from hybrid_rl.workers.reward_model import RewardModels
from hybrid_rl.workers.rollout_side import RolloutSide
from hybrid_rl.workers.setup import RewardSetup, WorkerSetup
from hybrid_rl.workers.trainer_memory import TrainerMemory

FIRST_PROBES = 3  # handoffs in a row that are probed before the schedule: the start, and two updates


def load_policy(setup: WorkerSetup, context: RankContext) -> CausalLM:
    """Make the policy, and check that it computes what its module does. Collective."""
    with progress.doing("loading the model"):
        model = build_model(setup.model, setup.config, context, is_trained=True)
    with progress.doing("checking the model"):
        model.verify(setup.probe_ids)
    model.check_length(setup.max_length)
    if setup.fingerprint is not None:
        check_fingerprint(model, setup.fingerprint)
    if setup.config.rollout.quantization_aware:  # all that was checked before is checked as it was passed
        train_on_grid(model.module, setup.config.rollout.quantization)
    return model


class GeneratingWorker(WorkerBase):
    """One rank with an engine, which gets weights by handoffs. Its methods lease what the cycle says that their phases
    need. _version: of the weights that the engine was given last, if they are still those of the policy."""

    _cycle: Cycle
    _version: int | None = None

    def __init__(self, setup: WorkerSetup, context: RankContext) -> None:
        super().__init__(context, setup.expected)
        check_replicas(setup.config.rollout, context)
        self._config, self._tokenizer = setup.config, setup.tokenizer
        self._num_unproved = FIRST_PROBES  # handoffs still to be probed whatever the schedule says

    def _generate_with(self, setup: WorkerSetup, side: RolloutSide, memory: TrainerMemory, model: CausalLM) -> None:
        """Make everything around an engine. memory: makes residents. model: the policy, perhaps without weights."""
        config, context = self._config, self._context
        self._side = side
        for resident in side.residents:
            self.hold(resident)
        self._client = side.client
        self._engine = self._client.engine
        if self._engine.kv_cache_tokens < setup.engine_length:
            raise ConfigError(
                f"the KV cache holds {self._engine.kv_cache_tokens} tokens, but prompt and completion may take "
                f"{setup.engine_length}; raise kv_cache_memory_bytes, leave it out, or lower max_completion_length"
            )
        self._rewards = setup.rewards.runner(config)
        longest = model.length_limit
        limits = (setup.engine_length, self._engine.kv_cache_tokens, *([] if longest is None else [longest.num_tokens]))
        encode = judge_encoder(setup.tokenizer, config.data.chat_template_kwargs)
        options: Any = {"gather": context.gather, "encode": encode, "max_length": min(limits)}
        self._stream: GroupStream[Any] = (
            CompletionStream(self._client, self._rewards, setup.decode, seed=config.seed, **options)
            if setup.agents is None
            else TrajectoryStream(self._client, self._rewards, episode_settings(setup, context.rank), **options)
        )
        entries = self._rewards.entries
        self._reward_models = RewardModels(entries.models, entries.names, config, context)
        self._reward_models.check_prompts(setup.first_prompt)
        if entries.models:
            self.hold(memory.models(REWARD_MODELS, self._reward_models.models))
        self._probe = HandoffProbe(setup.probe_ids, config, model.dtype)

    def _roll_out_with(self, config: TrainerConfig, rewards: RewardSetup | None) -> None:
        """Go on with a configuration that differs in what may change between steps. rewards: None = as they are."""
        if rewards is not None:
            runner, old = rewards.runner(config), self._rewards
            self._stream.score_with(runner)
            self._rewards = runner
            old.close()
        self._config = config
        self._reward_models.reconfigure(config)
        self._stream.reconfigure(config)

    # ------------------------------------------------------------------------------------------------- handoffs

    @dispatch(collect="all")
    def update_weights(self, version: int) -> dict[str, float]:
        """Hand the policy's weights to the engine as this policy version, and prove byte by byte and on a probe, each
        as often as configured, that it has them and computes with them. The trainer's half of the probe is computed
        while the actor is there.

        Raises HandoffError if it does not: the run stops before anything is generated with such weights.
        """
        self._version = None
        with self.phase(self._cycle.publish):
            try:
                report = self._side.publish(version)
                with self._or_invalidate():
                    verified = self._side.verify(version)
                    start = now()
                    expected = self._expected(version)
                    seconds = now() - start
            finally:
                self._side.let_go()
        metrics = {
            "handoff/version": float(report.version),
            "handoff/bytes": float(report.num_bytes),
            "timing/handoff": report.seconds,
        }
        if report.link_bytes:
            metrics["handoff/minimum_bytes"] = float(report.minimum_bytes)
        metrics |= {f"handoff/{link}_bytes": float(size) for link, size in report.link_bytes.items()} | verified
        if expected is not None:
            with self.phase(self._cycle.check), self._or_invalidate():
                start = now()
                answer = self._client.generate([self._probe.request], version)[0]
                gap = self._probe.compare(expected, answer, version, self._side.proof(verified))
                metrics |= {"handoff/probe_gap": gap, "timing/probe": seconds + now() - start}
            self._num_unproved -= 1
        self._version = version
        return metrics

    @dispatch(collect="all")
    def update_weights_again(self, version: int) -> dict[str, float]:
        """Do the same for a version that the engine already holds, if its weights were changed by somebody else."""
        self._invalidate()
        return self.update_weights(version)

    @abstractmethod
    def _expected(self, version: int) -> Tensor | None:
        """Return the trainer's half of the probe (`HandoffProbe.expected`), None if this handoff is not probed. All
        ranks give it, or none. Collective."""

    def _require_weights(self, version: int) -> None:
        """See to it that the engine has the weights of a version that was handed over, if any phase puts them to sleep.
        Collective."""

    def _is_probed(self, version: int) -> bool:
        """Whether this handoff is probed. All ranks are, or none; a rank that failed alone makes all probe."""
        every = self._config.rollout.handoff.probe_steps
        if not every:
            return False
        return any(self._context.gather(self._num_unproved > 0)) or version % every == 0

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

    # ------------------------------------------------------------------------------------------------- rollouts

    @dispatch(split="items", collect="concat")
    def rollout(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Generate and score samples of this rank's prompts. Publishes before if the engine has given up its weights
        since they were published: it sleeps without a copy. Reward models score when the engine has finished."""
        self._require_weights(call.version)
        with self.phase(self._cycle.generate):
            batch, report = self._stream.run(tasks, call)
        check_origins(batch)
        if call.is_scored and self._rewards.entries.models:
            with self.phase(self._cycle.reward), progress.doing("reward models"):
                late = self._reward_models.late_scores(batch)
            batch, report.failures = merge_late(batch, report.failures, self._rewards, late)
        return batch, report

    @dispatch(collect="all")
    def held_texts(self, step: int) -> str:
        """Return the groups that are held after a training step, as checkpoints have them."""
        return held_text(self._stream.held(step))

    @dispatch(collect="all")
    def held_prompts(self, step: int, folder: Path | None = None) -> list[tuple[int, HeldPrompt]]:
        """Return id and prompt of the groups that are held after a training step. folder: of a checkpoint of that step;
        go on with what it holds."""
        if folder is not None and isinstance(self._config.buffer, HeldConfig):
            self._stream.load(step, folder, self._context.data_rank, self._context.num_data_ranks)
        return [(group.group, group.prompt(self._context.data_rank)) for group in self._stream.held(step)]

    @dispatch(collect="all")
    def oldest_held(self, step: int) -> int:
        """Return the training step that began the oldest group that is held after a training step; the next one if
        none is held."""
        return min((group.born for group in self._stream.held(step)), default=step + 1)

    def close(self) -> None:
        """Stop scoring and generating."""
        self._stream.close()
        self._rewards.close()
        self._side.close()
