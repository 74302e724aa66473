"""The reference: the policy as it was before training, for KL terms."""

from __future__ import annotations

import copy

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.models import CausalLM
from hybrid_rl.workers.plan import Plan
from hybrid_rl.workers.step import batch_logprobs


class Reference:
    """A frozen copy of a model."""

    def __init__(self, model: CausalLM) -> None:
        self.model = CausalLM(copy.deepcopy(model.module).requires_grad_(False), model.attention.name)

    def logprobs(self, batch: Batch, plan: Plan, temperature: float) -> Jagged:
        """ln p of the completion tokens under the reference, at the policy's temperature."""
        return batch_logprobs(self.model, batch, [micro for mini in plan for micro in mini], temperature)
