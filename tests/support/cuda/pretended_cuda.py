"""A CUDA device without a GPU: tensors on it have shape, dtype and device, but no numbers.

Tensors of the host stay real, so code that lays out a micro-batch runs as always. What PyTorch refuses on a GPU it
refuses here too: an operation on tensors of two devices, for one. Whatever would make the host wait for the device is
counted, with the line of the library that asked for it, and answered with a stand-in value.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map

import hybrid_rl

CUDA = torch.device("cuda", 0)
PACKAGE = str(Path(hybrid_rl.__file__).parent) + os.sep
_aten: Any = torch.ops.aten
# Operators whose result has a shape that only the values know: the host waits for it, whatever is done with it.
_SHAPED_BY_VALUES = {_aten.nonzero.default, _aten.masked_select.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._unsafe_index.Tensor}
_READS_A_NUMBER = {_aten._local_scalar_dense.default, _aten.item.default, _aten.equal.default}


class PretendedCuda(FakeTensorMode):
    """Inside the block there is a device "cuda". Counted by the line of the library that is behind it: reads, how often
    the host waited for the device; uploads, how often it sent tensors there; pageable, those of them from memory that
    is not pinned. launches: operators that ran on it, views apart."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=False)
        self.reads: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.pageable: Counter[str] = Counter()
        self.launches = 0
        self._pinned: dict[int, Tensor] = {}

    @property
    def avoid_device_init(self) -> bool:
        """Never start CUDA, on a build of PyTorch that knows it either."""
        return True

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator: on real tensors as it is, on tensors of the device without numbers."""
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = dict(kwargs or {})
        if _is(kwargs.get("device"), "meta"):  # what autograd takes the device for
            kwargs["device"] = CUDA
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        goes_there = _is(kwargs.get("device"), "cuda")
        if not goes_there and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._on_host(func, args, kwargs)
        on_device = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        self.launches += bool(on_device) and not func.is_view
        if func in (_aten.copy_.default, _aten._to_copy.default):
            target, source = tensors[0], tensors[-1]
            if goes_there or (func is _aten.copy_.default and target.device.type == "cuda"):
                self._count(self.uploads, source.device.type == "cpu")
                self._count(self.pageable, source.device.type == "cpu" and not self._is_pinned(source))
            elif func is _aten.copy_.default and not isinstance(target, FakeTensor):
                self._count(self.reads, not (_asynchronous(args, kwargs) and self._is_pinned(target)))
                return target.fill_(1)
            elif kwargs.get("device") is not None:
                self._count(self.reads, source.device.type == "cuda")
        if func in _SHAPED_BY_VALUES:
            self._count(self.reads, bool(on_device))
            full = tensors[0].numel()
            shape = (full, tensors[0].dim()) if func is _aten.nonzero.default else (full,)
            dtype = torch.int64 if func is _aten.nonzero.default else tensors[0].dtype
            return super().dispatch(_aten.empty.memory_format, (), (shape,), {"dtype": dtype, "device": CUDA})
        if func in _INDEXING:
            args = self._without_masks(args)
        if func in _READS_A_NUMBER:
            self._count(self.reads, bool(on_device))
            return True if tensors[0].dtype == torch.bool or func is _aten.equal.default else _one(tensors[0].dtype)
        real = {id(tensor) for tensor in tensors if not isinstance(tensor, FakeTensor)}

        def fake(value: Any) -> Any:
            return self.from_tensor(value) if isinstance(value, Tensor) and id(value) in real else value

        args, kwargs = tree_map(fake, (tuple(args), kwargs))
        return super().dispatch(func, types, args, kwargs)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        found = func(*args, **{**kwargs, "pin_memory": False})
        self._pinned[found.untyped_storage().data_ptr()] = found  # kept, so that nothing else gets its address
        return found

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def forget(self) -> None:
        """Count from zero."""
        for counter in (self.reads, self.uploads, self.pageable):
            counter.clear()
        self.launches = 0

    def synchronize(self) -> None:
        """Stands for `torch.cuda.Stream.synchronize`."""
        self._count(self.reads, True)

    def _without_masks(self, args: Sequence[Any]) -> Sequence[Any]:
        """A bool index waits for the number of places that it names; here it names all of them."""
        own, indices, *rest = args
        found = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8) and isinstance(index, FakeTensor):
                self._count(self.reads, index.device.type == "cuda")
                size = (index.numel(),)
                empty = {"dtype": torch.int64, "device": index.device}
                found += [super().dispatch(_aten.empty.memory_format, (), (size,), empty)] * index.dim()
            else:
                found.append(index)
        return (own, found, *rest)

    def _count(self, counter: Counter[str], applies: bool) -> None:
        if applies:
            counter[_line()] += 1


def _one(dtype: torch.dtype) -> int | float:
    return 1.0 if dtype.is_floating_point else 1


def _asynchronous(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))


def _is(device: Any, kind: str) -> bool:
    return device is not None and torch.device(device).type == kind


def _line() -> str:
    """The innermost line of the library on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(PACKAGE):
            return f"{frame.filename.removeprefix(PACKAGE)}: {frame.line}"
    return "outside of the library"


@contextmanager
def pretended_cuda() -> Iterator[PretendedCuda]:
    """A device "cuda" inside the block. Skips the test if this build of PyTorch cannot be given one."""
    with pytest.MonkeyPatch.context() as patch, _device_guard(), PretendedCuda() as mode:
        patch.setattr(Tensor, "backward", lambda self: backward(self))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: mode)
        yield mode


def to_cuda(module: nn.Module) -> None:
    """Move a real module to the pretended device."""
    moved: dict[int, Tensor] = {}  # tied parameters stay tied
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                new = nn.Parameter(parameter.detach().to(CUDA), requires_grad=parameter.requires_grad)
                child._parameters[name] = moved.setdefault(id(parameter), new)  # type: ignore[assignment]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(CUDA)


def backward(loss: Tensor) -> None:
    """What `loss.backward()` does. PyTorch's own engine asks the driver for streams; this one walks the same graph."""
    grads: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    assert loss.grad_fn is not None
    grads[loss.grad_fn][0] = torch.ones_like(loss)
    for node in _from_the_end(loss.grad_fn):
        given = grads.pop(node, {})
        if not given:
            continue
        if hasattr(node, "variable"):
            own = node.variable
            own.grad = given[0].detach() if own.grad is None else own.grad + given[0].detach()
            continue
        for grad, (following, number) in zip(*_call(node, given), strict=True):
            if grad is not None and following is not None:
                grad = _fitting(grad, following._input_metadata[number])
                before = grads[following].get(number)
                grads[following][number] = grad if before is None else before + grad


def _call(node: Any, given: Mapping[int, Tensor]) -> tuple[list[Any], list[Any]]:
    """What a node gives to those that follow it, and who they are."""
    metadata, following = node._input_metadata, list(node.next_functions)
    if not hasattr(node, "_forward_cls"):
        found = node(*(given.get(number) for number in range(len(metadata))))
        return list(found if isinstance(found, tuple) else (found,)), following
    # A function written in Python: it wants zeros for what nobody used, and has arguments that are no tensors.
    found = node.apply(
        *(
            given[number] if number in given else torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
            for number, meta in enumerate(metadata)
        )
    )
    found = found if isinstance(found, tuple) else (found,)
    kept = [grad for grad, is_wanted in zip(found, node.needs_input_grad, strict=True) if is_wanted]
    return kept, [edge for edge in following if edge[0] is not None]


def _fitting(grad: Tensor, wanted: Any) -> Tensor:
    """A gradient in the shape and dtype of what it belongs to; the engine, too, takes none of another device."""
    where = CUDA if wanted.device.type == "meta" else wanted.device
    assert grad.device == where, f"a gradient on {grad.device} for what lies on {where}"
    shape = tuple(wanted.shape)
    return (grad if tuple(grad.shape) == shape else grad.sum_to_size(shape)).to(wanted.dtype)


def _from_the_end(root: Any) -> list[Any]:
    """Nodes of a graph, each after all that give it a gradient."""
    waiting: Counter[Any] = Counter()
    seen, stack = {root}, [root]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                waiting[following] += 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    order, ready = [], [root]
    while ready:
        node = ready.pop()
        order.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)
    return order


@contextmanager
def _device_guard() -> Iterator[None]:
    """Autograd asks the guard of a device for its streams. A build without CUDA has none for it; the one of the meta
    device, which has no streams, answers instead."""
    libraries = Path(torch.__file__).parent / "lib"
    library = libraries / "libc10.so"
    if sys.platform != "linux" or not library.is_file():
        pytest.skip(f"a pretended CUDA device needs the guards of {library}, which is not there")
    guards = (ctypes.c_void_p * 22).in_dll(ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before = guards[cuda]
    guards[cuda] = guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before
