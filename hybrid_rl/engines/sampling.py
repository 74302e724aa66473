"""From logits to tokens and their log-probabilities.

One uniform number per token, a pure function of (seed, position), is turned into a token by inverting the cumulative
distribution. A sample therefore does not depend on what else is in the batch, up to floating-point ties in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.compat.native import keyed_uniform, operator
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import BrokenModelError


@dataclass(frozen=True)
class SamplingTensors:
    """The parameters of B requests as tensors [B].

    truncates: a row needs top-k, top-p or min-p. greedy: a row has temperature 0. penalises: a row has a repetition
    penalty other than 1.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor
    truncates: bool
    greedy: bool
    penalises: bool

    @property
    def cuts(self) -> Tensor:
        """Which rows are truncated, bool [B]; greedy ones never are."""
        return ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)) & (self.temperature > 0)

    def rows(self, index: Tensor) -> SamplingTensors:
        """Return the parameters of some rows, int64 [b]."""
        return replace(self, **{name: getattr(self, name)[index] for name in COLUMNS})

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
        """Collect the parameters of B requests."""
        columns = {n: np.array([getattr(p, n) for p in params], dtype) for n, dtype in COLUMNS.items()}
        tensors: dict[str, Any] = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        return cls(**tensors, **needs_of(columns))


# The parameters that become columns of numbers.
COLUMNS = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "seed": np.int64,
}


def needs_of(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """Return what a row of these COLUMNS needs: see SamplingTensors."""
    cuts = (columns["top_k"] > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0)
    return {
        "truncates": bool(cuts.any()),
        "greedy": bool((columns["temperature"] == 0).any()),
        "penalises": bool((columns["repetition_penalty"] != 1).any()),
    }


def sample(logits: Tensor, params: SamplingTensors, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Choose one token per row.

    logits: float32 [B, V]; positions: int64 [B], index of the token within its completion. Returns tokens int64 [B] and
    float32 [B] ln p of each under the distribution that it was drawn from: tempered and truncated; for temperature 0
    under the model's own distribution. A repetition penalty is applied before (`penalise`).

    Nothing waits for the device. If a row is not a distribution (a logit is NaN or +inf, or none is above -inf) its
    logprob is NaN: hand the logprobs to `check_finite` once they are on the host.
    """
    is_covered = logits.device.type == "cpu" and logits.dtype == torch.float32
    compiled = operator("sample") if is_covered else None
    if compiled is None:
        return sample_torch(logits, params, positions)
    tokens, logprobs = compiled(logits.contiguous(), params.temperature, params.seed, positions.contiguous())
    if params.truncates:  # which does not change how the other rows are drawn
        rows = params.cuts.nonzero()[:, 0]
        tokens[rows], logprobs[rows] = sample_torch(logits[rows], params.rows(rows), positions[rows])
    return tokens, logprobs


def sample_torch(logits: Tensor, params: SamplingTensors, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`sample` in operations of PyTorch, for every device and with truncation; the oracle of the compiled operator."""
    return choose_torch(logits, params, uniform_numbers(params.seed, positions))


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the number in (0, 1) that picks a token, float64 [B], a pure function of int64 seeds [B] and positions
    [B].

    On a GPU it would cost far more launches than a layer: make it on the host and upload it.
    """
    # Two words make one fine-grained number: 23 bits alone would never draw a token below p = 1e-7.
    words = keyed_uniform(seeds, positions, 2).to(torch.float64)
    return words[:, 0] + (words[:, 1] - 0.5) * 2.0**-23


def choose(logits: Tensor, params: SamplingTensors, uniform: Tensor) -> Tensor:
    """`sample` with given uniform numbers, float64 [B], for devices other than a CPU.

    Returns int32 [B, 2], to be read by `chosen_on_host` in one transfer: the token and the bits of its float32 logprob.
    """
    if params.truncates:
        return in_one(*choose_torch(logits, params, uniform))
    return choose_plain(logits, params.temperature, uniform)


def choose_plain(logits: Tensor, temperature: Tensor, uniform: Tensor, out: Tensor | None = None) -> Tensor:
    """`choose` without truncation. out: int32 [B, 2] to write into; None = a new tensor.

    On CUDA these are two launches, in PyTorch about twenty. Nothing depends on values that the host would have to know:
    it can be captured in a CUDA graph.
    """
    if draws_in_triton(logits.device):
        from hybrid_rl.engines import triton_sampling  # imports Triton, which a CPU may lack

        return triton_sampling.choose(logits, temperature, uniform, out)
    chosen = in_one(*_draw(logits, _relative(logits, temperature), temperature, uniform))
    return chosen if out is None else out.copy_(chosen)


def draws_in_triton(device: torch.device) -> bool:
    """Return whether the sampling kernels run there."""
    return device.type == "cuda"


def in_one(tokens: Tensor, logprobs: Tensor) -> Tensor:
    """Tokens [B] and float32 logprobs [B] as int32 [B, 2]."""
    return torch.stack((tokens.int(), logprobs.float().view(torch.int32)), 1)


def chosen_on_host(chosen: Tensor) -> tuple[npt.NDArray[np.int64], list[float]]:
    """Return the tokens and logprobs in int32 [B, 2] of any device: the one time in a step that the host waits."""
    read = chosen.cpu().numpy()
    return read[:, 0].astype(np.int64), np.ascontiguousarray(read[:, 1]).view(np.float32).tolist()


def choose_torch(logits: Tensor, params: SamplingTensors, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`sample` with given uniform numbers, float64 [B], in PyTorch; the oracle of `triton_sampling.py`."""
    relative = _relative(logits, params.temperature)
    if params.truncates:
        relative = truncate(relative, params)
    return _draw(logits, relative, params.temperature if params.greedy else None, uniform)


def _relative(logits: Tensor, temperature: Tensor) -> Tensor:
    # The best logit is taken off before the temperature divides: the other way round, a logit of 1000 would lose 3e-5.
    return (logits - logits.amax(1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)[:, None]


def _draw(logits: Tensor, relative: Tensor, temperature: Tensor | None, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """temperature: None = no row is greedy."""
    # Summed in float64: in float32, whether 150,000 terms add up to five digits or to seven depends on the processor.
    cumulative = relative.exp().to(torch.float64).cumsum(1)
    total = cumulative[:, -1:]
    # Scaled by the total, so that rounding in the sum cannot push the draw past the last token; NaN would.
    tokens = torch.searchsorted(cumulative, uniform[:, None] * total)[:, 0].clamp(max=logits.shape[1] - 1)
    if temperature is not None:
        tokens = torch.where(temperature > 0, tokens, logits.argmax(1))
    logprobs = relative.gather(1, tokens[:, None]) - total.log()
    return tokens, logprobs[:, 0].to(torch.float32)


def check_finite(logprobs: Sequence[float]) -> None:
    """Raise BrokenModelError if `sample` marked a row: its logits were not a distribution.

    logprobs: those of one step, on the host.
    """
    broken = sum(map(math.isnan, logprobs))
    if broken:
        raise BrokenModelError(
            f"the model's logits are not finite in {broken} of {len(logprobs)} rows: its weights have diverged"
        )


def penalise(logits: Tensor, penalty: Tensor, history: Tensor) -> Tensor:
    """Make the tokens that a sequence already holds less likely (repetition penalty above 1) or more likely (below 1).

    Positive logits are divided by the penalty and the others multiplied, once per distinct token, however often it
    occurred (CTRL, arXiv:1909.05858, with the sign rule of transformers); a penalty of 1 changes nothing.

    Args:
        logits: float32 [B, V], before temperature and truncation.
        penalty: float32 [B], above 0.
        history: int64 [B, L], tokens of prompt and completion in any order, at least one per row; -1 in places
            that hold none.

    Returns:
        float32 [B, V], a new tensor.
    """
    # Empty places repeat a token of their row: it gets the same value twice.
    index = torch.where(history >= 0, history, history.amax(1, keepdim=True))
    chosen = logits.gather(1, index)
    return logits.scatter(1, index, torch.where(chosen > 0, chosen / penalty[:, None], chosen * penalty[:, None]))


def truncate(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Keep the tokens that top-k, top-p and min-p allow (the best one always).

    logits: float32 [B, V], after the temperature; any constant may be missing, so logprobs will do. Returns float32
    [B, V], -inf for what was cut and the rest as it was, not normalised. Top-p keeps the smallest set of best tokens
    whose mass reaches p (Holtzman et al., arXiv:1904.09751); min-p keeps p >= min_p * p_best (arXiv:2407.01082). Greedy
    rows, and rows that ask for none of these, lose nothing.
    """
    ordered, order = logits.sort(dim=1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(params.top_k > 0, params.top_k, logits.shape[1])
    weights = (ordered - ordered[:, :1]).exp().to(torch.float64)
    mass = weights.cumsum(1)
    keep = (rank < top_k[:, None]) & (mass - weights < params.top_p[:, None] * mass[:, -1:])
    keep &= ordered >= ordered[:, :1] + params.min_p[:, None].log()
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter(1, order, keep)
    return logits.masked_fill(~kept & params.cuts[:, None], -torch.inf)
