"""The policy without its adapters: the reference of a run that trains adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hybrid_rl.models.causal_lm import CausalLM
from hybrid_rl.models.lora.plain import plain


class WithoutAdapters:
    """A CausalLM whose methods run without the adapters of its module, over the same base weights."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        return partial(self._run, found) if callable(found) and name.startswith("row_") else found

    def _run(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with plain(self._model.module, trained=False):
            return method(*arguments, **named)
