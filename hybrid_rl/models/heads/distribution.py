"""Whole next-token distributions, for losses that need more of them than the sampled token.

All of this holds M x V numbers, M tokens times V entries of the vocabulary: 4096 tokens of a vocabulary of 151,936 take
2.5 GB in float32 (`logprobs.py` is for everything that can do without).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import chunks, head_backward, head_logits, logit_logprobs, precise


def token_distribution(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, options: HeadOptions
) -> Tensor:
    """Compute ln of softmax(logits / temperature): float32 (float64 for float64 input) [M, V].

    hidden: [M, H]; weight: [V, H]; bias: [V] or None. Differentiable in all three. Memory: the result, M x V, once; its
    gradient is as large again. Logits and products in between exist for one chunk of rows at a time.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [M, H] and weight [V, H], not {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} gives no distribution; use a number above 0")
    apply: Any = _Distribution.apply
    log_probs: Tensor = apply(hidden, weight, bias, temperature, options)
    return log_probs


def chosen_and_entropy(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ln p(label) and entropy (nats) of log_probs [M, V], [M] each; differentiable. labels: int64 [M].

    Memory: nothing of M x V in the forward pass; the gradient of log_probs in the backward pass.
    """
    if log_probs.dim() != 2 or labels.shape != log_probs.shape[:1]:
        raise ValueError(
            f"log_probs must be [M, V] and labels [M], not {tuple(log_probs.shape)}, {tuple(labels.shape)}"
        )
    apply: Any = _Entropy.apply
    entropy: Tensor = apply(log_probs)
    return log_probs.gather(1, labels[:, None])[:, 0], entropy


def top_tokens(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k most probable tokens of each row, best first: their ids, int64 [M, k], and ln p, [M, k],
    differentiable.

    log_probs: [M, V]. Which of equally probable tokens come first is left open.
    """
    if log_probs.dim() != 2 or not 1 <= k <= log_probs.shape[1]:
        raise ValueError(f"k={k} must be 1 to V, and log_probs [M, V], not {tuple(log_probs.shape)}")
    top = log_probs.topk(k, dim=1)
    return top.indices, top.values


def sum_of_squares(log_probs: Tensor) -> Tensor:
    """Sum over the vocabulary of p^2, [M], in 0..1: the probability that two draws agree. log_probs: [M, V].

    Memory: M x V once more while it is computed with gradient, one chunk of rows without.
    """
    if log_probs.dim() != 2:
        raise ValueError(f"log_probs must be [M, V], not {tuple(log_probs.shape)}")
    parts = [(2 * log_probs[rows]).exp().sum(1) for rows in chunks(*log_probs.shape)]
    return torch.cat(parts) if parts else log_probs.sum(1)


class _Distribution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, options: HeadOptions
    ) -> Tensor:
        log_probs = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=precise(hidden))
        for rows in chunks(*log_probs.shape):
            logits = head_logits(hidden[rows], weight, bias, options)
            if options.is_exact:
                labels = logits.new_zeros(logits.shape[0], dtype=torch.int64)
                log_sums = logit_logprobs(logits, labels, temperature)[2]
                inverse = float(np.float32(1 / float(np.float32(temperature))))
                log_probs[rows] = logits.double() * inverse - log_sums[:, None]
            else:
                log_probs[rows] = torch.log_softmax(logits / temperature, dim=1)
        ctx.save_for_backward(hidden, weight, bias, log_probs)
        ctx.temperature, ctx.options = temperature, options
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, log_probs = ctx.saved_tensors
        options: HeadOptions = ctx.options

        def gradient_of(rows: slice) -> tuple[Tensor, Tensor | None]:
            # d ln p_i / dz_j = [i = j] - p_j
            grad = grads[0][rows] - log_probs[rows].exp() * grads[0][rows].sum(1, keepdim=True)
            return grad, None if options.softcap is None else head_logits(hidden[rows], weight, bias, options)

        gradients = head_backward(hidden, weight, bias, gradient_of, ctx.temperature, options, ctx.needs_input_grad)
        return *gradients, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_probs: Tensor) -> Tensor:
        ctx.save_for_backward(log_probs)
        ctx.set_materialize_grads(False)
        parts = [-(log_probs[rows].exp() * _finite(log_probs[rows])).sum(1) for rows in chunks(*log_probs.shape)]
        return torch.cat(parts) if parts else log_probs.sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (log_probs,) = ctx.saved_tensors
        if grads[0] is None:
            return None
        grad = torch.empty_like(log_probs)
        for rows in chunks(*log_probs.shape):
            # d(-p ln p) / d ln p = -p (ln p + 1)
            grad[rows] = -log_probs[rows].exp() * (_finite(log_probs[rows]) + 1) * grads[0][rows, None]
        return grad


def _finite(log_probs: Tensor) -> Tensor:
    """Replace -inf by the least float: a token that a head excludes has 0 ln 0 = 0 in an entropy."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
