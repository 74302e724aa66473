"""What engines hold beside their logits, by engine, device and version."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.config.hf import HFRolloutConfig
from hybrid_rl.config.schema import InPlaceRolloutConfig, VLLMRolloutConfig
from hybrid_rl.planning.engines import num_beside


@pytest.mark.parametrize(
    ("rollout", "device", "version", "number"),
    [
        (InPlaceRolloutConfig(), "cuda", None, 0),
        (HFRolloutConfig(), "cpu", "0.25.1", 1),
        (VLLMRolloutConfig(), "cpu", None, 1),
        (VLLMRolloutConfig(), "cpu", "0.32.1+cpu", 1),
        (VLLMRolloutConfig(), "cpu", "0.32rc1", 1),
        (VLLMRolloutConfig(), "cpu", "0.25.1", 2),  # measured with the versions of constraints-cuda.txt: tests/vllm
        (VLLMRolloutConfig(), "cuda", "0.32.0", 2),
    ],
)
def test_numbers_beside_a_logit(
    rollout: Any, device: str, version: str | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [] if version is None else [SimpleNamespace(version=version)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: installed)
    config: Any = SimpleNamespace(rollout=rollout, model=SimpleNamespace(device=device))
    assert num_beside(config) == number
