"""Requests in vLLM's words, and what it answers."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import RequestOutputKind

from hybrid_rl.engines.base import RolloutRequest, SamplingParams, derive_seed
from hybrid_rl.errors import DataError, EngineStateError

COLDEST = 0.01  # vLLM samples at this temperature if one above 0 but below it is asked for


def check_sampling(request: RolloutRequest) -> None:
    """Raise DataError for what vLLM would do differently from what is asked for."""
    temperature = request.params.temperature
    if 0 < temperature < COLDEST:
        raise DataError(
            f"request {request.id}: vLLM's lowest sampling temperature is {COLDEST}, but temperature={temperature}; "
            f"use 0 (greedy) or at least {COLDEST}"
        )


def sampled_logprobs(made: Any) -> list[float]:
    """Return ln p of each token of a CompletionOutput, from vLLM's columns. Raises EngineStateError if they are not of
    these tokens."""
    flat = made.logprobs
    if flat is None or [flat.token_ids[start] for start in flat.start_indices] != list(made.token_ids):
        raise EngineStateError(f"vLLM gave the tokens {list(made.token_ids)} logprobs of others: {flat}")
    return [flat.logprobs[start] for start in flat.start_indices]


def vllm_params(params: SamplingParams, *, has_own_seed: bool, num_begun: int = 0) -> VLLMSamplingParams:
    """Return the same in vLLM's words. has_own_seed: draw this request's noise from its own seed, not from the
    engine's. num_begun: tokens of the completion that were made before, which vLLM takes for a part of the prompt; the
    rest of it has noise of its own.

    Stop strings are looked for by us: vLLM has no tokenizer here.
    """
    return VLLMSamplingParams(
        max_tokens=params.max_tokens - num_begun,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        seed=(derive_seed(params.seed, num_begun) if num_begun else params.seed) % 2**63 if has_own_seed else None,
    )
