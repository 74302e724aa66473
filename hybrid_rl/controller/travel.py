"""Packing of objects for other processes: functions and closures by cloudpickle, handles separately."""

from __future__ import annotations

import functools
import inspect
import io
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from hybrid_rl.errors import ConfigError

MAX_DEPTH = 6
NUMPY_TYPES = frozenset({torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64})


def pack(value: Any, is_handle: Callable[[Any], bool], what: str) -> tuple[bytes, list[Any]]:
    """Return `value` as bytes, and the handles anywhere in it, which the transport must carry itself to know that they
    are in use. what: names the value in errors. Raises ConfigError naming the part that cannot be pickled.
    """
    if (script := sys.modules.get("__mp_main__")) is not None:
        # The name of the script in a process that multiprocessing has spawned; in others it would mean theirs.
        cloudpickle.register_pickle_by_value(script)
    stream = io.BytesIO()
    pickler = _Pickler(stream, is_handle)
    try:
        pickler.dump(value)
    except Exception as error:
        path, part, reason = _offender(value, is_handle, what) or (what, value, error)
        kind = type(part)
        if isinstance(value, functools.partial):
            # The user knows its arguments, not the function.
            path = path.removeprefix(f"{what}.args[0].")
        remedy = "make it inside the function" if " -> " in path else "make it where it is used"
        if kind.__module__ not in sys.stdlib_module_names:
            remedy += f", or define __reduce__ for {kind.__name__}"
        raise ConfigError(
            f"{path}: {'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__} cannot be sent to another "
            f"process ({reason}); {remedy}"
        ) from error
    return stream.getvalue(), pickler.handles


def unpack(data: bytes, handles: Sequence[Any]) -> Any:
    """Restore what `pack` packed. Raises ConfigError if one of its modules cannot be imported in this process."""
    try:
        return _Unpickler(io.BytesIO(data), handles).load()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error}, which is needed by an object sent to {socket.gethostname()}: install it on all nodes, or define "
            f"the object in the script or notebook itself, so that its code is sent along"
        ) from error


@dataclass(frozen=True)
class Driver:
    """Parts of the driver's process that modules may look at when a rank imports them. path: folders and archives in
    which modules are found, absolute; argv: the command line."""

    path: tuple[str, ...]
    argv: tuple[str, ...]

    @classmethod
    def here(cls) -> Driver:
        """Describe this process."""
        entries = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
        return cls(tuple(entry for entry in entries if os.path.exists(entry)), tuple(sys.argv))

    def adopt(self) -> None:
        """Find modules in this process where the driver does, after all that it finds already."""
        sys.path += [entry for entry in self.path if entry not in sys.path]
        sys.argv[:] = self.argv


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO, is_handle: Callable[[Any], bool]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.handles: list[Any] = []
        self._is_handle = is_handle
        self._places: dict[int, int] = {}

    def persistent_id(self, part: Any) -> int | None:
        if not self._is_handle(part):
            return None
        if id(part) not in self._places:
            self._places[id(part)] = len(self.handles)
            self.handles.append(part)
        return self._places[id(part)]

    def reducer_override(self, part: Any) -> Any:
        # PyTorch's own way costs 100 us for a tensor of a few bytes, and takes a view's whole storage along.
        if type(part) is Tensor and part.dtype in NUMPY_TYPES and _is_plain(part):
            return torch.from_numpy, (part.numpy(),)
        return super().reducer_override(part)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, handles: Sequence[Any]) -> None:
        super().__init__(stream)
        self._handles = handles

    def persistent_load(self, place: int) -> Any:
        return self._handles[place]


def _offender(
    value: Any, is_handle: Callable[[Any], bool], path: str, depth: int = 0
) -> tuple[str, Any, Exception] | None:
    """Find the deepest part that cannot be pickled by itself: its path, itself, and why; None if the value can be."""
    if is_handle(value):
        return None
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        if depth < MAX_DEPTH:
            for name, part in _parts(value):
                offender = _offender(part, is_handle, path + name, depth + 1)
                if offender is not None:
                    return offender
        return path, value, error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif inspect.isfunction(value):
        closure = inspect.getclosurevars(value)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(value).parameters.items()
            if parameter.default is not parameter.empty
        }
        used = {**defaults, **closure.globals, **closure.nonlocals}
        yield from ((f" (function {value.__name__}) -> {name}", part) for name, part in used.items())
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
