"""An answer of the engine, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Completion:
    """What the engine generated for a prompt of token ids.

    token_ids, logprobs, versions: one entry per token, its id, ln p under the distribution that it was sampled from,
    and the version of the weights. finish_reason: "stop", "length" (max_tokens) or "abort". routed_experts: int16
    [tokens, L, K], the experts of the tokens of prompt and answer; None = not recorded.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: Literal["stop", "length", "abort"]
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, compare=False)
