"""The arguments of engines, and the comparison of an engine with the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_rl.algos.options import key

ARGS_DOC = "what else the engine is made with, seldom changed"
CHECK_DOC = "how often engine and trainer are compared, and what may differ"


@dataclass(frozen=True)
class EngineArgs:
    """Arguments of all engines."""

    max_num_batched_tokens: int = key(
        8192,
        "tokens of one pass (embedded engines: of prompts, in addition to decoding); longer prompts are computed in "
        "chunks (rollout.engine=hf: by themselves)",
        minimum=1,
    )
    max_num_waiting: int = key(
        65536, "requests of a rank that may wait in the engine; further ones are refused", minimum=1
    )


@dataclass(frozen=True)
class InPlaceArgs(EngineArgs):
    """The embedded engine, which decodes from the actor's own modules. If sequences outgrow the cache, the newest wait
    and are computed again."""

    enable_prefix_caching: bool = key(True, "prompts with a common beginning share its cache blocks within a rollout")
    block_size: int = key(16, "tokens of one KV block; the compiled CPU kernel needs a multiple of 16", minimum=1)
    cuda_graphs: bool = key(True, "on CUDA, replay decode passes as CUDA graphs, for batches of a few sizes")


@dataclass(frozen=True)
class VLLMArgs(EngineArgs):
    """vLLM in the trainer's processes. Any other argument of vLLM is an entry as well."""

    enable_prefix_caching: bool = key(True, "prompts with a common beginning share its cache blocks within a rollout")
    enforce_eager: bool | None = key(
        None, "no CUDA graphs and no compiled model: a faster start, slower steps; None = yes on CPUs"
    )
    per_request_seeds: bool = key(
        False, "make a sample's noise depend only on its own seed, on any rank; vLLM then samples more slowly"
    )
    plain_weights: bool = key(
        True, "keep weights as loaded even if the platform would pack them, so that they can be written directly"
    )
    others: dict[str, Any] = key({}, "every other argument of vLLM, under its own name", takes_rest=True)


@dataclass(frozen=True)
class HandoffCheck:
    """The comparison of engine and trainer after a handoff of weights."""

    probe_steps: int = key(
        8,
        "compare engine and trainer on a probe prompt at the first 3 handoffs and after every n-th step; 0 = never",
        minimum=0,
    )
    probe_tolerance: float | None = key(
        None, "largest logprob gap of the probe before the run stops; None = 1e-3; bfloat16: see vllm.md", above=0
    )


@dataclass(frozen=True)
class ByteCheck(HandoffCheck):
    """The same for an engine with weights of its own."""

    verify_steps: int = key(
        10, "compare every byte of the engine's weights with the trainer's at every n-th handoff; 0 = never", minimum=0
    )
