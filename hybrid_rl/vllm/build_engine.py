"""Building an LLMEngine in this process, and taking it down."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from vllm import EngineArgs, envs
from vllm.config import CacheConfig
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from hybrid_rl.compat.vllm import detach_finalizer, drop_world
from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.controller.session import temporary_folder
from hybrid_rl.errors import ConfigError, EngineStateError, HybridRLError, ModelError
from hybrid_rl.vllm.arguments import kv_cache_bytes
from hybrid_rl.vllm.process_state import process_kept
from hybrid_rl.vllm.switches import COMPILER_VARIABLES, compile_alone
from hybrid_rl.vllm.versions import has

# Packages that vLLM's code of models may import, and that `make vllm` leaves out.
INSPECTED = ("torchvision", "torchaudio")
RUN = "HYBRID_RL_VLLM_RUN"  # the environment variable with the name of the run, for our worker

_folders = contextlib.ExitStack()
# Engines of this process: vLLM's groups are the process's, so there is one at most.
LIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def require_none_live() -> None:
    """Raise ConfigError while a vLLM engine of this process has not been closed."""
    if LIVE:
        gc.collect()
    if LIVE:
        raise ConfigError(
            "another Trainer of this process has a vLLM engine, and vLLM can live once in a process; close() that one "
            "first"
        )


def check_platform(device: torch.device) -> None:
    """Raise ConfigError unless this vLLM computes on the model's device: each build is for one kind of device."""
    if current_platform.device_type != device.type:
        raise ConfigError(
            f"rollout.engine=vllm: this vLLM computes on {current_platform.device_type}, and the model is on "
            f"{device.type}; load the model there (device=auto, or module.to(...)), or install vLLM for {device.type}"
        )


def own_group(device: torch.device) -> None:
    """Start torch.distributed for a single rank."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with process_kept():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def run_name() -> str:
    """Return a name that all ranks know and no other run has."""
    names = [f"hybrid_rl-{os.getpid()}-{time.time_ns()}"]
    dist.broadcast_object_list(names, src=0)
    return names[0]


def own_sockets() -> dict[str, str]:
    """Return the variable that says where vLLM puts the sockets between ranks of a replica, which it does not remove:
    in a folder that is removed with the engine, or, if the process was killed, by the next one."""
    return {"VLLM_RPC_BASE_PATH": str(_folders.enter_context(temporary_folder("hrl-vllm-")))}


def variables(device: torch.device, run: str) -> dict[str, str]:
    """Return the environment in which vLLM is built: in this process, as this rank, binding no threads to cores. run:
    see `run_name`; it must not be part of vLLM's configuration, by which what has been compiled is found again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # PyTorch's settings of its allocator, of whose two names it prefers the newer, under the older one, which vLLM
    # reads: around its own pools, which cannot do with segments that grow (pytorch/pytorch#147851), it switches them
    # off if it knows of them.
    settings = os.environ.get("PYTORCH_ALLOC_CONF")
    allocator = {} if settings is None else {"PYTORCH_CUDA_ALLOC_CONF": settings}
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(torch.cuda.current_device() if device.type == "cuda" else 0),
        "LOCAL_WORLD_SIZE": "1",
        RUN: run,
        **COMPILER_VARIABLES,
        **allocator,
    }


# Errors that are not the fault of vLLM's code for a model: ours, too little memory, another rank.
TOLD_ALREADY = (HybridRLError, torch.OutOfMemoryError, dist.DistError)
# Errors that vLLM's code raises for a model, or for arguments, that it does not take.
OF_CODE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def build(
    arguments: dict[str, Any], config: VLLMRolloutConfig, max_length: int, device: torch.device, memory_share: float
) -> tuple[LLMEngine, int]:
    """Build the engine; return it and the bytes of its cache. Raises ConfigError or ModelError, with vLLM's own words,
    for what it refuses."""
    check_platform(device)
    compile_alone()
    try:
        vllm_config = EngineArgs(**arguments).create_engine_config()
        num_bytes = kv_cache_bytes(config, vllm_config, max_length=max_length, device=device, memory_share=memory_share)
        give_cache(vllm_config.cache_config, num_bytes)
        return LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True), num_bytes
    except TOLD_ALREADY:
        raise
    except (*OF_CODE, ImportError) as error:
        raise refusal(error) from error


def refusal(error: Exception) -> ConfigError | ModelError:
    """Return what to raise for an error of vLLM while it builds an engine: its own words, and what to do."""
    others = "or set rollout.engine=inplace (or hf)"
    if isinstance(error, ImportError):
        package = f"pip install {error.name}, " if error.name else ""
        return ModelError(f"vLLM lacks a package for this model: {error}; {package}{others}")
    words = reason(error)
    if "failed to be inspected" in words:  # in a process of its own, whose error is only in vLLM's log
        missing = [name for name in INSPECTED if importlib.util.find_spec(name) is None]
        lacks = f"Its multimodal models import {' and '.join(missing)}, not installed here: "
        advice = (
            f"{lacks}pip install {' '.join(missing)}" if missing else "vLLM's log above says why: take another model"
        )
        return ModelError(f"vLLM cannot load the code of this model: {words.rstrip('. ')}. {advice}, {others}")
    if "nvcc" in words:  # FlashInfer, vLLM's first choice on some GPUs, compiles its kernels as it is first used
        return ModelError(
            f"vLLM's kernels cannot be compiled here: {words.rstrip('. ')}; pip install nvidia-cuda-nvcc "
            "nvidia-cuda-cccl (of CUDA's version), set rollout.engine_args.attention_backend=FLASH_ATTN, "
            f"{others}"
        )
    if "support LoRA" in words:
        return ConfigError(
            f"vLLM has no slots for adapters of this model: {words.rstrip('. ')}; set handoff.lora=merged"
        )
    if isinstance(error, (ValueError, NotImplementedError)):
        return ConfigError(
            f"vLLM refuses this model or these entries of rollout.engine_args: {words}; change them, {others}"
        )
    return ModelError(
        f"vLLM fails on this model ({type(error).__name__}: {words}): its code for the architecture expects another "
        f"config.json or other weights; {others.removeprefix('or ')}, or try another version of vLLM"
    )


def explain_step(error: BaseException, *, is_first: bool) -> None:
    """Raise EngineStateError for an error of a step of vLLM's that says nothing of what led to it, and ModelError for
    one of the first step: vLLM's code does not run this model."""
    words = str(error).strip().splitlines()[:1]
    message = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
    if "does not use offset" in str(error):  # vLLM takes back the noise of a pass whose prompt was not yet whole
        raise EngineStateError(
            "vLLM cannot compute a prompt in chunks on a CPU with engine_args.per_request_seeds=true "
            f"({words[0]}); set engine_args.per_request_seeds=false, or raise "
            "max_num_batched_tokens above the tokens of all prompts of a pass "
            "(max_num_seqs times the longest)"
        ) from error
    if is_first and isinstance(error, OF_CODE) and not isinstance(error, TOLD_ALREADY):
        raise ModelError(
            f"vLLM cannot run this model: its first step ended with {message}; set rollout.engine=inplace (or hf), "
            "or try another version of vLLM"
        ) from error


class SizedCache(CacheConfig):
    """A CacheConfig whose bytes are not part of the hash by which vLLM finds what it has compiled: they depend on what
    is free at the start, and what is compiled does not depend on them. vLLM 0.25.1 has them in."""

    def compute_hash(self) -> str:
        """Return the hash without the bytes."""
        own: Any = self  # a dataclass by a decorator that type checkers do not see through
        num_bytes, own.kv_cache_memory_bytes = own.kv_cache_memory_bytes, None
        try:
            return super().compute_hash()
        finally:
            own.kv_cache_memory_bytes = num_bytes


def give_cache(config: CacheConfig, num_bytes: int) -> None:
    """Say how large the cache is to be."""
    config.__class__ = SizedCache
    config.kv_cache_memory_bytes = num_bytes


def reason(error: Exception) -> str:
    """Return what vLLM says is wrong, without the whole configuration that pydantic shows next to it."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = [(".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")) for item in error.errors()]
    return "; ".join(f"{place}: {message}" if place else message for place, message in problems)


def tear_down(llm: LLMEngine, *, with_all_groups: bool) -> None:
    """Shut vLLM down, but not torch.distributed, which is the trainer's and which vLLM's own shutdown would end."""
    core = llm.engine_core.engine_core
    if has("shuts_down_when_collected", llm):
        detach_finalizer(llm.engine_core)
    llm.renderer.shutdown()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    envs.disable_envs_cache()
    release_groups(with_all=with_all_groups)


def release_groups(*, with_all: bool) -> None:
    """Take vLLM's process groups down. with_all: torch.distributed too, which is the trainer's if it has ranks."""
    try:
        parallel_state.destroy_model_parallel()
        # vLLM would take its group of all ranks for the next engine too, whatever became of torch.distributed.
        drop_world()
    finally:
        _folders.close()
        if with_all and dist.is_initialized():
            dist.destroy_process_group()
