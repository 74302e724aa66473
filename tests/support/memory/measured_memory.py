"""Bytes of live storages, counted exactly as operators make and free them: by resident, with the peak of every phase.

A dispatch mode sees every storage when an operator first makes or reads it, and a weak reference tells when it is gone:
what is counted is what tensors hold, neither pages of the process nor what an allocator keeps. What a kernel allocates
inside of itself and frees before it returns is not seen, and no other thread is.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybrid_rl.compat.torch import TorchDispatchMode, storage_id, tree_leaves
from tests.support.libraries.torch_names import is_traceable_wrapper_subclass, storage_number

QUIET_READS = 4
Residents = Callable[[], Mapping[str, Iterable[Tensor]]]


@dataclass
class Measured:
    """The fullest moment of a phase. peak_bytes: of all storages on the device. residents: bytes of each at that
    moment; the rest is transient. largest: of every resident its most bytes at any local peak, and at the end."""

    peak_bytes: int = 0
    residents: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)

    @property
    def transient_bytes(self) -> int:
        return self.peak_bytes - sum(self.residents.values())

    def joined(self, other: Measured) -> Measured:
        """The fuller of two, and the largest of both."""
        fuller = max(self, other, key=lambda one: one.peak_bytes)
        tags = {**self.largest, **other.largest}
        largest = {tag: max(self.largest.get(tag, 0), other.largest.get(tag, 0)) for tag in tags}
        return Measured(fuller.peak_bytes, fuller.residents, largest)


class MeasuredMemory(TorchDispatchMode):
    """Counts inside its block, on the thread that entered it.

    residents: the tensors that belong to each resident now; asked at every local peak, it must run no operator.
    on_host: residents that are on the host, wherever their tensors are: they do not count. What was alive before the
    block and belongs to nobody does not count either. lasting: residents that keep what was theirs until it is freed,
    as gradients do that their parameters no longer name. settles: a phase begins when nothing is freed any more: some
    threads of a process group let go of tensors after their collective has returned.
    """

    def __init__(
        self,
        residents: Residents,
        on_host: Iterable[str] = (),
        lasting: Iterable[str] = (),
        *,
        settles: bool = False,
    ) -> None:
        super().__init__()
        self._settles = settles
        self._residents, self._on_host = residents, frozenset(on_host)
        self._lasting: dict[str, set[int]] = {tag: set() for tag in lasting}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # bytes of a storage, by its address as an object
        self._before: set[int] = set()
        self._total = 0
        self._open: list[str] = []
        self._peak, self._is_new = 0, False  # of the open phase; whether nothing has been freed since it was reached
        self._now = Measured()
        self.phases: dict[str, Measured] = {}

    # ------------------------------------------------------------------------------------------------- storages

    def __enter__(self) -> MeasuredMemory:
        super().__enter__()
        self._resize = torch.UntypedStorage.resize_
        resize, see = self._resize, self._see_storage

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            see(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        for tensors in self._residents().values():
            for tensor in tensors:
                self._see(tensor)
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operators on its parts, which come here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self._see(getattr(tensor, name))
        elif tensor.device.type != "meta":
            self._see_storage(tensor.untyped_storage())

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_number(storage), storage.nbytes()
        known = self._live.get(key)
        if known is None:
            self._live[key] = (size, weakref.ref(storage, functools.partial(self._gone, key)))
            self._change(size)
        elif known[0] != size:
            if size < known[0]:
                self._keep_peak()
            self._live[key] = (size, known[1])
            self._change(size - known[0])

    def _gone(self, key: int, reference: Any) -> None:
        size, known = self._live[key]
        if known is reference:
            self._keep_peak()
            del self._live[key]
            for keys in self._lasting.values():
                keys.discard(key)
            self._change(-size)

    def _change(self, num_bytes: int) -> None:
        self._total += num_bytes
        if self._total > self._peak:
            self._peak, self._is_new = self._total, True

    def _keep_peak(self) -> None:
        """Before something is freed: look who holds what, if this is the fullest moment so far."""
        if self._is_new and self._open:
            self._is_new = False
            self._now = self._now.joined(self.look())

    # ------------------------------------------------------------------------------------------------- phases

    def look(self) -> Measured:
        """What is alive now."""
        held, host = dict[str, int](), 0
        counted: set[int] = set()
        for tag, tensors in self._residents().items():
            keys = {storage_id(tensor) for tensor in tensors} - counted
            if tag in self._lasting:
                keys |= self._lasting[tag]
                self._lasting[tag] = keys
            counted |= keys
            size = sum(self._live[key][0] for key in keys if key in self._live)
            if tag in self._on_host:
                host += size
            else:
                held[tag] = size
        return Measured(self._total - host, held, dict(held))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as this phase; a phase inside another is not part of it."""
        self._close()
        if self._settles:
            self._settle()
        self.look()  # what lasts is known from here on
        self._open.append(name)
        self._begin()
        try:
            yield
        finally:
            self._close()
            self._open.pop()
            self._begin()

    def _settle(self) -> None:
        seen = [-1]
        while seen[-QUIET_READS:] != [self._total] * QUIET_READS:
            time.sleep(0.005)
            seen.append(self._total)

    def _begin(self) -> None:
        self._peak, self._is_new, self._now = self._total, True, Measured()

    def _close(self) -> None:
        if self._open:
            self._keep_peak()
            self._now = self._now.joined(Measured(0, {}, self.look().largest))
            name = self._open[-1]
            self.phases[name] = self.phases.get(name, Measured()).joined(self._now)

    def forget(self) -> None:
        """Measure anew; what is alive stays known."""
        self.phases.clear()

    def measured(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Make every call of a function a phase."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return call

    def during(self, owner: Any, method: str, phase: str) -> None:
        """Make every call of an object's method a phase."""
        setattr(owner, method, self.measured(getattr(owner, method), phase))
