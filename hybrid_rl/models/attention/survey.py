"""A survey of a model: the options of attention in every layer, and what its own mask would let it see.

Packed attention gets no mask: it knows what layers say in the call (a window, soft-capping). An architecture that puts
a window or chunks only into its mask would run without them, exact for short sequences and wrong for long ones. So the
model is run once on two tokens with a mask function of ours, which gets the rule by which transformers would make
the mask. A rule can be asked about any two positions: no long forward is needed to find the first position
at which it differs from what the layer said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.attention_function import (
    AttentionOptions,
    attention_functions,
    current_context,
    installed_views,
    options_of,
)

NAME = "hybrid_rl_survey"
FARTHEST = 2**31  # positions that are looked at if the config names no limit
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query and key to whether the key is seen


@dataclass(frozen=True)
class LayerCall:
    """One call of attention. attention: class of the module; rule: of its mask."""

    layer: int
    attention: str
    options: AttentionOptions
    rule: Rule

    def sees(self, query: int) -> bool:
        """Return whether the rule lets the layer see at this position exactly what packed attention would."""
        window = self.options.window
        near = {0, query, *(2**power for power in range(query.bit_length()))}
        near |= set() if window is None else {window - 1, window}
        distances = torch.tensor([-1, *sorted(distance for distance in near if 0 <= distance <= query)])
        queries, zero = torch.full_like(distances, query), torch.zeros_like(distances)
        expected = (distances >= 0) if window is None else (distances >= 0) & (distances < window)
        return torch.equal(self.rule(zero, zero, queries, queries - distances).expand(len(distances)).cpu(), expected)

    def first_difference(self, num_positions: int) -> int | None:
        """Return the first position at which they differ, None if there is none among num_positions.

        From there on they differ at every position: the first token of all is seen by one of the two only.
        """
        tried = sorted({2**power for power in range(num_positions.bit_length())} | {num_positions - 1})
        wrong = next((query for query in tried if query < num_positions and not self.sees(query)), None)
        if wrong is None:
            return None
        right = max((query for query in tried if query < wrong), default=0)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            right, wrong = (middle, wrong) if self.sees(middle) else (right, middle)
        return wrong


class _Survey:
    """The calls that the functions below have seen, and the rules of masks, by the memory of each mask."""

    def __init__(self) -> None:
        self.masks: dict[int, tuple[Tensor, Rule]] = {}
        self.calls: list[LayerCall] = []

    def attend(self, *_: Any) -> Tensor:
        """Fail: no packed attention runs here."""
        raise AssertionError

    def add(self, module: nn.Module, mask: Any, keywords: dict[str, Any]) -> None:
        """Note a call of attention."""
        name = type(module).__name__
        layer, options = options_of(module, keywords)
        # Layers may cut the mask, which leaves its memory.
        known_mask = self.masks.get(mask.untyped_storage().data_ptr()) if isinstance(mask, Tensor) else None
        if known_mask is None:
            raise ModelError(f"{name} {'makes its own attention mask' if mask is not None else 'uses no mask'}")
        self.calls.append(LayerCall(layer, name, options, known_mask[1]))


def _survey() -> _Survey:
    context = current_context()
    assert isinstance(context, _Survey)
    return context


def _mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Rule, device: Any = "cpu", **keywords: Any
) -> Tensor:
    """Make the mask that is known by its rule, and masks nothing."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=keywords.get("dtype"), device=device)
    _survey().masks[mask.untyped_storage().data_ptr()] = (mask, mask_function)
    return mask


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
) -> tuple[Tensor, None]:
    """Give every query the value of its token, which has the right shape."""
    _survey().add(module, attention_mask, keywords)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@torch.no_grad()
def surveyed(backbone: PreTrainedModel, device: torch.device) -> list[LayerCall]:
    """Return every call of attention in a forward pass, in order. Raises ModelError for what packed attention does not
    have, and for a mask that is not made by transformers from a rule."""
    survey = _Survey()
    with attention_functions(installed_views(backbone), NAME, survey):
        backbone(input_ids=torch.ones(1, 2, dtype=torch.int64, device=device), use_cache=False)
    return survey.calls
