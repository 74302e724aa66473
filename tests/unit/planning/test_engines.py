"""What engines hold beside their logits, by engine, device and version."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.config.schema import HFRolloutConfig, InPlaceRolloutConfig, VLLMRolloutConfig
from hybrid_rl.planning.engines import bytes_beside


@pytest.mark.parametrize(
    ("rollout", "device", "version", "dtype", "num_bytes"),
    [
        (InPlaceRolloutConfig(), "cuda", None, "bfloat16", 0),
        (HFRolloutConfig(), "cpu", "0.25.1", "bfloat16", 4),
        (VLLMRolloutConfig(), "cpu", None, "float32", 5),
        (VLLMRolloutConfig(), "cpu", "0.32.1+cpu", "bfloat16", 7),
        (VLLMRolloutConfig(), "cpu", "0.32rc1", "float32", 5),
        (VLLMRolloutConfig(), "cpu", "0.25.1", "float32", 16),  # measured with constraints-cuda.txt: tests/vllm
        (VLLMRolloutConfig(), "cuda", "0.32.0", "bfloat16", 10),
    ],
)
def test_bytes_beside_a_logit(
    rollout: Any, device: str, version: str | None, dtype: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [] if version is None else [SimpleNamespace(version=version)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: installed)
    config: Any = SimpleNamespace(rollout=rollout, model=SimpleNamespace(device=device, dtype=dtype))
    assert bytes_beside(config) == num_bytes
