"""Traces of vLLM models of any size and tensor parallelism, made without weights, devices or other ranks.

For planning only: what vLLM would load where is seen on meta, before post-processing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model

from hybrid_rl.resharding.trace import Trace
from hybrid_rl.vllm.loader import trace_model
from hybrid_rl.weights.views import CheckpointViews, checkpoint_views

GROUPS = [name for name, kind in parallel_state.__annotations__.items() if "GroupCoordinator" in str(kind)]


def views_on_meta(config: PreTrainedConfig) -> CheckpointViews:
    """Return the checkpoint of a causal language model with this config, in fp32 as it is trained."""
    with torch.device("meta"):
        return checkpoint_views(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def trace_on_meta(
    config: PreTrainedConfig, architecture: str, views: CheckpointViews, rank: int, size: int, dtype: torch.dtype
) -> Trace:
    """Trace one rank of a tensor-parallel group, from views of a model with this config.

    architecture: the class that vLLM builds. dtype: of the engine.
    """
    with stand_in_model(config, architecture, rank, size, dtype, "meta") as model:
        return trace_model(model, views)


@contextmanager
def stand_in_model(
    config: PreTrainedConfig, architecture: str, rank: int, size: int, dtype: torch.dtype, device: str
) -> Iterator[Any]:
    """Yield one rank's model as vLLM builds it, before its weights are loaded, without the other ranks. Inside, it can
    load weights; it cannot compute."""
    with tempfile.TemporaryDirectory() as folder, _stand_in_groups(rank, size):
        Path(folder, "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))
        vllm_config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype=dtype),  # type: ignore[call-arg]
            parallel_config=ParallelConfig(tensor_parallel_size=size, distributed_executor_backend="external_launcher"),
        )
        with set_current_vllm_config(vllm_config):
            with _default_dtype(dtype), torch.device(device):
                model = initialize_model(vllm_config)
            yield model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set PyTorch's default inside. vLLM has such a context manager too, but in 0.25.1 it does not put the old dtype
    back if a model cannot be built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _stand_in_groups(rank: int, size: int) -> Iterator[None]:
    """Replace vLLM's process groups by what models ask of them while they are built."""
    alone, shared = _group(0, 1), _group(rank, size)
    before = {name: getattr(parallel_state, name) for name in GROUPS}
    for name in GROUPS:
        setattr(parallel_state, name, shared if name == "_TP" else alone)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def _group(rank: int, size: int) -> SimpleNamespace:
    process_group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        rank=rank,
        local_rank=rank,
        ranks=list(range(size)),
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=process_group,
        cpu_group=process_group,
        unique_name="stand-in",
    )
