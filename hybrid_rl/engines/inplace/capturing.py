"""What of a model's pass a CUDA graph can hold: forms of its layers that ask the host for nothing, and a watch for
those that do."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.compat.torch import TorchDispatchMode, tree_leaves
from hybrid_rl.compat.transformers import experts_of, rereading_rotaries
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.decoding import decoded_experts, groups_on_device

_TORCH = str(Path(torch.__file__).parent)
# Operators whose result, or its shape, the host waits for; what is made of other operators comes as those.
_READING = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim"),
    *("unique_consecutive", "grouped_mm_fallback"),
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


@contextmanager
def capturable(model: CausalLM) -> Iterator[None]:
    """Inside the block layers of the model take the forms that can be captured, with the same results up to rounding.
    No other thread may run the model meanwhile.

    Rotary embeddings that choose frequencies by the longest sequence stay with those they have: a pass before this one
    has chosen, and no sequence is longer than the choice holds for (`CausalLM.length_limit`). Experts that torch cannot
    group without the host are computed otherwise.
    """
    forms: list[tuple[nn.Module, str, Callable[..., Any]]] = [
        (rotary, "forward", inspect.unwrap(type(rotary).forward)) for rotary in rereading_rotaries(model.module)
    ]
    grouped = groups_on_device(model.dtype, model.device)
    forms += [
        (experts, "forward", decoded_experts)
        for experts, way in experts_of(model.module)
        if way == "eager" or (way == "grouped_mm" and not grouped)
    ]
    # transformers looks for padding, for a warning, in each pass that is not captured yet.
    forms.append((model.backbone, "warn_if_padding_and_no_attention_mask", _nothing))
    own = [(module, name, form) for module, name, form in forms if name not in vars(module)]
    for module, name, form in own:
        setattr(module, name, MethodType(form, module))
    try:
        yield
    finally:
        for module, name, _ in own:
            delattr(module, name)


def _nothing(*_: Any, **__: Any) -> None:
    return


class HostReads(TorchDispatchMode):
    """Watches operations of its thread for the first by which the host waits for a device, or sends it something: a
    capture would fail there, or hold what was sent for good. first: the operator and its line, None if there is none.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if it is such a one."""
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:  # in inference mode operators come whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if self.first is None and self._waits(func, args, kwargs):
            self.first = f"{func.name()} at {_line()}"
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        name, here = func.name().rpartition("::")[2].partition(".")[0], self._device.type
        if name in ("copy_", "_to_copy"):
            if kwargs.get("device") is not None:
                kinds.add(torch.device(kwargs["device"]).type)
            return here in kinds and len(kinds) > 1
        if here not in kinds:
            return False
        if name == "_grouped_mm":
            return not groups_on_device(tensors[0].dtype, self._device)
        if name in _INDEXING:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in _READING


def _line() -> str:
    """The innermost line on the stack that is not PyTorch's or this file's."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not frame.filename.startswith(_TORCH):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "an unknown line"
