"""Settings of PyTorch's compiler and products, and of Triton, that vLLM changes for itself, put back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

INDUCTOR = "torch._inductor.config"
COMPILER_VARIABLES = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # vLLM compiles in this process only


@contextmanager
def switches_kept() -> Iterator[None]:
    """The precision of float32 products, the processes of PyTorch's compiler, and what Triton tells of compiling are
    the same after the block as before it. The environment must have been put back by then."""
    put_back = [_precision(), _compile_threads(), _triton()]
    try:
        yield
    finally:
        for action in put_back:
            action()


def compile_alone() -> None:
    """Have PyTorch's compiler start no processes, as vLLM has it: to be called inside `switches_kept`."""
    if INDUCTOR in sys.modules:
        sys.modules[INDUCTOR].compile_threads = 1  # type: ignore[attr-defined]


def _precision() -> Callable[[], None]:
    cuda: Any = torch.backends.cuda
    mkldnn: Any = torch.backends.mkldnn
    backends = (cuda.matmul, mkldnn.matmul)
    name, each = _named_precision(), [backend.fp32_precision for backend in backends]

    def put_back() -> None:
        if name is not None and _named_precision() != name:
            torch.set_float32_matmul_precision(name)
        for backend, precision in zip(backends, each, strict=True):
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision

    return put_back


def _named_precision() -> str | None:
    """As torch.set_float32_matmul_precision has it; None if the user has set backends apart, which it refuses to
    sum up."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _compile_threads() -> Callable[[], None]:
    before: Any = sys.modules.get(INDUCTOR)
    number = None if before is None else before.compile_threads

    def put_back() -> None:
        config: Any = sys.modules.get(INDUCTOR)
        if config is not None:  # imported inside: under an environment that said otherwise
            config.compile_threads = config.decide_compile_threads() if before is None else number

    return put_back


def _triton() -> Callable[[], None]:
    before = {place: dict(settings) for place, settings in _triton_settings().items()}

    def put_back() -> None:
        for place, settings in _triton_settings().items():
            name = place[1]
            if name in before.get(place, {}):
                settings[name] = before[place][name]
            else:
                settings.pop(name, None)  # Triton's own default

    return put_back


def _triton_settings() -> dict[tuple[str, str], dict[str, Any]]:
    """What has been set of Triton's knobs that vLLM turns, by group and name; nothing if Triton is not imported."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        return {}
    turned = (("autotuning", "print"), ("runtime", "jit_post_compile_hook"))
    return {place: vars(getattr(knobs, place[0])) for place in turned}
