"""Bytes of tensors on the meta device, followed from their making to their end."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybrid_rl.compat.torch import TorchDispatchMode, storage_id, tree_leaves

Kind = Literal["others", "gradients", "gathered"]


@dataclass(frozen=True)
class Held:
    """Bytes at one moment. gradients: of parameters, complete ones; gathered: weights that sharded ranks have gathered;
    others: all else that was made since."""

    others: int = 0
    gradients: int = 0
    gathered: int = 0

    def extended(self, longer: Held, num_layers: int) -> Held:
        """Continue the line from this moment to that of a model with one more layer, for so many layers."""
        steps = {name: getattr(longer, name) - value for name, value in vars(self).items()}
        return Held(**{name: max(0, value + num_layers * steps[name]) for name, value in vars(self).items()})

    @property
    def total(self) -> int:
        """All bytes."""
        return self.others + self.gradients + self.gathered


@dataclass(frozen=True)
class Peaks:
    """The fullest moments of a part of a pass. fullest: of most bytes together; most_others: without gradients and
    gathered weights."""

    fullest: Held = Held()  # noqa: RUF009
    most_others: Held = Held()  # noqa: RUF009

    def with_moment(self, now: Held) -> Peaks:
        """Return the peaks after another moment."""
        fullest = now if now.total > self.fullest.total else self.fullest
        return Peaks(fullest, now if now.others > self.most_others.others else self.most_others)


class LiveStorages(TorchDispatchMode):
    """Counts what operators make inside the block, on meta, while it is referred to by anybody.

    module: its parameters and buffers exist already, and their memory is not counted; blocks: its layers, by which the
    parts of a pass are told apart. Gradients are told apart from the moment at which they are complete.
    peaks: by part of the pass: "forward", and the backward pass through each block: "0" and "1" are the first two,
    "-2" and "-1" the last two, "others" all between them. The backward pass of the head belongs to "forward", that of
    the embedding to "0".
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.now = Held()
        self.peaks: dict[str, Peaks] = {}
        self._part = "forward"
        self._blocks = blocks
        self._bytes: dict[int, int] = {}
        self._kinds: dict[int, Kind] = {}
        self._known = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._hooks: list[Any] = []

    def __enter__(self) -> LiveStorages:
        self._hooks = [p.register_post_accumulate_grad_hook(self.count_gradient) for p in self._trained]
        for number, block in enumerate(self._blocks):
            left = len(self._blocks) - number
            part = str(number) if number < 2 else str(-left) if left <= 2 else "others"
            self._hooks.append(block.register_forward_hook(self._begins(part)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its results."""
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return results

    def count(self, tensor: Tensor, kind: Kind = "others") -> None:
        """Count a tensor whose memory was not counted yet, or now as another kind."""
        number = storage_id(tensor)
        if tensor.device.type != "meta" or number in self._known:
            return
        if number not in self._bytes:
            storage = tensor.untyped_storage()
            self._bytes[number], self._kinds[number] = storage.nbytes(), kind
            weakref.finalize(storage, self._forget, number)
            self._change(kind, storage.nbytes())
        elif kind not in ("others", self._kinds[number]):
            self._change(self._kinds[number], -self._bytes[number])
            self._kinds[number] = kind
            self._change(kind, self._bytes[number])

    def count_gradient(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter as one."""
        if parameter.grad is not None:
            self.count(parameter.grad, "gradients")

    def new(self, num_bytes: int, kind: Kind) -> Tensor:
        """Make memory that is counted as this kind."""
        made = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        self.count(made, kind)
        return made

    def _forget(self, number: int) -> None:
        self._change(self._kinds.pop(number), -self._bytes.pop(number))

    def _change(self, kind: Kind, num_bytes: int) -> None:
        self.now = now = replace(self.now, **{kind: getattr(self.now, kind) + num_bytes})
        self.peaks[self._part] = self.peaks.get(self._part, Peaks()).with_moment(now)

    def _begins(self, part: str) -> Any:
        """Return a hook of a block, after whose output's gradient this part of the pass begins."""

        def begin(gradient: Tensor) -> None:
            self._part = part

        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(begin)

        return hook
