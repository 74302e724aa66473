"""What vLLM changes in a process that is not its own, put back.

It draws from and seeds the global random generators, exports environment variables (LD_PRELOAD among them), configures
logging, replaces functions of PyTorch, changes switches of PyTorch and Triton and classes of transformers, and moves
the calling thread to a CUDA stream of its own. The trainer in the same process must not notice.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.process.environment import environment_kept
from hybrid_rl.vllm.switches import switches_kept

# Set while vLLM is imported and built, unless the user set them: no logging of its own, no reports to its makers.
QUIET = {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class RandomState:
    """The states of the global random generators: Python's, NumPy's, PyTorch's and those of all CUDA devices in use."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> RandomState:
        """Return the states as they are."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def apply(self) -> None:
        """Make these the states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


class EngineRandom:
    """The random generators as an engine sees them: its own sequence, whatever others draw in between.

    Ranks that share an engine have to sample the same tokens: their sequences start from the same seed.
    """

    def __init__(self, seed: int) -> None:
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Begin the sequence again. seed: of any size; NumPy's has 32 bits."""
        seed %= 2**32
        before = RandomState.now()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._state = RandomState.now()
        before.apply()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the engine's generators inside, everybody else's again after it."""
        before = RandomState.now()
        self._state.apply()
        try:
            yield
        finally:
            self._state = RandomState.now()
            before.apply()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """As `active`, for a step: PyTorch's generators only, and of the GPUs that of this thread. A step of vLLM draws
        from no others, as long as requests bring their seeds to a runner that else has NumPy draw them; to save and set
        the states of all takes a hundred times as long."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            cuda = [*self._state.cuda]
            known = [device for device in devices if device < len(cuda)]
            torch.set_rng_state(self._state.cpu)
            for device in known:
                torch.cuda.set_rng_state(cuda[device], device)
            try:
                yield
            finally:
                for device in known:
                    cuda[device] = torch.cuda.get_rng_state(device)
                self._state = replace(self._state, cpu=torch.get_rng_state(), cuda=cuda)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Put the calling thread on this CUDA stream, and on its own again after the block, wherever it was moved to
    inside; None: leave it where it is."""
    if stream is None:
        yield
        return
    before = torch.cuda.current_stream(stream.device)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


class Guest:
    """An engine in a process that is not its own: it has random generators and a CUDA stream to itself, and leaves the
    environment as it was. stream: None until it has one."""

    def __init__(self, seed: int) -> None:
        self.random = EngineRandom(seed)
        self.stream: torch.cuda.Stream | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the engine's inside, everybody else's again after it."""
        with environment_kept(), on_stream(self.stream), self.random.active():
            yield

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """As `active`, at the price of a step."""
        with environment_kept(), on_stream(self.stream), self.random.sampling():
            yield


def stream_of_thread(device: torch.device) -> torch.cuda.Stream | None:
    """Return the CUDA stream on which the calling thread is; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def process_kept(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Restore the whole process after the block: environment, random generators, default dtype and device, precision of
    products, threads, processes of the compiler, Triton's messages, logging, signal handlers, the hook for uncaught
    errors, which every start of torch.distributed wraps again, and where garbage is looked for: vLLM takes all objects
    there are out of that, so that a Trainer that was dropped would never go. For building an engine, which may touch
    any of them."""
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ}
    random_state = RandomState.now()
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    signals = {number: signal.getsignal(number) for number in SIGNALS}
    excepthook, is_frozen = sys.excepthook, gc.get_freeze_count() > 0
    try:
        with switches_kept(), environment_kept(quiet | dict(variables or {})):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            set_num_threads(num_threads)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        sys.excepthook = excepthook
        if not is_frozen:
            gc.unfreeze()
        root.handlers[:] = handlers
        root.setLevel(level)
        if threading.current_thread() is threading.main_thread():
            for number, handler in signals.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
        random_state.apply()


@contextmanager
def classes_kept(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Restore the classes of a transformers model, and of its parts, after the block.

    Models that vLLM has no code for it runs through the classes of transformers, and gives these another base,
    constructor and call, by which it compiles: every module of such a class would then need to be vLLM's. What is put
    into the list inside are models of vLLM; their parts keep what the classes were given, as a class of their own.
    """
    kinds = {kind for part in module.modules() for kind in type(part).__mro__ if issubclass(kind, PreTrainedModel)}
    before = {kind: (kind.__bases__, dict(vars(kind))) for kind in kinds}
    models: list[nn.Module] = []
    try:
        yield models
    finally:
        for kind, (bases, entries) in before.items():
            if kind.__bases__ == bases:
                continue
            changes = {name: value for name, value in vars(kind).items() if entries.get(name, models) is not value}
            more = tuple(base for base in kind.__bases__ if base not in bases)
            kind.__bases__ = bases
            for name in changes:
                if name in entries:
                    setattr(kind, name, entries[name])
                else:
                    delattr(kind, name)
            own = type(kind.__name__, (kind, *more), {**changes, "__module__": kind.__module__})
            for part in (part for model in models for part in model.modules() if type(part) is kind):
                part.__class__ = own
