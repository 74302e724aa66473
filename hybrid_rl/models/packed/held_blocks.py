"""The inputs of a model's transformer blocks in one pass, repeated in another pass of the same tokens.

In 16 bits a real model's own forward is not the same twice. A token may be one rounding away from a massive activation
(Sun et al., 2024, arXiv:2402.17762): in SmolLM2 in bfloat16 one of 22,857 at the second token came or went with the
order of a sum, and the logits moved by 1.1 of the largest one. Whatever is compared after all blocks cannot tell that
from a wrong mask. If every block starts from equal numbers instead, rounding is not carried on: there the blocks of
SmolLM2 differ by 0.01 of what they add, and a wrong mask or position shows in the first block that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from hybrid_rl.compat.torch import tree_map
from hybrid_rl.errors import ModelError
from hybrid_rl.models.packed.repeated_layers import transformer_blocks

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a block
ROUNDINGS = 2  # of the residual stream, by the two sums of a block: units in the last place that may differ


class HeldBlocks:
    """What enters each block, recorded and repeated. Raises ModelError for a module whose blocks are not known."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._blocks = transformer_blocks(module)
        self._calls: list[list[Call]] = [[] for _ in self._blocks]  # of each block, one per pass
        self._entered: list[Tensor] = []  # per block, of all passes that were recorded: [tokens, ...]
        self._again: dict[int, Tensor] = {}  # what would have entered it in the second pass

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what enters the blocks inside the block, one pass after the other.

        Raises ModelError if they did not run once per pass each.
        """

        def keep(number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls[number].append((args, kwargs))

        with self._hooked(keep):
            yield
        if len({len(calls) for calls in self._calls}) != 1:
            raise ModelError(f"{type(self._module).__name__} does not run each of its blocks once per pass")
        self._entered = [torch.cat([by_token(entering(*call)) for call in calls]) for calls in self._calls]

    @contextmanager
    def repeating(self, own: Tensor) -> Iterator[None]:
        """Let every block start from what was recorded inside the block. own: int64 [T], for each token of the pass
        its place among all tokens of the passes that were recorded."""

        def replace(number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            now = entering(args, kwargs)
            self._again[number] = by_token(now)
            held = as_hidden(self._entered[number][own], now)
            return ((held, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": held})

        with self._hooked(replace):
            yield

    def gap(self, places: Tensor, own: Tensor, tolerance: float) -> float:
        """Return how far what left the blocks in the second pass is from what left them in the first, at these places
        of the second pass: the largest difference at a place, beyond the rounding of the residual stream, relative to
        the largest number that the block added there.

        A block that exceeds the tolerance is measured against its own noise: the difference of its output at that
        place from the one that it computes in float32.
        """
        largest, start = 0.0, self._entered[0][own[places]].float()
        for number, entered in enumerate(self._entered):
            then, now = entered[own[places]].float(), self._again[number][places].float()
            unit = torch.finfo(entered.dtype).eps
            excess = ((now - then).abs() - ROUNDINGS * unit * then.abs()).flatten(1).amax(1)
            added = (then - start if number else then).abs().flatten(1).amax(1).clamp(min=1e-6)
            gap = excess / added
            if number and bool((gap > tolerance).any()):
                gap = (excess - ROUNDINGS * self._noise(number - 1)[own[places]]) / added
            # NaN is no gap that passes.
            largest = float(gap.max()) if bool(gap.isnan().any()) else max(largest, float(gap.max()))
            if not largest <= tolerance:
                return largest
            start = then
        return largest

    def _noise(self, number: int) -> Tensor:
        """Return how far a block's own outputs are from those in float32 of the same inputs, float32 [tokens]."""
        block, outputs = self._blocks[number], []
        precise = {name: tensor.float() for name, tensor in block.state_dict().items() if tensor.is_floating_point()}
        for args, kwargs in self._calls[number]:
            own = block(*args, **kwargs)
            exact = functional_call(block, precise, tree_map(in_float32, args), tree_map(in_float32, kwargs))
            own, exact = (by_token(output[0] if isinstance(output, tuple) else output) for output in (own, exact))
            outputs.append((own.float() - exact).abs().flatten(1).amax(1))
        return torch.cat(outputs)

    @contextmanager
    def _hooked(self, hook: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for number, block in enumerate(self._blocks):
                handle = block.register_forward_pre_hook(partial(hook, number), with_kwargs=True)
                stack.callback(handle.remove)
            yield


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a block is called with, [..., B, L, H]."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def by_token(hidden: Tensor) -> Tensor:
    """Lay hidden states [..., B, L, H] out as [B * L, ..., H]; Gemma 3n has several streams in front."""
    streams = hidden.dim() - 3
    return hidden.permute(streams, streams + 1, *range(streams), -1).flatten(0, 1)


def as_hidden(tokens: Tensor, like: Tensor) -> Tensor:
    """Undo `by_token` for hidden states of the shape of `like`."""
    streams = like.dim() - 3
    spread = tokens.unflatten(0, like.shape[streams : streams + 2])
    return spread.permute(*range(2, streams + 2), 0, 1, -1)


def in_float32(value: Any) -> Any:
    """Return a tensor of floating-point numbers in float32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
