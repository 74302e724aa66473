"""Passes that the memory of this process is too small for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.inside.wrapping import wrap


def ask_for_too_much(*_: Any) -> None:
    """The real error of the host's allocator."""
    torch.empty(1 << 60, dtype=torch.uint8)


class SmallMemory:
    """Passes of one phase (rollout, scoring or update) do not fit with more than `most` tokens: the embedding asks for
    memory that there is not. at_end: as the last thing of the backward pass, when other gradients have been added up.
    number: of failures."""

    def __init__(self, phase: str, most: int, *, at_end: bool = False) -> None:
        self.phase, self.most, self.at_end, self.number = phase, most, at_end, 0

    def install(self, patch: Any) -> None:
        """Be the memory of this process. patch: a MonkeyPatch, which ends it."""
        wrap(patch, nn.Embedding, "forward", self)

    def __call__(self, own: Any, module: nn.Module, token_ids: torch.Tensor) -> Any:
        now = "rollout" if torch.is_inference_mode_enabled() else "update" if torch.is_grad_enabled() else "scoring"
        if now != self.phase or token_ids.numel() <= self.most:
            return own(module, token_ids)
        if self.at_end:
            embedded = own(module, token_ids)
            embedded.register_hook(self.fail)
            return embedded
        return self.fail()

    def fail(self, *_: Any) -> None:
        self.number += 1
        ask_for_too_much()
