"""From our configuration to vLLM's arguments."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs

from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.config.vllm_arguments import check_arguments
from hybrid_rl.engines.guards import free_cache_bytes
from hybrid_rl.errors import ConfigError

CPU_BLOCK = 32  # tokens: the smallest that vLLM's attention on CPUs takes
WORKER = "hybrid_rl.vllm.cpu_worker.RunWorker"


def engine_arguments(
    config: VLLMRolloutConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_length: int,
    seed: int,
    trust_remote_code: bool,
    can_sleep: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Return the keyword arguments of EngineArgs, without the size of the cache. folder: the one with config.json.

    Raises ConfigError for an argument in config.engine_args.others that vLLM does not know, or that is not the user's.
    """
    args = config.engine_args
    is_eager = device.type == "cpu" if args.enforce_eager is None else args.enforce_eager
    check_arguments(config, device.type)
    names = {item.name for item in dataclasses.fields(EngineArgs)}
    for name in args.others:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"rollout.engine_args.{name} is not an argument of the vLLM that is installed{hint}")
    # The next pass starts while the last one's tokens are on their way; vLLM has it on GPUs only.
    defaults: dict[str, Any] = {"async_scheduling": device.type == "cuda"}
    if device.type == "cpu":
        # Of a conversation vLLM finds only full blocks again; by default they have 128 tokens there, 16 on a GPU.
        defaults["block_size"] = CPU_BLOCK
    ours = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "max_model_len": max_length,
        # Nothing is sized by it if the cache has its size; vLLM only requires so much to be free.
        "gpu_memory_utilization": 0.01,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "enable_prefix_caching": args.enable_prefix_caching,
        "enforce_eager": is_eager,
        "load_format": "dummy",
        "use_tqdm_on_load": False,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "generation_config": "vllm",
    }
    if can_sleep:
        ours["enable_sleep_mode"] = True
    if device.type == "cpu":
        ours["worker_cls"] = WORKER
    return {**defaults, **args.others, **ours}


def kv_cache_bytes(
    config: VLLMRolloutConfig, vllm_config: Any, *, max_length: int, device: torch.device, memory_share: float
) -> int:
    """Return the bytes that the cache is given: as configured, or room for max_num_seqs full sequences, at most a share
    of what is free now, and for one sequence in any case. Raises ConfigError if a configured size does not hold one."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    parts = 1 if model.use_mla else 2  # one latent, or keys and values
    heads = model.get_num_kv_heads(parallel)
    token_bytes = parts * model.get_num_layers(parallel) * heads * model.get_head_size() * model.dtype.itemsize
    block = cache.block_size or 16
    sequence_bytes = -(-max_length // block) * block * token_bytes
    own = block * token_bytes  # vLLM keeps a block for itself
    configured_bytes = config.kv_cache_memory_bytes
    if configured_bytes is not None:
        if configured_bytes < sequence_bytes + own:
            raise ConfigError(
                f"kv_cache_memory_bytes={configured_bytes} cannot hold one sequence of {max_length} tokens, which "
                f"takes {sequence_bytes + own}; raise it, leave it out, or lower max_completion_length"
            )
        return configured_bytes
    wanted = config.max_num_seqs * sequence_bytes + own
    return max(sequence_bytes + own, min(wanted, free_cache_bytes(device, memory_share)))
