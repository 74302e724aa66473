"""Frozen models: the reference (the policy as it was before training, for KL terms) and the teacher of a
distillation."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import MemoryConfig, TrainerConfig
from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.memory.cycle import REFERENCE
from hybrid_rl.memory.shortage import Halvings
from hybrid_rl.models import CausalLM
from hybrid_rl.models.grid_linear import leave_grid
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.training.batch_plan import Plan, PlanSpec
from hybrid_rl.training.scoring import batch_logprobs
from hybrid_rl.training.sharding.build import build_model
from hybrid_rl.weights.boxes import local_tensor
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.setup import WorkerSetup
from hybrid_rl.workers.trainer_memory import TrainerMemory


class Reference:
    """A frozen copy of a model: of a module in this process, or built from the recipe."""

    def __init__(self, model: PreTrainedModel | ModelRecipe, config: TrainerConfig, context: RankContext) -> None:
        if isinstance(model, PreTrainedModel):
            model = copy.deepcopy(model).requires_grad_(False)
            leave_grid(model)
        self._is_of(build_model(model, config, context, is_trained=False), context)

    @classmethod
    def of_policy(cls, policy: CausalLM, context: RankContext) -> Reference:
        """Make the reference that is the policy without its adapters."""
        reference = cls.__new__(cls)
        reference._is_of(policy.without_adapters(), context)
        return reference

    def _is_of(self, model: CausalLM, context: RankContext) -> None:
        self.model = model
        self._halvings = Halvings(is_alone=context.num_ranks == 1)

    def logprobs(self, batch: Batch, plan: Plan, *, is_teacher: bool = False) -> Jagged:
        """Compute ln p of the completion tokens under this model, at the temperature that they were sampled at.
        is_teacher: it chooses its experts itself, whatever is recorded of the policy's. Collective if there are several
        ranks."""
        micro_batches = [micro for mini in plan for micro in mini]
        return batch_logprobs(self.model, batch, micro_batches, self._halvings, follows_policy=not is_teacher)

    @torch.no_grad()
    def take(self, policy: CausalLM, share: float = 1.0) -> None:
        """Copy the policy's present weights into this model's memory; both are sharded in the same way. share: of
        the policy in the new reference, the rest is the old one's: (1 - share) * old + share * policy (TRL's
        SyncRefModelCallback), in the wider dtype of the two."""
        theirs = dict(policy.module.named_parameters())
        for name, parameter in self.model.module.named_parameters():
            mine, source = local_tensor(parameter), local_tensor(theirs[name])
            if share < 1:
                wide = torch.promote_types(mine.dtype, source.dtype)
                source = mine.to(wide) * (1 - share) + source.to(wide) * share
            mine.copy_(source)


class ReferenceWorker(WorkerBase):
    """One rank of a pool that holds nothing but the reference model."""

    def __init__(self, setup: WorkerSetup, context: RankContext) -> None:
        super().__init__(context)
        self._plan = PlanSpec.of(setup.config)
        self._reference = Reference(setup.model, setup.config, context)
        # There is nothing else on these ranks that could have its room.
        config = replace(setup.config, memory=MemoryConfig())
        self.hold(TrainerMemory(config, context).models(REFERENCE, [self._reference.model]))

    @dispatch(split="groups", collect="concat", needs=frozenset({REFERENCE}))
    def score(self, batch: Batch, step: int) -> Batch:
        """Add ref_logprobs."""
        plan = self._plan.plan(batch, step, self._context, self._reference.model.device)
        return batch.with_columns(ref_logprobs=self._reference.logprobs(batch, plan))
