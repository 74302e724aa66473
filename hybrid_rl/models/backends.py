"""Which attention runs the packed rows of the trainer, decided and checked once, before any work starts.

| name | what | needs |
|---|---|---|
| sdpa | PyTorch's scaled_dot_product_attention, padded per bucket of similar lengths | nothing |
| compiled | csrc/packed_attention.cpp, one call per layer | a CPU, float32, the compiled extension |
| varlen | the kernels behind torch.nn.attention.varlen | CUDA 8.0 or newer, bfloat16, torch 2.11, no soft-capping |
| flash_attn | the flash-attn package | CUDA 8.0 or newer, bfloat16, flash-attn 2.7 |

Heads of the last two have up to 256 elements, a multiple of 8. auto takes varlen or compiled where one of them runs,
else sdpa.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models import compiled
from hybrid_rl.models.attention import AttentionContext, PackedAttention
from hybrid_rl.models.compiled import CompiledAttention
from hybrid_rl.models.row import Layout
from hybrid_rl.models.shared import SharedAttention
from hybrid_rl.models.varlen import FlashAttnKernel, Kernel, TorchKernel, VarlenAttention

NAMES = ("sdpa", "compiled", "varlen", "flash_attn")
OLDEST_CAPABILITY = (8, 0)
OLDEST_FLASH_ATTN = (2, 7)
OLDEST_TORCH = (2, 11)
LARGEST_HEAD = 256


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model asks of its attention. head_dim: elements of a head, None where queries and values differ or
    the config does not say."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int | None
    softcap: float | None

    @classmethod
    def of(cls, module: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> AttentionNeeds:
        """Read from the module's config."""
        config: Any = module.config.get_text_config()
        head_dim = getattr(config, "head_dim", None)
        width, num_heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
        if head_dim is None and width and num_heads:
            head_dim = width // num_heads
        if getattr(config, "v_head_dim", None) is not None:
            head_dim = None
        return cls(device, dtype, head_dim, getattr(config, "attn_logit_softcapping", None))


@dataclass(frozen=True)
class Backend:
    """A chosen attention. kernel: what varlen and flash_attn run on."""

    name: str
    kernel: Kernel | None = None

    def context(self, layout: Layout, device: torch.device | str) -> AttentionContext:
        """Attention of one row."""
        if self.kernel is not None:
            return VarlenAttention(layout, self.kernel, device)
        if self.name == "compiled":
            return CompiledAttention(layout)
        return SharedAttention(layout, device) if layout.children else PackedAttention(layout.lengths, device)


def choose_backend(name: str, needs: AttentionNeeds) -> Backend:
    """The backend of that name, or for auto the best that runs here.

    Raises ConfigError where this machine, the dtype or the architecture cannot run the one that was asked for.
    """
    if name == "auto":
        name = next(other for other in ("varlen", "compiled", "sdpa") if not obstacles(other, needs))
    found = obstacles(name, needs)
    if found:
        runs = ", ".join(other for other in NAMES if not obstacles(other, needs))
        raise ConfigError(f"model.attention={name} cannot run here: {'; '.join(found)}; use auto or one of: {runs}")
    if name == "flash_attn":
        return Backend(name, FlashAttnKernel(import_module("flash_attn.flash_attn_interface")))
    return Backend(name, TorchKernel() if name == "varlen" else None)


def obstacles(name: str, needs: AttentionNeeds) -> list[str]:
    """Why a backend cannot run; empty where it can."""
    if name == "sdpa":
        return []
    if name not in NAMES:
        raise ConfigError(f"model.attention={name!r} is unknown; use auto, {', '.join(NAMES)}")
    if name == "compiled":
        return _compiled_obstacles(needs)
    found = []
    if needs.device.type != "cuda" or torch.version.cuda is None:
        found.append(f"it needs a CUDA device, and the model is on {needs.device}")
    elif torch.cuda.get_device_capability(needs.device) < OLDEST_CAPABILITY:
        capability = ".".join(map(str, torch.cuda.get_device_capability(needs.device)))
        found.append(f"it needs compute capability 8.0, and {needs.device} has {capability}")
    if needs.dtype != torch.bfloat16:
        found.append(f"it computes in bfloat16, and the model holds {str(needs.dtype).removeprefix('torch.')}")
    if needs.head_dim is None:
        found.append("this architecture does not have one head size")
    elif needs.head_dim % 8 or needs.head_dim > LARGEST_HEAD:
        found.append(f"heads must be a multiple of 8, at most {LARGEST_HEAD}, and have {needs.head_dim} elements")
    if name == "varlen":
        if needs.softcap is not None:
            found.append(f"it has no soft-capping, and this architecture caps at {needs.softcap:g}")
        if _version(torch.__version__) < OLDEST_TORCH:
            found.append(f"it needs torch 2.11, and this is {torch.__version__}")
    else:
        found += _flash_attn_obstacles()
    return found


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError for float16, and for bfloat16 on a GPU that only emulates it.

    A CPU may emulate it: slow, but it is where the bfloat16 path can be tried without a GPU.
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


def _compiled_obstacles(needs: AttentionNeeds) -> list[str]:
    found = []
    if needs.device.type != "cpu":
        found.append(f"it runs on a CPU, and the model is on {needs.device}")
    if needs.dtype != torch.float32:
        found.append(f"it computes in float32, and the model holds {str(needs.dtype).removeprefix('torch.')}")
    if needs.head_dim is not None and needs.head_dim > compiled.LARGEST_HEAD:
        found.append(f"heads have at most {compiled.LARGEST_HEAD} elements, and these have {needs.head_dim}")
    if not compiled.is_available():
        found.append("the compiled extension was not built, or is switched off")
    return found


def _flash_attn_obstacles() -> list[str]:
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return ["flash-attn is not installed (pip install flash-attn)"]
    if _version(version) < OLDEST_FLASH_ATTN:
        return [f"it needs flash-attn 2.7, and this is {version}"]
    return []


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])
