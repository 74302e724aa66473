"""The probe of a handoff: one prompt, continued greedily by trainer and engine, whose logprobs must agree.

The trainer's half comes first, while its weights are in memory, and the engine's after it, when they may have left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_rl.config import TrainerConfig
from hybrid_rl.engines.base import FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.errors import HandoffError
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.row import Layout

PROBE_TOKENS = 4
PROBE_REQUEST = -1
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class HandoffProbe:
    """The prompt of a run's probes, and how far engine and trainer may differ. prompt_ids: of the prompt; dtype: that
    the trainer computes in."""

    def __init__(self, prompt_ids: tuple[int, ...], config: TrainerConfig, dtype: torch.dtype) -> None:
        self._prompt_ids = prompt_ids
        self._num_tokens = min(PROBE_TOKENS, config.rollout.max_completion_length)
        self._tolerance = config.rollout.probe_tolerance or PROBE_TOLERANCE[dtype]

    @property
    def request(self) -> RolloutRequest:
        """What the engine is asked to generate."""
        return RolloutRequest(
            PROBE_REQUEST, self._prompt_ids, SamplingParams(max_tokens=self._num_tokens, temperature=0.0)
        )

    @torch.no_grad()
    def expected(self, model: CausalLM) -> Tensor:
        """Continue the prompt with the likeliest tokens. Returns ln p of the whole vocabulary at each of them, float32
        [k, V] on the host. Collective if the model is sharded."""
        token_ids, rows = torch.tensor(self._prompt_ids, device=model.device), []
        for _ in range(self._num_tokens):
            length = len(token_ids)
            last = torch.full((1,), length - 1, device=model.device)
            positions = torch.arange(length, device=model.device)
            row = PackedRow(token_ids, positions, token_ids[last], last, Layout((length,)))
            rows.append(model.row_distribution(row, 1.0))
            token_ids = torch.cat([token_ids, rows[-1].argmax(1)])
        return torch.cat(rows).float().cpu()

    def compare(self, expected: Tensor, answer: FinishedSample, version: int, proof: str | None) -> float:
        """Return the largest gap between the logprobs of the engine's tokens and `expected`, up to the first token that
        the trainer would not have chosen: after it the two continue different texts.

        proof: as `RolloutSide.proof` gives it. Raises HandoffError if the gap is too large, or not a number.
        """
        gap = 0.0
        for row, token, logprob in zip(expected, answer.completion_ids, answer.logprobs, strict=False):
            difference = abs(float(row[token]) - logprob)
            gap = difference if math.isnan(difference) else max(gap, difference)
            if math.isnan(gap) or token != int(row.argmax()):
                break
        if not gap <= self._tolerance:
            raise HandoffError(
                f"policy version {version}: engine and trainer differ by {gap:.3g} in the logprobs of the probe prompt "
                f"(tolerance {self._tolerance:g}): {causes(gap, proof)}"
            )
        return gap


def causes(gap: float, proof: str | None) -> str:
    """Explain why engine and trainer may differ, likeliest cause first. gap: of their logprobs, NaN or inf if one of
    them gives none. proof: as `RolloutSide.proof` gives it."""
    if not math.isfinite(gap):
        return "the weights, or numbers that one of them computes from them, are not finite"
    others = "own code for the architecture, an argument of the engine, an activation, hook or buffer changed by hand"
    if proof is None:
        return (
            f"the engine does not hold the trainer's weights (they were not compared in this handoff; verify_steps=1 "
            f"does), or it computes differently ({others})"
        )
    return (
        f"the engine computes this architecture differently ({others}); {proof}. rollout.engine=inplace or hf runs the "
        "trainer's own modules; probe_tolerance accepts such a gap"
    )
