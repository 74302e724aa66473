"""Log-probability and entropy of given tokens from hidden states, without ever holding all logits.

Chunks of rows: logits exist for one chunk at a time, in the forward and again in the backward pass. If tensor cores
multiply, Triton kernels do the same without writing logits to memory at all (`triton_logprobs.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.wide import wide_product, wide_weight_gradient
from hybrid_rl.models.linear import exact_product, product, weight_gradient

CHUNK_ELEMENTS = 1 << 24  # logits held at once: 64 MiB in fp32
_logger = logging.getLogger("hybrid_rl")


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> Tensor:
    """Compute logits, float32 (float64 for float64 input) [M, V]. hidden: [M, H]; weight: [V, H]; bias: [V] or None."""
    if options.is_exact:
        logits = exact_product(hidden, weight, bias, in_float32=_is_wide(weight, options))
    else:
        logits = wide_product(hidden, weight, bias) if _is_wide(weight, options) else product(hidden, weight, bias)
    logits = logits.to(precise(logits))
    if options.scale != 1.0:
        logits = logits * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits


def head_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_of: Callable[[slice], tuple[Tensor, Tensor | None]],
    temperature: float,
    options: HeadOptions,
    wants: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of hidden [M, H], weight [V, H] and bias [V], in their dtypes, by chunks of rows; None for
    those that are not wanted: a frozen head has none, and its gradient would be as large as itself.

    gradient_of: gives for some of the M rows the gradient of logits / temperature, float32 (float64 for float64 input)
    [rows, V], and those logits, which are needed if they are soft-capped. wants: of the three, as in needs_input_grad.
    """
    wants_hidden, wants_weight, wants_bias = wants[:3]
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    # The head's gradient is summed over chunks: in fp32, whatever the parameters are.
    grad_weight: Tensor | None = None
    grad_bias = torch.zeros_like(bias, dtype=precise(weight)) if bias is not None and wants_bias else None
    multiply, gradient = (
        (wide_product, wide_weight_gradient) if _is_wide(weight, options) else (product, weight_gradient)
    )
    for rows in chunks(hidden.shape[0], weight.shape[0]):
        grad, logits = gradient_of(rows)
        if temperature != 1.0:
            grad = grad / temperature
        if options.softcap is not None:
            assert logits is not None
            grad = grad * (1 - (logits / options.softcap) ** 2)
        if options.scale != 1.0:
            grad = grad * options.scale
        if not _is_wide(weight, options):
            grad = grad.to(weight.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = multiply(grad, weight.t())
        if wants_weight:
            share = gradient(grad, hidden[rows]).to(precise(weight))
            grad_weight = share if grad_weight is None else grad_weight.add_(share)
        if grad_bias is not None:
            grad_bias += grad.sum(0)
    if wants_weight and grad_weight is None:  # there were no rows
        grad_weight = torch.zeros_like(weight)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(weight.dtype),
    )


def precise(tensor: Tensor) -> torch.dtype:
    """Return the dtype to sum in: float64 for float64, float32 for anything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _is_wide(weight: Tensor, options: HeadOptions) -> bool:
    return options.in_float32 and weight.dtype == torch.bfloat16


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Compute ln p(label) and entropy (nats) of softmax(logits / temperature).

    hidden: [M, H]; weight: [V, H]; labels: int64 [M]. Returns two float32 (float64 for float64 input) tensors [M]; both
    are differentiable in hidden, weight and bias.
    """
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels must be [{hidden.shape[0]}], not {tuple(labels.shape)}")
    if runs_in_triton(hidden.device, hidden.dtype):
        from hybrid_rl.models.heads.triton_logprobs import linear_logprobs  # imports Triton, which a CPU may lack

        return linear_logprobs(hidden, weight, bias, labels, temperature, options)
    return chunked_logprobs(hidden, weight, bias, labels, temperature, options)


def logit_logprobs(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ln p(label), entropy (nats) and ln sum exp of softmax(logits / temperature) by the compiled operator,
    float32 [M] each, of which none depends on the other rows. logits: float32 [M, V] on a CPU; labels: int64 [M].

    The temperature is rounded to float32 first: engines hold it so.
    """
    inverse = 1 / float(np.float32(temperature))
    results: tuple[Tensor, Tensor, Tensor] = native.built_operator("label_logprobs")(
        logits.contiguous(), labels.contiguous(), inverse
    )
    return results


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    options: HeadOptions,
    *,
    device_type: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` in chunks, on any device. device_type: that is planned for, of a model on meta."""
    apply: Any = _TokenLogprobs.apply
    fused = _fused(device_type or hidden.device.type, hidden, options)
    logprobs, entropy = apply(hidden, weight, bias, labels, temperature, options, fused)
    return logprobs, entropy


@functools.cache
def runs_in_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels take the head: bfloat16 and float16 on CUDA from Ampere on, for its tensor cores.

    float32 stays in chunks: outside of tensor cores the libraries of PyTorch multiply faster than Triton does.
    """
    why = None
    if device.type != "cuda":
        why = f"on {device.type}"
    elif dtype not in (torch.bfloat16, torch.float16):
        why = f"in {dtype}"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        why = "before Ampere"
    elif importlib.util.find_spec("triton") is None:
        why = "without Triton"
    how = "by fused Triton kernels" if why is None else f"in chunks of rows ({why})"
    _logger.debug("logprobs of the head on %s are computed %s", device, how)
    return why is None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        options: HeadOptions,
        fused: tuple[Callable[..., Any], Callable[..., Any]] | None,
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for rows in chunks(hidden.shape[0], weight.shape[0]):
            if fused is not None or options.is_exact:
                logits = head_logits(hidden[rows], weight, bias, options)
                parts.append(logit_logprobs(logits, labels[rows], temperature))
            else:
                log_p = _log_softmax(hidden[rows], weight, bias, temperature, options)[0]
                logprobs = log_p.gather(1, labels[rows, None])[:, 0]
                parts.append((logprobs, -(log_p.exp() * finite_(log_p)).sum(1), logprobs))
        logprobs, entropy, log_sums = (
            (torch.cat(part) for part in zip(*parts, strict=True))
            if parts
            else (hidden.new_zeros(0, dtype=precise(hidden)) for _ in range(3))
        )
        ctx.save_for_backward(hidden, weight, bias, labels, *([] if fused is None else [entropy, log_sums]))
        ctx.temperature, ctx.options, ctx.fused = temperature, options, fused
        # None says that the entropy takes no part in a loss; looking for zeros would wait for the device.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logprobs, grad_entropy = grads
        hidden, weight, bias, labels, *about = ctx.saved_tensors
        options: HeadOptions = ctx.options
        if grad_logprobs is None:
            if grad_entropy is None:
                return (None,) * 7
            grad_logprobs = torch.zeros_like(grad_entropy)
        if (fused := ctx.fused) is not None:
            entropy, log_sums = about
            ups = grad_logprobs.contiguous()
            entropy_ups = torch.zeros_like(entropy) if grad_entropy is None else grad_entropy.contiguous()

            def gradient_in_place(rows: slice) -> tuple[Tensor, None]:
                logits = head_logits(hidden[rows], weight, bias, options).contiguous()
                sums = (log_sums[rows], entropy[rows], ups[rows], entropy_ups[rows])
                fused[1](logits, labels[rows], *sums, 1 / ctx.temperature)
                return logits, None  # for which the temperature is done

            gradients = head_backward(hidden, weight, bias, gradient_in_place, 1.0, options, ctx.needs_input_grad)
            return *gradients, None, None, None, None

        def gradient_of(rows: slice) -> tuple[Tensor, Tensor]:
            log_p, logits = _log_softmax(hidden[rows], weight, bias, ctx.temperature, options)
            p = log_p.exp()
            # d ln p_label / dz = onehot - p; d entropy / dz = -p (ln p + entropy)
            grad = -p * grad_logprobs[rows, None]
            grad.scatter_add_(1, labels[rows, None], grad_logprobs[rows, None])
            if grad_entropy is not None:
                entropy = -(p * finite_(log_p)).sum(1, keepdim=True)
                grad -= p * (log_p + entropy) * grad_entropy[rows, None]
            return grad, logits

        gradients = head_backward(hidden, weight, bias, gradient_of, ctx.temperature, options, ctx.needs_input_grad)
        return *gradients, None, None, None, None


def _fused(
    device_type: str, hidden: Tensor, options: HeadOptions
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the compiled operators (csrc/fused.cpp) that read logits once and turn them into their gradient in place;
    None where PyTorch's operators compute: on a GPU, in float64, and for a head that scales or caps its logits."""
    if device_type != "cpu" or hidden.dtype == torch.float64 or options.softcap is not None:
        return None
    operators = (native.operator("label_logprobs"), native.operator("label_logprobs_backward"))
    if options.scale != 1.0 or operators[0] is None or operators[1] is None:
        return None
    return operators[0], operators[1]


def finite_(log_p: Tensor) -> Tensor:
    """Replace -inf by the least float, in place: a token that a head excludes has 0 ln 0 = 0 in an entropy, not NaN."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    logits = head_logits(hidden, weight, bias, options)
    return torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=1), logits


def chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Cut the rows of [num_rows, num_columns] into slices of at most CHUNK_ELEMENTS numbers, and at least one row."""
    size = max(1, CHUNK_ELEMENTS // max(num_columns, 1))
    return (slice(start, start + size) for start in range(0, num_rows, size))
