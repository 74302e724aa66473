"""Names of transformers that tests need; those that the library needs are in `compat/transformers.py`."""

from __future__ import annotations

from typing import Any


def name_attention(config: Any, name: str | None) -> None:
    """Have models of this config look for another attention function."""
    config._attn_implementation = name


def name_experts(config: Any, name: str) -> None:
    """Have models of this config compute their experts in another way."""
    config._experts_implementation = name
