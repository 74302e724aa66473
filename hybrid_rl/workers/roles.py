"""Models of a rank other than the policy: reference, teacher and critic, each only if the algorithm needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.algos import KLInLoss, KLInReward
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config.algorithm import critic_path, reference_is_policy
from hybrid_rl.config.schema import TrainerConfig, ValueHeadConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.memory.cycle import CRITIC, CRITIC_OPTIMIZER, REFERENCE, TEACHER, Cycle, Phase
from hybrid_rl.memory.leases import Resident
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.saving import save_weights
from hybrid_rl.process.files import Sink
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import Plan
from hybrid_rl.training.critic import Critic
from hybrid_rl.training.optimizer import no_gradients_left
from hybrid_rl.training.skipped import SkippedUpdate
from hybrid_rl.weights.loading import load_weights
from hybrid_rl.weights.sources import FolderSource
from hybrid_rl.workers.reference import Reference
from hybrid_rl.workers.setup import WorkerSetup
from hybrid_rl.workers.trainer_memory import TrainerMemory

Scorer = Callable[[Batch, Plan], dict[str, Jagged]]

REFERENCE_FOLDER, CRITIC_FOLDER = "reference", "critic"


class Roles:
    """Reference, teacher and critic of a rank, as far as the run has them. hold: takes each resident as soon as it is
    built, so that those that leave are never in memory together. Collective."""

    def __init__(
        self,
        setup: WorkerSetup,
        context: RankContext,
        memory: TrainerMemory,
        hold: Callable[[Resident], None],
        policy: CausalLM,
    ) -> None:
        config = setup.config
        self._config, self._context = config, context
        self._reference = self._teacher = None
        if reference_is_policy(config):
            self._reference = Reference.of_policy(policy, context)
        elif setup.has_own_reference:
            self._reference = Reference(setup.model, config, context)
            hold(memory.models(REFERENCE, [self._reference.model]))
        if setup.teacher is not None:
            self._teacher = Reference(setup.teacher, config, context)
            hold(memory.models(TEACHER, [self._teacher.model]))
        self._critic: Critic | None = None
        if isinstance(config.critic, ValueHeadConfig):
            self._critic = Critic(
                setup.critic or setup.model,
                config,
                context,
                num_optimizer_steps=setup.num_critic_steps,
                options=config.critic,
            )
            self._critic.check(setup.tokenizer, setup.max_length)
            hold(memory.models(CRITIC, [self._critic.model]))
            hold(memory.optimizer(self._critic.optimizer, CRITIC_OPTIMIZER))

    @property
    def reference_model(self) -> CausalLM | None:
        """The reference on this rank."""
        return None if self._reference is None else self._reference.model

    def scorers(self, cycle: Cycle) -> Iterator[tuple[Phase, Scorer]]:
        """Yield what adds a column to a batch, with the phase in which it can: reference, teacher and critic, one after
        the other. Collective."""
        if (reference := self._reference) is not None:
            yield cycle.score_reference, lambda batch, plan: {"ref_logprobs": reference.logprobs(batch, plan)}
        if (teacher := self._teacher) is not None:
            yield (
                cycle.score_teacher,
                lambda batch, plan: {"teacher_logprobs": teacher.logprobs(batch, plan, is_teacher=True)},
            )
        if (critic := self._critic) is not None:
            yield cycle.score_critic, lambda batch, plan: {"values": critic.values(batch, plan)}

    def update_critic(self, batch: Batch, plan: Plan) -> MetricSums:
        """Take all optimizer steps of the critic in a training step. Collective."""
        assert self._critic is not None, "only a run with a critic has this phase"
        with no_gradients_left(self._critic.optimizer):
            return self._critic.update(batch, plan)

    @property
    def skipped_update(self) -> SkippedUpdate | None:
        """The last update of the critic that was skipped."""
        return None if self._critic is None else self._critic.skipped

    def reconfigure(self, config: TrainerConfig, num_critic_steps: int) -> None:
        """Go on with another configuration, as far as it may change between steps."""
        self._config = config
        if self._critic is not None and isinstance(config.critic, ValueHeadConfig):
            self._critic.reconfigure(config, num_critic_steps, config.critic)

    def is_warmup(self, step: int) -> bool:
        """Whether only the critic learns in this training step."""
        critic = self._config.critic
        return isinstance(critic, ValueHeadConfig) and step <= critic.critic_warmup_steps

    def after_update(self, actor: Actor, step: int) -> None:
        """If it is due, move the reference towards the policy (Trust Region DPO, arXiv:2404.09656), or make it equal to
        the policy, whose optimizer then starts afresh (ProRL, arXiv:2505.24864, section 3.3)."""
        kl = self._config.kl
        if not isinstance(kl, (KLInLoss, KLInReward)) or self._reference is None:
            return
        if kl.ref_model_sync_steps and step % kl.ref_model_sync_steps == 0:
            self._reference.take(actor.model, kl.ref_model_mixup_alpha)
        if kl.reference_reset_steps and step % kl.reference_reset_steps == 0:
            self._reference.take(actor.model)
            actor.optimizer.forget_moments()

    @property
    def _moved_reference(self) -> CausalLM | None:
        """The reference, if it is not the model as it was before training."""
        kl = self._config.kl
        return self.reference_model if isinstance(kl, (KLInLoss, KLInReward)) and kl.moves_reference else None

    # --------------------------------------------------------------------------------------------- checkpoints

    def save_models(self, folder: Path, base: Mapping[str, Any] | None, sink: Sink | None = None) -> None:
        """Write the models that a resumed run cannot build again into folders of the checkpoint. base: where the base
        of adapters is. sink: takes the tensors of each file instead of having them written. Collective."""
        is_writer = self._context.rank == 0
        if self._critic is not None:
            own = critic_path(self._config)
            self._critic.save_model(folder / CRITIC_FOLDER, base if own is None else {"path": own}, sink)
        if (model := self._moved_reference) is not None:
            save_weights(model.module, folder / REFERENCE_FOLDER, model.dtype, is_writer=is_writer, sink=sink)

    def saved_bytes(self) -> int:
        """Return the bytes of the files that `save_models` writes."""
        num_bytes = 0 if self._critic is None else self._critic.saved_bytes()
        if (model := self._moved_reference) is not None:
            num_bytes += sum(parameter.numel() for parameter in model.module.parameters()) * model.dtype.itemsize
        return num_bytes

    def optimizer_state(self) -> dict[str, Any]:
        """Return optimizer state of the roles by their folder in a checkpoint; tensors are the memory itself."""
        return {} if self._critic is None else {CRITIC_FOLDER: self._critic.optimizer_state()}

    def load_models(self, folder: Path) -> None:
        """Continue from a checkpoint's models; of the critic with its optimizer. Collective."""
        if self._critic is not None:
            self._critic.load(folder / CRITIC_FOLDER)
        if (model := self._moved_reference) is not None:
            try:
                load_weights(model.module, FolderSource(str(folder / REFERENCE_FOLDER)), model.device)
            except ModelError as error:
                raise CheckpointError(f"cannot resume from {folder}: {error}") from error
