"""Settings of engines: keys of the rollout and entries of its engine_args side by side."""

from __future__ import annotations

from typing import Any

from hybrid_rl.algos.options import field_types
from hybrid_rl.config.engine_keys import EngineArgs, InPlaceArgs, VLLMArgs
from hybrid_rl.config.schema import HFRolloutConfig, InPlaceRolloutConfig, VLLMRolloutConfig


def inplace_settings(**settings: Any) -> InPlaceRolloutConfig:
    """Return settings of the in-place engine."""
    return InPlaceRolloutConfig(**_sorted(InPlaceArgs, settings))


def hf_settings(**settings: Any) -> HFRolloutConfig:
    """Return settings of rollout.engine=hf."""
    return HFRolloutConfig(**_sorted(EngineArgs, settings))


def vllm_settings(**settings: Any) -> VLLMRolloutConfig:
    """Return settings of vLLM."""
    return VLLMRolloutConfig(**_sorted(VLLMArgs, settings))


def _sorted(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    names = field_types(kind).keys() & settings
    entries = {name: settings[name] for name in names}
    return {name: settings[name] for name in settings.keys() - names} | {"engine_args": kind(**entries)}
