"""Which attention runs the packed rows of the trainer, decided and checked once, before any work starts.

| name | what | needs |
|---|---|---|
| sdpa | PyTorch's scaled_dot_product_attention, padded per bucket of similar lengths | nothing |
| compiled | csrc/packed_attention.cpp, one call per layer | a CPU, float32, the compiled extension |
| varlen | the kernels of torch.nn.attention.varlen | CUDA 8.0 or newer, bfloat16, no soft-capping |
| flash_attn | the flash-attn package | CUDA 8.0 or newer, bfloat16, flash-attn 2.7 |
| flash_attn_3 | varlen on the kernels of FlashAttention 3 | as varlen, on CUDA 9.0 (Hopper), flash-attn-3 |

Heads of the last three have up to 256 elements, a multiple of 8. auto takes the first of flash_attn_3, varlen and
compiled that runs, else sdpa.

flash_attn_3 is PyTorch's own switch, `torch.nn.attention.activate_flash_attention_impl("FA3")`, and it is one for the
whole process: flash attention of every model in it, the user's included, then runs on FlashAttention 3, which refuses
dropout. It stays on until somebody calls `torch.nn.attention.restore_flash_attention_impl()`; attention=varlen leaves
it alone.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from transformers import PreTrainedModel

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models.attention import compiled, unpacked
from hybrid_rl.models.attention.attention_function import AttentionContext
from hybrid_rl.models.attention.compiled import CompiledAttention
from hybrid_rl.models.attention.padded import PaddedAttention
from hybrid_rl.models.attention.unpacked import UnpackedRow
from hybrid_rl.models.attention.varlen import FlashAttnKernel, Kernel, TorchKernel, VarlenAttention
from hybrid_rl.models.row import LEAST_SAVED, Layout

NAMES = ("sdpa", "compiled", "varlen", "flash_attn", "flash_attn_3")
OLDEST_CAPABILITY = (8, 0)
OLDEST_FLASH_ATTN = (2, 7)
FLASH_ATTN_3_CAPABILITY = 9  # its kernels are made for this generation only
FLASH_ATTN_3_MODULE = "flash_attn_interface"  # what the package flash-attn-3 installs, and PyTorch's switch imports
LARGEST_HEAD = 256
LEAST_SAVED_BY_KERNELS = 1 / 8
_logger = logging.getLogger("hybrid_rl")


@dataclass(frozen=True)
class AttentionNeeds:
    """Properties of a model that its attention must support. head_dim: elements of a head, None if queries and values
    differ or the config does not say."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int | None
    softcap: float | None

    @classmethod
    def of(cls, module: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> AttentionNeeds:
        """Read them from the module's config."""
        config: Any = module.config.get_text_config()
        try:
            head_dim = getattr(config, "head_dim", None)
        except RuntimeError:  # transformers raises it for heads of several sizes, as Gemma 4 has
            return cls(device, dtype, None, getattr(config, "attn_logit_softcapping", None))
        width, num_heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
        if head_dim is None and width and num_heads:
            head_dim = width // num_heads
        if getattr(config, "v_head_dim", None) is not None:
            head_dim = None
        return cls(device, dtype, head_dim, getattr(config, "attn_logit_softcapping", None))


@dataclass(frozen=True)
class Backend:
    """A chosen attention. kernel: what varlen, flash_attn and flash_attn_3 run on."""

    name: str
    kernel: Kernel | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the sequences of a row run as one, rather than next to each other."""
        return self.name != unpacked.NAME

    @property
    def words(self) -> str:
        """How rows run, in messages."""
        return "packed sequences" if self.is_packed else "sequences of other lengths next to it"

    def least_saved(self, device: torch.device) -> float:
        """Return the part of a row's tokens that a prefix must save to be shared.

        Kernels of GPUs attend to it in a call of its own, few keys by all queries: what that costs is an estimate, not
        measured. PyTorch's attention would need a mask there, which its fast kernels do not take.
        """
        if device.type == "cpu":
            return LEAST_SAVED
        return LEAST_SAVED_BY_KERNELS if self.kernel is not None else math.inf

    def context(self, layout: Layout, device: torch.device | str) -> AttentionContext | UnpackedRow:
        """Return the attention of one row, or how it becomes sequences next to each other."""
        if not self.is_packed:
            return UnpackedRow(layout, device)
        if self.kernel is not None:
            return VarlenAttention(layout, self.kernel, device)
        return CompiledAttention(layout) if self.name == "compiled" else PaddedAttention(layout, device)


def choose_backend(name: str, needs: AttentionNeeds) -> Backend:
    """Return the backend of that name, for auto the best that runs here.

    Raises ConfigError if this machine, the dtype or the architecture cannot run the one that was asked for.
    """
    if name == unpacked.NAME:
        return Backend(name)
    if name == "auto":
        best = ("flash_attn_3", "varlen", "compiled", "sdpa")
        name = next(other for other in best if not obstacles(other, needs))
    _refuse(name, lambda other: obstacles(other, needs))
    if name == "flash_attn":
        return Backend(name, FlashAttnKernel(import_module("flash_attn.flash_attn_interface")))
    if name == "flash_attn_3":
        _switch_to_flash_attn_3()
    return Backend(name, TorchKernel() if name in ("varlen", "flash_attn_3") else None)


def check_machine(name: str, device: torch.device, dtype: torch.dtype, *, is_here: bool = True) -> None:
    """Raise ConfigError if an attention cannot run, whatever the model; called before a model is loaded.
    is_here: ranks run on this machine; of other machines only device and dtype are known."""
    if name != "auto":
        _refuse(name, lambda other: _machine_obstacles(other, device, dtype, is_here=is_here))


def expected_backend(name: str, needs: AttentionNeeds) -> str:
    """Return the name of the backend that ranks on such a device would choose, as far as can be said without one: a GPU
    is taken to be new enough, and to have no optional packages."""
    if name != "auto":
        return name
    is_here = needs.device.type == "cpu"
    return next(other for other in ("varlen", "compiled", "sdpa") if not obstacles(other, needs, is_here=is_here))


def obstacles(name: str, needs: AttentionNeeds, *, is_here: bool = True) -> list[str]:
    """Say why a backend cannot run; empty if it can. is_here: as in `check_machine`."""
    return _machine_obstacles(name, needs.device, needs.dtype, is_here=is_here) + _model_obstacles(name, needs)


def _refuse(name: str, obstacles_of: Callable[[str], list[str]]) -> None:
    """Raise ConfigError if anything keeps a backend from running."""
    reasons = obstacles_of(name)
    if reasons:
        runs = ", ".join(other for other in NAMES if not obstacles_of(other))
        raise ConfigError(f"model.attention={name} cannot run here: {'; '.join(reasons)}; use auto or one of: {runs}")


def _machine_obstacles(name: str, device: torch.device, dtype: torch.dtype, *, is_here: bool) -> list[str]:
    """Say why device, dtype or installed packages keep a backend from running; empty if they do not."""
    if name == "sdpa":
        return []
    if name not in NAMES:
        raise ConfigError(f"model.attention={name!r} is unknown; use auto, {', '.join(NAMES)}")
    is_compiled = name == "compiled"
    runs_on, computes_in = ("cpu", torch.float32) if is_compiled else ("cuda", torch.bfloat16)
    reasons = []
    if device.type != runs_on:
        needed = "it runs on a CPU" if is_compiled else "it needs a CUDA device"
        reasons.append(f"{needed}, and the model is on {device}")
    elif is_here and device.type == "cuda":
        reasons += _capability_obstacles(name, device)
    if dtype != computes_in:
        reasons.append(f"it computes in {_words(computes_in)}, and the model holds {_words(dtype)}")
    if not is_here:
        return reasons
    if is_compiled and not compiled.is_available():
        reasons.append("the compiled extension was not built, or is switched off")
    if name == "flash_attn":
        reasons += _flash_attn_obstacles()
    if name == "flash_attn_3":
        reasons += _flash_attn_3_obstacles(may_import=not reasons)
    return reasons


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_obstacles(name: str, needs: AttentionNeeds) -> list[str]:
    """Say why a backend cannot run this architecture; empty if it can."""
    head, softcap = needs.head_dim, needs.softcap
    if name == "sdpa":
        return []
    if name == "compiled":
        largest = compiled.LARGEST_HEAD
        return [f"heads have at most {largest} elements, and these have {head}"] if (head or 0) > largest else []
    reasons = []
    if head is None:
        reasons.append("this architecture does not have one head size")
    elif head % 8 or head > LARGEST_HEAD:
        reasons.append(f"heads must be a multiple of 8, at most {LARGEST_HEAD}, and have {head} elements")
    if name != "flash_attn" and softcap is not None:
        reasons.append(f"it has no soft-capping, and this architecture caps at {softcap:g}")
    return reasons


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError for float16, and for bfloat16 on a GPU that only emulates it.

    A CPU may emulate it: slowly, but so the bfloat16 path can be tried without a GPU.
    """
    if dtype == torch.float16:
        raise ModelError(
            "the model holds float16, whose gradients overflow and vanish without loss scaling; use bfloat16 or "
            "float32: module.to(torch.bfloat16), or dtype=bfloat16"
        )
    if dtype != torch.bfloat16 or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ModelError(f"{torch.cuda.get_device_name(device)} has no bfloat16 in hardware; use dtype=float32")


def _capability_obstacles(name: str, device: torch.device) -> list[str]:
    if torch.version.cuda is None:
        return ["it needs CUDA, and this torch is built without it"]
    major, minor = torch.cuda.get_device_capability(device)
    if name == "flash_attn_3" and major != FLASH_ATTN_3_CAPABILITY:
        return [f"it needs compute capability {FLASH_ATTN_3_CAPABILITY}.0, and {device} has {major}.{minor}"]
    if (major, minor) < OLDEST_CAPABILITY:
        return [f"it needs compute capability 8.0, and {device} has {major}.{minor}"]
    return []


def _flash_attn_obstacles() -> list[str]:
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return ["flash-attn is not installed (pip install flash-attn)"]
    if _version(version) < OLDEST_FLASH_ATTN:
        return [f"it needs flash-attn 2.7, and this is {version}"]
    return []


def _flash_attn_3_obstacles(*, may_import: bool) -> list[str]:
    """Say why it cannot run. may_import: try to load its kernels, as nothing else keeps it from running."""
    if sys.modules.get(FLASH_ATTN_3_MODULE) is None and find_spec(FLASH_ATTN_3_MODULE) is None:
        return ["flash-attn-3 is not installed"]
    if not may_import:
        return []
    active = current_flash_attention_impl()
    if active not in (None, "FA3"):
        return [f"PyTorch's flash attention is switched to {active} already"]
    try:
        import_module(FLASH_ATTN_3_MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        return [f"flash-attn-3 cannot be imported: {error}"]
    return []


def _switch_to_flash_attn_3() -> None:
    """Let PyTorch's flash attention run on FlashAttention 3, in this whole process."""
    if current_flash_attention_impl() == "FA3":
        return
    try:
        activate_flash_attention_impl("FA3")
    except RuntimeError as error:  # an installation without the kernels of the backward pass
        raise ConfigError(
            f"model.attention=flash_attn_3 cannot run here: {error}; install a flash-attn-3 with both passes, or use "
            f"attention=varlen"
        ) from error
    _logger.info(
        "attention runs on FlashAttention 3, as PyTorch's flash attention now does in this whole process; "
        "torch.nn.attention.restore_flash_attention_impl() takes that back"
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])
