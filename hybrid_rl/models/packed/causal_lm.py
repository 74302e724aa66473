"""A Hugging Face causal LM as the library uses it: packed, and checked at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.unpacked import NAME as UNPACKED
from hybrid_rl.models.packed.cache import check_cache
from hybrid_rl.models.packed.exact_check import check_exact
from hybrid_rl.models.packed.packed_model import PackedModel
from hybrid_rl.models.packed.startup_check import check_causal, check_outputs, check_survey, check_weights
from hybrid_rl.weights.plain import plain

# The advice if more than attention carries numbers from token to token: linear attention, convolutions, state spaces.
OWN_FORWARD = (
    'rollout.engine=hf (Trainer(engine="hf")) runs it through its own forward, slower; with rollout.engine=vllm, '
    "model.attention=unpacked trains it so"
)


class CausalLM(PackedModel):
    """A packed model that can check itself. Same arguments as PackedModel."""

    def verify(self, prompt_ids: Sequence[int] = ()) -> float:
        """Run the start-up check (`models/packed/startup_check.py`); return the largest relative gap to the model's own
        forward. prompt_ids: of the run, for the check to use tokens that the model knows.

        Raises ModelError if this architecture does not run under packed attention or its head is not the plain one:
        the numbers would be wrong, silently. Weights that are not finite are named first. With exact=true it also
        raises one if a number of a token depends on the tokens that it is computed with.
        """
        try:
            if self.attention.is_packed:
                self.masked_from = check_survey(self)
            gap = check_outputs(self, prompt_ids)
        except ModelError as error:
            check_weights(self.module)
            check_causal(self)
            if not self.attention.is_packed:
                raise
            raise ModelError(f"{error}; {self._remedy()}") from error
        if self.is_exact and self.is_language_model:
            check_exact(self)
        return gap

    def _remedy(self) -> str:
        """Say what to do if packed attention does not work: use the other engine, unless its own checks fail too."""
        try:
            unpacked = CausalLM(self.module, UNPACKED)
            check_outputs(unpacked)
            if self.is_language_model:
                check_cache(unpacked)
        except ModelError as error:
            return f"nor does rollout.engine=hf run it: {str(error).partition(';')[0]}"
        return OWN_FORWARD

    def without_adapters(self) -> CausalLM:
        """Return the model below the adapters, over the same weights: the reference of a run that trains adapters."""
        return cast(CausalLM, WithoutAdapters(self))


class WithoutAdapters:
    """A CausalLM whose methods run without the adapters of its module, over the same base weights."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._model, name)
        return partial(self._run, attribute) if callable(attribute) and name.startswith("row_") else attribute

    def _run(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with plain(self._model.module, trained=False):
            return method(*arguments, **named)
