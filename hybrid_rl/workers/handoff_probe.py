"""The probe of a handoff: one prompt, continued greedily by trainer and engine, whose logprobs must agree.

The trainer's half comes first, while its weights are in memory, and the engine's after it, when they may have left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import is_rounded, samples_rounded
from hybrid_rl.engines.base import FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.errors import HandoffError
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.experts.routing import find_routers
from hybrid_rl.models.int8.int8_model import rounded_layers
from hybrid_rl.models.int8.rounded_keys import rounded_keys
from hybrid_rl.models.row import Layout
from hybrid_rl.resharding.handoff.base import PROBE_TOKENS, num_probe_passes

PROBE_REQUEST = -1
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
# In 16 bits no number fits every model: one rounding of its embeddings moves SmolLM2's own logprobs by 0.08 to 0.3 (the
# root mean square over the vocabulary), those of a model with random weights by a tenth of that. Engine and trainer may
# differ by so many times what the model's own do on average; and by so many times what the token does that moves most,
# as one does whose router is about to choose another expert.
NOISE_FACTOR, TOKEN_FACTOR = 4.0, 2.0
# An engine that rounds its weights is compared with the trainer's layers over weights that are rounded as well. It also
# rounds what its layers read, much less (`models/int8/rounding.py`): the rounding of weights moves SmolLM2's logprobs
# by 0.165 (the root mean square over the vocabulary), that of what its layers read by 0.008.
ROUNDED_FACTOR = 0.25
# The trainer attends over rounded keys and values too, if the engine does. But sums in another order round some to
# other integers, and the next layers many: after SmolLM2's 30 layers engine and trainer differ by 0.6 times what the
# rounding itself does (its root mean square is 0.05). So it is noise, as that of 16 bits is, with the same factors.
# What a router reads has been rounded many times, so it is moved by more of its last places than embeddings are.
ROUTER_UNITS = 8.0


class HandoffProbe:
    """The prompt of a run's probes, and how far engine and trainer may differ. prompt_ids: of the prompt; dtype: that
    the trainer computes in."""

    def __init__(self, prompt_ids: tuple[int, ...], config: TrainerConfig, dtype: torch.dtype) -> None:
        self._prompt_ids = prompt_ids
        self._num_tokens = min(PROBE_TOKENS, config.rollout.max_completion_length)
        self._tolerance, self._dtype = config.rollout.handoff.probe_tolerance, dtype
        if config.model.exact and self._tolerance is None:
            self._tolerance = 0.0
        self._rounds_weights = is_rounded(config.rollout)
        self._rounds_keys = config.rollout.kv_cache_dtype == "int8"
        self._is_rounded = samples_rounded(config.rollout)

    @property
    def request(self) -> RolloutRequest:
        """What the engine is asked to generate."""
        return RolloutRequest(
            PROBE_REQUEST, self._prompt_ids, SamplingParams(max_tokens=self._num_tokens, temperature=0.0)
        )

    @torch.no_grad()
    def expected(self, model: CausalLM) -> Tensor:
        """Continue the prompt with the likeliest tokens. Returns ln p of the whole vocabulary at each of them, float32
        [1, k, V] on the host; in 16 bits [2, k, V], the second time with embeddings that are moved by half a unit in
        their last place: what one rounding does to this model on these tokens. What routers read is moved as well, and
        both ways: the one counts that moves a token more. If the engine rounds its weights, or keys and values, the
        trainer's are rounded for all that, and there is one more at the end, without the rounding of keys and values,
        or without that of weights if it is the only one. Collective if the model is sharded."""
        with rounded_layers(model.module) if self._rounds_weights else nullcontext():
            with rounded_keys(model) if self._rounds_keys else nullcontext():
                expected, token_ids = self._continued(model)
            if self._rounds_keys:
                expected[-1] = model.row_distribution(self._row_of(token_ids), 1.0)
        if self._rounds_weights and not self._rounds_keys:
            expected[-1] = model.row_distribution(self._row_of(token_ids), 1.0)
        return expected

    def _row_of(self, token_ids: Tensor) -> PackedRow:
        """Return the whole continuation as one row whose labels are its tokens."""
        places = torch.arange(len(token_ids) - 1, device=token_ids.device)
        last = places[len(self._prompt_ids) - 1 :]
        return PackedRow(token_ids[:-1], places, token_ids[last + 1], last, Layout((len(places),)))

    def _continued(self, model: CausalLM) -> tuple[Tensor, Tensor]:
        """Return what `expected` does, but for the trainer as it is, and the tokens of prompt and continuation."""
        token_ids = torch.tensor(self._prompt_ids, device=model.device)
        num_passes = num_probe_passes(model.dtype, is_rounded=self._is_rounded)
        # Filled row by row: a vocabulary is wide, and this is what the probe keeps in memory.
        shape = (num_passes, self._num_tokens, model.head.out_features)
        expected = torch.empty(shape, dtype=torch.float32, device="cpu")
        for place in range(self._num_tokens):
            length = len(token_ids)
            last = torch.full((1,), length - 1, device=model.device)
            positions = torch.arange(length, device=model.device)
            row = PackedRow(token_ids, positions, token_ids[last], last, Layout((length,)))
            logprobs = model.row_distribution(row, 1.0)
            expected[0, place] = logprobs[0]
            token_ids = torch.cat([token_ids, logprobs.argmax(1)])
            del logprobs
        if num_probe_passes(model.dtype) > 1:
            row = self._row_of(token_ids)
            with rounded(model, 1.0):
                expected[1] = model.row_distribution(row, 1.0)
            if find_routers(model.module):
                # A router that is about to choose another expert does so in one of two opposite directions.
                with rounded(model, -1.0):
                    back = model.row_distribution(row, 1.0).to(expected)
                for place, (plain, there) in enumerate(zip(expected[0], expected[1], strict=True)):
                    if _distance(plain, back[place]) > _distance(plain, there):
                        expected[1, place] = back[place]
        return expected, token_ids

    def compare(self, expected: Tensor, answer: FinishedSample, version: int, proof: str | None) -> float:
        """Return the largest gap between the logprobs of the engine's tokens and `expected`, up to the first token that
        the trainer would not have chosen: after it the two continue different texts.

        proof: as `RolloutSide.proof` gives it. Raises HandoffError if the gap is too large, or not a number.
        """
        rows, tolerance = expected[0], self._tolerance
        if tolerance is None:
            moved = expected[num_probe_passes(self._dtype) - 1]
            tolerance = max(PROBE_TOLERANCE[self._dtype], _noise(rows, moved))
            if self._rounds_keys:
                tolerance = max(tolerance, _noise(rows, expected[-1]))
            elif self._rounds_weights:
                error = max(_distance(row, whole) for row, whole in zip(rows, expected[-1], strict=True))
                tolerance = max(tolerance, ROUNDED_FACTOR * math.sqrt(error))
        gap = 0.0
        for row, token, logprob in zip(rows, answer.completion_ids, answer.logprobs, strict=False):
            difference = abs(float(row[token]) - logprob)
            gap = difference if math.isnan(difference) else max(gap, difference)
            if math.isnan(gap) or token != int(row.argmax()):
                break
        if not gap <= tolerance:
            raise HandoffError(
                f"policy version {version}: engine and trainer differ by {gap:.3g} in the logprobs of the probe prompt "
                f"(tolerance {tolerance:.3g}): {causes(gap, proof)}"
            )
        return gap


def _noise(rows: Tensor, moved: Tensor) -> float:
    """Return how far engine and trainer may differ if the model's own ln p [k, V] are moved so far by chance."""
    squares = [_distance(row, its) for row, its in zip(rows, moved, strict=True)]
    return max(NOISE_FACTOR * math.sqrt(statistics.fmean(squares)), TOKEN_FACTOR * math.sqrt(max(squares)))


def _distance(row: Tensor, moved: Tensor) -> float:
    """Return the mean square over the vocabulary of how far ln p [V] of a token was moved."""
    return float((moved - row).nan_to_num(0.0, 0.0, 0.0).square().mean())


@contextmanager
def rounded(model: CausalLM, sign: float) -> Iterator[None]:
    """Move the embeddings of every token by half a unit in the last place inside the block, up or down by chance, and
    what routers read by ROUTER_UNITS as much; the same on every rank. sign: -1.0 moves all of them the other way."""
    generator = torch.Generator().manual_seed(0)

    def moved(tensor: Tensor, units: float) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        factors = 1 + sign * units * signs * torch.finfo(tensor.dtype).eps / 2
        return (tensor.float() * factors).to(tensor.dtype)

    def embed(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return moved(output, 1.0)

    def route(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def shifted(value: Any) -> Any:
            return moved(value, ROUTER_UNITS) if isinstance(value, Tensor) and value.is_floating_point() else value

        return tuple(map(shifted, inputs)), {name: shifted(value) for name, value in named.items()}

    with ExitStack() as hooks:
        hooks.callback(model.module.get_input_embeddings().register_forward_hook(embed).remove)
        for router, _ in find_routers(model.module):
            hooks.callback(router.register_forward_pre_hook(route, with_kwargs=True).remove)
        yield


def causes(gap: float, proof: str | None) -> str:
    """Explain why engine and trainer may differ, likeliest cause first. gap: of their logprobs, NaN or inf if one of
    them gives none. proof: as `RolloutSide.proof` gives it."""
    if not math.isfinite(gap):
        return "the weights, or numbers that one of them computes from them, are not finite"
    others = "own code for the architecture, an argument of the engine, an activation, hook or buffer changed by hand"
    if proof is None:
        return (
            "the engine does not hold the trainer's weights (they were not compared in this handoff; "
            f"handoff.verify_steps=1 does), or it computes differently ({others})"
        )
    return (
        f"the engine computes this architecture differently ({others}); {proof}. rollout.engine=inplace or hf runs the "
        "trainer's own modules; handoff.probe_tolerance accepts such a gap"
    )
