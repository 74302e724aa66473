"""Triton's interpreter, in which the scripts of cases run kernels on the CPU."""

from __future__ import annotations

import torch

from hybrid_rl.errors import ConfigError


def use_interpreter() -> None:
    """Run kernels on one thread of the CPU from now on. Raises ConfigError where Triton compiles them: that is decided
    when it is imported."""
    import triton

    if not triton.knobs.runtime.interpret:
        raise ConfigError("set TRITON_INTERPRET=1: the kernels are to run in Triton's interpreter")
    torch.set_num_threads(1)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        _read_bounds_of_loops()


def _read_bounds_of_loops() -> None:
    """What Triton 3.7 does: a scalar is an array of one element, which NumPy 2.4 makes no int of. Older versions fail
    in every loop whose bounds are arguments. The compiler knows no such arrays."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched
