"""What every attention backend must do: the same numbers as softmax attention written out, with and without shared
prompts, and the same gradients. For any device: tests on a CPU and on CUDA machines both call `check_backend`."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rl.models.attention.attention_function import AttentionContext, AttentionOptions
from hybrid_rl.models.attention.backends import AttentionNeeds, choose_backend, obstacles
from hybrid_rl.models.row import Layout

HEAD_DIM = 16
LAYOUTS = {
    "one sequence": Layout((9,)),
    "ragged": Layout((40, 3, 1, 70, 35)),
    "one group": Layout((33,), (5, 1, 12), (0, 0, 0)),
    "groups of several sizes": Layout((40, 1, 64), (3, 9, 2, 2, 50, 7), (0, 0, 1, 1, 2, 2)),
    "groups beside single samples": Layout((35, 6, 20, 4), (3, 8, 1, 40), (0, 0, 1, 1)),
    "equal lengths": Layout((64, 64), (16, 16, 16, 16), (0, 0, 1, 1)),
    "a long prompt beside a long completion": Layout((1, 60), (59, 2), (0, 1)),
    "a child of its own": Layout((10, 12), (4, 4), (0, 1)),
    "a prefix of single samples": Layout((9, 1, 30), prefix=5),
    "a prefix of groups and single samples": Layout((35, 1, 20, 4), (3, 8, 1, 40), (0, 0, 1, 1), prefix=37),
}
OPTIONS = {
    "plain": AttentionOptions(),
    "scale": AttentionOptions(scale=0.7),
    "window within completions": AttentionOptions(window=2),
    "window into the prompt": AttentionOptions(window=11),
    "window over everything": AttentionOptions(window=1000),
}
SOFTCAP = {
    "softcap": AttentionOptions(softcap=1.3),
    "all": AttentionOptions(scale=0.7, window=11, softcap=1.3),
}
# Relative to the largest number of the tensor. fp32: sums of some 100 products in two orders. bf16 keeps 8 bits: inputs
# are exact, but probabilities, the outputs of both parts and (in the backward pass) the score gradients are rounded.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 8e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def visible_keys(layout: Layout, window: int | None) -> Tensor:
    """Which tokens of a row each of them sees, bool [T, T], from the definition."""
    segment = torch.arange(len(layout.lengths)).repeat_interleave(torch.tensor(layout.lengths))
    first = 1 if layout.prefix else 0
    parent = torch.tensor([-1] * (first + len(layout.roots)) + [first + root for root in layout.parents])
    position, place = layout.positions(), torch.arange(layout.num_tokens)
    same = (segment[:, None] == segment) & (place[:, None] >= place)
    visible = (
        same | (parent[segment][:, None] == segment) | ((place >= layout.prefix)[:, None] & (place < layout.prefix))
    )
    return visible if window is None else visible & (position[:, None] - position < window)


def eager(query: Tensor, key: Tensor, value: Tensor, layout: Layout, options: AttentionOptions) -> Tensor:
    """Softmax attention written out, over all pairs of tokens."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeat, 1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    hidden = ~visible_keys(layout, options.window).to(query.device)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def inputs(
    layout: Layout, dtype: torch.dtype, *, num_heads: int = 4, num_key_value_heads: int = 2, head_dim: int = HEAD_DIM
) -> list[Tensor]:
    """Query, key and value of a row, as values that the dtype holds, strided as a model's layers hand them over."""
    torch.manual_seed(layout.num_tokens)
    heads = (num_heads, num_key_value_heads, num_key_value_heads)
    rows = [torch.randn(count, layout.num_tokens, head_dim, dtype=torch.float64) for count in heads]
    return [(1.5 * row).to(dtype).transpose(0, 1) for row in rows]


def check_context(
    context: AttentionContext, layout: Layout, options: AttentionOptions, device: str, dtype: torch.dtype, **shape: int
) -> None:
    """Output and gradients of one row agree with eager attention in float64."""
    rows = inputs(layout, dtype, **shape)
    mine = [row.to(device).requires_grad_() for row in rows]
    exact = [row.double().requires_grad_() for row in rows]
    out = context.attend(0, *mine, options)
    expected = eager(*exact, layout, options)
    assert out.dtype == dtype and out.device.type == torch.device(device).type
    direction = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(out, mine, direction.to(device))
    reference = torch.autograd.grad(expected, exact, direction.double())
    names = ("output", "d query", "d key", "d value")
    for name, got, want in zip(names, (out, *gradients), (expected.detach(), *reference), strict=True):
        gap = float((got.detach().cpu().double() - want).abs().max() / want.abs().max())
        assert gap <= TOLERANCES[dtype], f"{name} is off by {gap:.2e} of its largest number ({layout}, {options})"


def check_backend(backend: str, device: str, dtype: torch.dtype, key_heads: tuple[int, ...] = (1, 2, 4)) -> None:
    """Everything that is asked of a backend, on one device and dtype. Raises ConfigError where it does not run here."""
    for softcap in (None, 1.3):
        needs = AttentionNeeds(torch.device(device), dtype, HEAD_DIM, softcap)
        if softcap is not None and obstacles(backend, needs):
            continue  # it has no soft-capping, and says so
        chosen = choose_backend(backend, needs)
        for layout in LAYOUTS.values():
            for options in (OPTIONS if softcap is None else SOFTCAP).values():
                for num_key_value_heads in key_heads:
                    context = chosen.context(layout, device)
                    check_context(context, layout, options, device, dtype, num_key_value_heads=num_key_value_heads)
