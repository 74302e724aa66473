"""How a head makes logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadOptions:
    """How hidden states become logits: softcap * tanh(scale * (h W^T + b) / softcap).

    in_float32: h W^T + b of a bfloat16 model is the float32 sum of its products, not rounded to bfloat16, and its
    gradient reaches h and W in float32; both are rounded once, at the end, to the dtype of h and W.
    is_exact: logits and logprobs of a row do not depend on the other rows.
    """

    scale: float = 1.0
    softcap: float | None = None
    in_float32: bool = False
    is_exact: bool = False
