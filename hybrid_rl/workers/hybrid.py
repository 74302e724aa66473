"""The hybrid worker: actor, reference and rollout engine of one rank, in one process. They meet only here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.algos import Needs
from hybrid_rl.batch import Batch, SampleKey
from hybrid_rl.batch.rollout_files import save_rollout
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.errors import StorageError
from hybrid_rl.logging.run_folder import JsonLines
from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS, REWARD_MODELS, joined
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.grid_linear import leave_grid, on_grid
from hybrid_rl.models.lora.inject import leave
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.process import progress
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.demonstrations import DEMONSTRATION, Demonstrations
from hybrid_rl.rollout.sample_records import extracted_answers, sample_records
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import Plan, PlanSpec
from hybrid_rl.training.estimate import AdvantageSpec, with_advantages
from hybrid_rl.training.mismatch import MismatchGuard
from hybrid_rl.training.optimizer import no_gradients_left
from hybrid_rl.training.run_cycle import memory_phases
from hybrid_rl.training.skipped import SkippedUpdate
from hybrid_rl.workers.generating import load_policy
from hybrid_rl.workers.rank_saving import SavingWorker
from hybrid_rl.workers.roles import Roles
from hybrid_rl.workers.rollout_side import rollout_side
from hybrid_rl.workers.setup import RewardSetup, WorkerSetup, demonstration_encoder
from hybrid_rl.workers.token_records import NUM_SHOWN, token_records
from hybrid_rl.workers.trainer_memory import TrainerMemory

logger = logging.getLogger("hybrid_rl")


class HybridWorker(SavingWorker):
    """One rank that trains and generates with the same weights; if the setup says so, other ranks generate."""

    def __init__(self, setup: WorkerSetup, context: RankContext) -> None:
        super().__init__(setup, context)
        config = setup.config
        self._plan_spec, self._advantages = PlanSpec.of(config), AdvantageSpec.of(config)
        rewards: Any = {"has_reward_models": bool(setup.rewards.entries.models)}
        self._cycle = memory_phases(config, **rewards, generates=setup.generates).cycle
        self._is_live = isinstance(setup.model, PreTrainedModel)  # the module is the user's own
        try:
            model = load_policy(setup, context)
            self._memory = TrainerMemory(config, context)
            self._build(setup, model)
        except BaseException:
            self._leave_what_is_the_users(setup.model)
            raise

    def _build(self, setup: WorkerSetup, model: CausalLM) -> None:
        """Make everything around the model. What leaves memory leaves as soon as it is made."""
        config, context, memory = self._config, self._context, self._memory
        self._roles = Roles(setup, context, memory, self.hold, model)  # copies of the model, which must still be there
        self._actor = Actor(
            model,
            config,
            context,
            num_optimizer_steps=setup.num_optimizer_steps,
            reference=self._roles.reference_model,
            is_trained=setup.is_trained,
        )
        # Saved samples are those of other weights as soon as anything of the run is not as it was.
        if config.mode != "train" and config.rollout.handoff.probe_steps:
            self._actor.guard = MismatchGuard(model.dtype, context)
        self.hold(memory.optimizer(self._actor.optimizer))
        self.hold(memory.models(ACTOR, [model]))
        with self.lease(frozenset({ACTOR})), progress.doing("building the engine"):
            side = rollout_side(setup, model, context, self._actor.optimizer.masters)
        self._generate_with(setup, side, memory, model)
        self._samples: dict[Path, JsonLines] = {}
        self._demonstrations = Demonstrations(demonstration_encoder(setup.tokenizer, config), setup.decode)
        scorers = [(self._cycle.score_actor, self._actor.columns), *self._roles.scorers(self._cycle)]
        scorers.sort(key=lambda scorer: list(self._cycle).index(scorer[0]))
        self._scorers = joined([(phase, (phase, scorer)) for phase, scorer in scorers], self.movable)

    @dispatch(collect="leader")
    def reconfigure(self, config: TrainerConfig, num_steps: tuple[int, int], rewards: RewardSetup | None) -> None:
        """Go on with a configuration that differs in what may change between steps.

        num_steps: optimizer steps of policy and critic in the whole run; rewards: None = as they are."""
        self._roll_out_with(config, rewards)
        self._plan_spec, self._advantages = PlanSpec.of(config), AdvantageSpec.of(config)
        self._actor.reconfigure(config, num_steps[0])
        self._roles.reconfigure(config, num_steps[1])

    # ------------------------------------------------------------------------------------------------ training

    def _plan(self, batch: Batch, step: int) -> Plan:
        return self._plan_spec.plan(batch, step, self._context, self._actor.model.device)

    @dispatch(split="groups", collect="concat")
    def score(self, batch: Batch, step: int) -> Batch:
        """Add the columns that the algorithm needs: logprobs of policy, reference and teacher, values. One model after
        the other is leased, if they move at all."""
        plan = self._plan(batch, step)
        num_passes = sum(len(its) for _, its in self._scorers)
        unit = "samples" if num_passes < 2 else f"passes ({num_passes} a sample)"
        progress.count(num_passes * batch.num_samples, unit)
        for tags, scorers in self._scorers:
            with self.lease(tags) if tags else nullcontext():
                for phase, columns in scorers:
                    with self.watched(phase) if phase.is_taken else nullcontext():
                        batch = batch.with_columns(**columns(batch, plan))
        return batch

    @dispatch(split="groups", collect="concat")
    def advantages(self, batch: Batch) -> Batch:
        """Add advantages, one per completion token, and returns if there is a critic; needs whole groups."""
        return with_advantages(batch, self._advantages, self._context, self._actor.kl_weight.beta)

    @dispatch(split="groups", collect="all")
    def update(self, batch: Batch, step: int) -> MetricSums:
        """Take all optimizer steps of a training step, the critic's first. Returns this rank's part of their
        metrics."""
        plan, sums = self._plan(batch, step), MetricSums()
        self._version = None
        if self._cycle.update_critic.is_taken:
            with self.phase(self._cycle.update_critic):
                sums.merge(self._roles.update_critic(batch, plan))
        if not self._roles.is_warmup(step):
            with self.phase(self._cycle.update), no_gradients_left(self._actor.optimizer):
                sums.merge(self._actor.update(batch, plan, step - 1))
                self._roles.after_update(self._actor, step)
        # Ranks that have the same samples report them once.
        return sums if self._context.is_data_leader else MetricSums()

    @dispatch(split="groups", collect="concat")
    def with_trained_columns(self, batch: Batch) -> Batch:
        """Add what the last update of this batch found in passing: old_logprobs, if all its samples had one optimizer
        step, and what `record_tokens` asks for. People look at it; nothing is computed from it."""
        return batch.with_columns(**self._actor.trained_columns)

    @dispatch(collect="leader")
    def record_tokens(self) -> None:
        """Have updates keep what they do with every token (`TokenRecord`)."""
        self._actor.record_tokens()

    @dispatch(collect="leader")
    def skipped_updates(self) -> dict[str, SkippedUpdate | None]:
        """Return the last update that policy and critic each skipped."""
        return {"policy": self._actor.skipped, "critic": self._roles.skipped_update}

    # ------------------------------------------------------------------------------------------------- rollout

    def _expected(self, version: int) -> Tensor | None:
        if not self._is_probed(version):
            return None
        with on_grid(self._actor.model.module, self._config.rollout.quantization, self._side.joined):
            return self._probe.expected(self._actor.model)

    def _require_weights(self, version: int) -> None:
        self._actor.optimizer.check()
        self._publish_lost(version)

    def _publish_lost(self, version: int) -> None:
        """Publish this version again if it was published and an engine has lost it since. If that fails, the next call
        tries again: the actor's weights have not changed."""
        # A rank may have failed alone the last time; all publish together.
        stands = self._context.gather((self._version == version, self._engine.policy_version < 0))
        if not all(was_published for was_published, _ in stands) or not any(is_lost for _, is_lost in stands):
            if self._gathers_from_what_sleeps:
                with self.lease(self._cycle.publish.tags):
                    pass  # gathered while the shards are there; in the next phase they are not
            return
        self._invalidate()
        try:
            self.update_weights(version)
        finally:
            self._version = version

    @property
    def _gathers_from_what_sleeps(self) -> bool:
        """Whether an embedded engine has no weights now, and would gather them when the actor's shards have left."""
        is_embedded = self._config.rollout.placement == "embedded" and ENGINE_WEIGHTS in self.movable
        return is_embedded and ACTOR in self.movable and ENGINE_WEIGHTS not in self.leases.awake

    @dispatch(split="items", collect="concat")
    def demonstrations(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Score the dataset's own completions of this rank's prompts."""
        return self._demonstrations.run(tasks, call)

    # --------------------------------------------------------------------------------------------- samples as text

    @dispatch(split="groups", collect="leader", objects=True)
    def log_samples(
        self, batch: Batch, step: int, folder: Path, first: tuple[int, int], eval_set: str | None = None
    ) -> None:
        """Append this rank's samples to its file in the run folder; samples that cannot be written now wait. first:
        the smallest group and trajectory of the step. eval_set: of an evaluation, whose samples have their own file."""
        context = self._context
        if not context.is_data_leader:
            return
        name = "samples" if eval_set is None else "eval-samples"
        name += ".jsonl" if context.num_data_ranks == 1 else f"-rank{context.data_rank}.jsonl"
        file = self._samples.setdefault(folder / name, JsonLines(folder / name))
        if eval_set is not None:
            file.write(sample_records(step, batch, self._rewards.names, first, eval_set=eval_set))
            return
        values = token_records(batch, self._tokenizer, self._actor.said, NUM_SHOWN // context.num_data_ranks)
        file.write(sample_records(step, batch, self._reward_names, first, values))

    @dispatch(split="groups", collect="all", objects=True)
    def answers(self, batch: Batch) -> list[tuple[SampleKey, str | None]]:
        """Return what a reward function extracted from each of this rank's samples, of those that have it."""
        return extracted_answers(batch)

    @property
    def _reward_names(self) -> Sequence[str]:
        demonstrates = Needs.DEMONSTRATIONS in self._config.advantage.needs
        return [DEMONSTRATION] if demonstrates else self._rewards.names

    @dispatch(split="groups", collect="all", objects=True)
    def records(self, batch: Batch, step: int, first: tuple[int, int]) -> list[dict[str, Any]]:
        """Return the records of this rank's samples, as `log_samples` writes them."""
        return sample_records(step, batch, self._reward_names, first) if self._context.is_data_leader else []

    @dispatch(collect="all")
    def flush_samples(self) -> list[Path]:
        """Write the samples that wait. Returns the files for which that fails."""
        return [file.path for file in self._samples.values() if not file.flush()]

    @dispatch(split="groups", collect="leader", objects=True)
    def save_rollout(self, batch: Batch, step: int, folder: Path) -> None:
        """Write this rank's samples so that they can be replayed. Raises StorageError, also if the run folder is gone:
        the folder of a disk that is not mounted must not be made again."""
        if not folder.parent.is_dir():
            raise StorageError(f"cannot write {folder}: {folder.parent} is gone")
        if self._context.is_data_leader:
            save_rollout(folder, step, self._context.data_rank, self._context.num_data_ranks, batch)

    def arena_bytes(self) -> int | None:
        """Return bytes of host memory in which residents of this rank wait; None if memory.offload names none."""
        return self._memory.arena_bytes

    def close(self) -> None:
        """Stop scoring and generating. Modules that the user has passed get their weights back."""
        self._stream.close()
        self._rewards.close()
        self._wake_what_is_the_users(make_room=self._side.close)
        self._side.close()
        self._memory.close()
        self._leave_what_is_the_users(self._actor.model.module)

    def _leave_what_is_the_users(self, model: PreTrainedModel | ModelRecipe) -> None:
        """Give back a module that the user has passed: with its weights, and without adapters that learned nothing."""
        self._wake_what_is_the_users()
        if isinstance(model, PreTrainedModel) and self._is_live and ACTOR not in self.movable - self.leases.awake:
            leave(model)
            leave_grid(model)

    def _wake_what_is_the_users(self, make_room: Callable[[], None] = lambda: None) -> None:
        """Bring back the weights of modules that the user has passed, which outlive this worker: also if memory is
        broken, because they wait in the arena unharmed. make_room: what may be done for it then."""
        sleeping = {ACTOR, REWARD_MODELS} & self.movable - self.leases.awake
        if not self._is_live or not sleeping:
            return
        try:
            with suppress(Exception), self.lease(frozenset(sleeping | ({ACTOR, REWARD_MODELS} & self.leases.awake))):
                return
            with suppress(Exception):
                make_room()
            self.leases.rescue(sleeping)
        except Exception as error:
            logger.warning(
                "the weights of %s stay in host memory (%s: %s): the modules that were passed cannot be used; load "
                "them again from a checkpoint",
                *(" and ".join(sorted(sleeping)), type(error).__name__, error),
            )
