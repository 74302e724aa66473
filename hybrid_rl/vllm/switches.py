"""Settings of PyTorch's compiler and products, and of Triton, that vLLM changes for itself, put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

INDUCTOR = "torch._inductor.config"
COMPILER_VARIABLES = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # vLLM compiles in this process only


@contextmanager
def switches_kept() -> Iterator[None]:
    """Put back, after the block, the precision of float32 products, the processes of PyTorch's compiler, and what
    Triton prints about compiling. The environment must have been put back by then."""
    cuda: Any = torch.backends.cuda
    mkldnn: Any = torch.backends.mkldnn
    precisions = [(backend, backend.fp32_precision) for backend in (cuda.matmul, mkldnn.matmul)]
    name = _named_precision()
    compiler: Any = sys.modules.get(INDUCTOR)
    num_threads = None if compiler is None else compiler.compile_threads
    triton = {place: dict(settings) for place, settings in _triton_settings().items()}
    try:
        yield
    finally:
        if name is not None and _named_precision() != name:
            torch.set_float32_matmul_precision(name)
        for backend, precision in precisions:
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision
        config: Any = sys.modules.get(INDUCTOR)
        if config is not None:  # imported inside: under an environment that said otherwise
            config.compile_threads = config.decide_compile_threads() if compiler is None else num_threads
        for place, settings in _triton_settings().items():
            switch, before = place[1], triton.get(place, {})
            if switch in before:
                settings[switch] = before[switch]
            else:
                settings.pop(switch, None)  # Triton's own default


def compile_alone() -> None:
    """Have PyTorch's compiler start no processes, as vLLM has it: to be called inside `switches_kept`."""
    if INDUCTOR in sys.modules:
        sys.modules[INDUCTOR].compile_threads = 1  # type: ignore[attr-defined]


def _named_precision() -> str | None:
    """As torch.set_float32_matmul_precision has it; None if the user has set backends apart, which it refuses to
    sum up."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _triton_settings() -> dict[tuple[str, str], dict[str, Any]]:
    """Return what has been set of Triton's knobs that vLLM turns, by group and name; nothing if Triton is not
    imported."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        return {}
    turned = (("autotuning", "print"), ("runtime", "jit_post_compile_hook"))
    return {place: vars(getattr(knobs, place[0])) for place in turned}
