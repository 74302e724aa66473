"""What models and their layers do among themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.inside.wrapping import wrap

if TYPE_CHECKING:
    import pytest
    from torch import Tensor


def set_head_options(model: Any, **changes: Any) -> None:
    """Have a model compute its logits in another way."""
    model._options = replace(model._options, **changes)


def num_fast_rows(model: Any) -> int:
    """Input rows of the block in which oneDNN multiplies; 0 outside."""
    count: int = model._linears.num_rows
    return count


def product_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """A float32 product on tensor cores."""
    from hybrid_rl.models.heads import wide

    return wide._on_tensor_cores(left, right)


def count_linear_calls(patch: pytest.MonkeyPatch, count: Callable[[], Any]) -> None:
    """Call `count` whenever oneDNN computes a layer."""
    from hybrid_rl.models import linear

    def counting(own: Any, *arguments: Any) -> Any:
        count()
        return own(*arguments)

    wrap(patch, linear, "_linear", counting)


def fetch_ahead(offload: Any) -> None:
    """Have activations come back ahead of their use, as on a GPU."""
    offload._stream = object()


def num_fetched(offload: Any) -> int:
    """Activations that are back, and were not asked for yet."""
    return sum(copy._fetched is not None for copy in offload._copies)


def rounded_weights(model: Any) -> Mapping[str, Any]:
    """The weights of 8 bits of a model, by name."""
    weights: Mapping[str, Any] = model._rounded
    return weights
