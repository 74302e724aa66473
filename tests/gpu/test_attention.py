"""Attention backends on the device, against softmax attention written out."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.gpu.device import DEVICE, cuda_only
from tests.support.engines.attention_contract import check_backend

needs_flash_attn = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sdpa_keeps_the_contract(dtype: torch.dtype) -> None:
    check_backend("sdpa", DEVICE, dtype)


@cuda_only
@pytest.mark.parametrize("backend", ["varlen", pytest.param("flash_attn", marks=needs_flash_attn)])
def test_kernels_for_narrow_types_keep_the_contract(backend: str) -> None:
    check_backend(backend, DEVICE, torch.bfloat16)
