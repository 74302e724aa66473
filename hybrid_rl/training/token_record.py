"""What an update does with every token, kept on request. People look at it; nothing is computed from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_rl.algos import PolicyLoss
from hybrid_rl.batch import Jagged

COLUMNS = ("ratio", "clipped", "loss_weight", "gradient_share")


class TokenRecord:
    """The columns COLUMNS of the samples of an update on one rank; of the last pass over each, if there are several.

    ratio: importance ratio in the loss; clipped: whether the loss stopped the token's gradient; loss_weight: what the
    token's loss is multiplied by, corrections included, 0 = it is not in the loss; gradient_share: of the sum of
    |d loss / d ln p| over the tokens of the optimizer step.
    """

    def __init__(self) -> None:
        self._noted: tuple[Tensor, Tensor] | None = None  # logprobs, and float32 [3, M] of the first columns
        self._pending: list[tuple[Sequence[int], Tensor]] = []
        self._kept: dict[int, Tensor] = {}  # float32 [4, T], by sample

    def begin(self) -> None:
        """Forget what was noted of an optimizer step that is not complete."""
        self._pending, self._noted = [], None

    def note(self, logprobs: Tensor, loss: PolicyLoss, weights: Tensor) -> None:
        """Note a micro-batch before its backward pass. logprobs: [M], with gradient; weights: [M]."""
        if logprobs.requires_grad:
            logprobs.retain_grad()
        columns = (loss.ratio, loss.clipped_low | loss.clipped_high, weights)
        self._noted = logprobs, torch.stack([column.detach().float() for column in columns])

    def take(self, rows: Sequence[int]) -> None:
        """Take the gradient of what was noted, after its backward pass. rows: its samples, none if it is a filler."""
        assert self._noted is not None, "it is noted before"
        logprobs, columns = self._noted
        slope = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad.abs()
        if rows:
            self._pending.append((rows, torch.cat([columns, slope.detach().float()[None]]).cpu()))
        self._noted = None

    def keep(self, completions: Jagged) -> None:
        """Keep the micro-batches of an optimizer step. completions: of all samples."""
        total = sum(float(values[3].double().sum()) for _, values in self._pending)
        for rows, values in self._pending:
            values[3] /= total or 1.0
            lengths = completions.lengths[list(rows)].tolist()
            self._kept |= dict(zip(rows, values.split(lengths, dim=1), strict=True))
        self._pending = []

    def columns(self, completions: Jagged) -> dict[str, Jagged]:
        """Return COLUMNS, aligned with the completions."""
        nothing = torch.zeros(len(COLUMNS), 0)
        parts = [
            self._kept.get(row, torch.zeros(len(COLUMNS), n)) for row, n in enumerate(completions.lengths.tolist())
        ]
        joined = torch.cat([nothing, *parts], dim=1)
        columns = {name: completions.with_values(joined[place]) for place, name in enumerate(COLUMNS)}
        return columns | {"clipped": completions.with_values(joined[1] > 0)}
