"""The arguments of engines, and the handoff of weights to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybrid_rl.algos.options import key

ARGS_DOC = "what else the engine is made with, seldom changed"
HANDOFF_DOC = "how the weights get from the trainer to the engine, and how often the two are compared"


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
class Handoff:
    """The handoff of weights to an engine, and the comparison of engine and trainer after it."""

    probe_steps: int = key(
        8,
        "compare engine and trainer on a probe prompt at the first 3 handoffs and after every n-th step; 0 = never, "
        "and not by the tokens of each step either",
        minimum=0,
    )
    probe_tolerance: float | None = key(
        None, "largest logprob gap of the probe before the run stops; None = 1e-3; bfloat16: see vllm.md", above=0
    )

    # Exist only with an engine that has weights of its own, in CopyHandoff.
    transport, adopt_weights, lora = "auto", False, "merged"


@dataclass(frozen=True)
class CopyHandoff(Handoff):
    """The same for an engine with weights of its own."""

    transport: Literal["auto", "ipc", "distributed", "disk"] = key(
        "auto",
        "how weights get from the ranks' shards to their engines: ipc (read in place, on GPUs over the link between "
        "them), distributed (sent between ranks) or disk; auto = for each pair of ranks ipc if the reader has access, "
        "else distributed; a single rank copies its own",
    )
    weights_path: str | None = key(None, "transport=disk: a folder that all ranks can write and read")
    adopt_weights: bool = key(
        False,
        "with one rank, let trainer and engine share the weights' memory; handoffs then write nothing, and this memory "
        "cannot sleep",
    )
    lora: Literal["merged", "adapter"] = key(
        "merged",
        "how adapters (lora.r) get to vLLM: merged into its weights; or adapter = alone, into vLLM's own LoRA slot: "
        "weights are handed over once and adapters, which are few bytes, at every handoff; every pass computes with "
        "both",
    )
    verify_steps: int = key(
        1, "compare every byte of the engine's weights with the trainer's at every n-th handoff; 0 = never", minimum=0
    )
