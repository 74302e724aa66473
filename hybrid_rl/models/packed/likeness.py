"""The check that a module built from a live module's class and config computes the same.

Class and config do not hold what a user changed on the live module besides its weights (an activation, a scale, a
buffer, a hook): copies in other processes would silently be of another model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.errors import ModelError
from hybrid_rl.models.packed.causal_lm import CausalLM
from hybrid_rl.models.packed.startup_check import various_tokens

NUM_TOKENS = 16
# Two orders of summation, on logprobs of a few nats.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}


@torch.no_grad()
def fingerprint(module: PreTrainedModel) -> list[float]:
    """Return ln p of some tokens under the module's own forward."""
    was_training = module.training
    module.eval()
    try:
        tokens = various_tokens(module, NUM_TOKENS).to(module.device)
        logits: Tensor = module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    finally:
        module.train(was_training)
    logprobs: list[float] = torch.log_softmax(logits.float(), -1).gather(1, tokens[1:, None])[:, 0].tolist()
    return logprobs


@torch.no_grad()
def check_fingerprint(model: CausalLM, expected: list[float]) -> None:
    """Raise ModelError if a copy gives other logprobs than the live module, whose are `expected`. Collective if
    it is sharded."""
    tokens = various_tokens(model.module, NUM_TOKENS).to(model.device)
    targets = torch.arange(1, len(tokens), device=model.device)
    logprobs, _ = model.packed_logprobs(tokens, [len(tokens)], targets, 1.0)
    gap = float((logprobs.cpu() - torch.tensor(expected)).abs().max())
    if not gap <= TOLERANCE.get(model.dtype, 1e-4):
        raise ModelError(
            f"the {type(model.module).__name__} built from the module's class and config gives other logprobs than the "
            f"module (by {gap:.2g}): something other than its weights and config was changed, such as an activation, "
            f"a buffer or a hook, and would be lost on the ranks; use num_ranks=1, or put it into a class of its own"
        )
