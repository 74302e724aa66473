"""Bytes of tensors on the meta device, followed from their making to their end."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hybrid_rl.compat.torch import TorchDispatchMode, storage_id, tree_leaves


@dataclass(frozen=True)
class Held:
    """Bytes at one moment. gradients: of parameters, complete ones; others: all else that was made since."""

    others: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.others + self.gradients


class LiveStorages(TorchDispatchMode):
    """Counts what operators make inside the block, on meta, while it is referred to by anybody.

    module: its parameters and buffers exist already, and their memory is not counted. Gradients are told apart from
    the moment at which they are complete.
    fullest: the moment of most bytes; most_others: of most bytes without the gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.fullest = self.most_others = self.now = Held()
        self._bytes: dict[int, int] = {}
        self._gradients: set[int] = set()
        self._known = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._hooks: list[Any] = []

    def __enter__(self) -> LiveStorages:
        self._hooks = [p.register_post_accumulate_grad_hook(self.count_gradient) for p in self._trained]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its results."""
        results = func(*args, **(kwargs or {}))
        self.count(tensor for tensor in tree_leaves(results) if isinstance(tensor, Tensor))
        return results

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors whose memory was not counted yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = storage_id(tensor)
            if tensor.device.type != "meta" or number in self._known or number in self._bytes:
                continue
            self._bytes[number] = storage.nbytes()
            weakref.finalize(storage, self._forget, number)
            self._change(others=storage.nbytes())

    def count_gradient(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter as one."""
        if parameter.grad is None:
            return
        self.count([parameter.grad])
        number = storage_id(parameter.grad)
        if number not in self._gradients and number in self._bytes:
            self._gradients.add(number)
            self._change(others=-self._bytes[number], gradients=self._bytes[number])

    def _forget(self, number: int) -> None:
        num_bytes = self._bytes.pop(number)
        if number in self._gradients:
            self._gradients.remove(number)
            self._change(gradients=-num_bytes)
        else:
            self._change(others=-num_bytes)

    def _change(self, others: int = 0, gradients: int = 0) -> None:
        self.now = now = Held(self.now.others + others, self.now.gradients + gradients)
        if now.total > self.fullest.total:
            self.fullest = now
        if now.others > self.most_others.others:
            self.most_others = now
