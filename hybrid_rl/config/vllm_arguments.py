"""Arguments of vLLM that cannot be given as rollout.vllm.NAME: why, or what to set instead.

They would change nothing here, or what the engine generates without the trainer knowing of it. Those of all versions
that are supported; which of the others exist is vLLM's to say, once it is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.errors import ConfigError
from hybrid_rl.process.files import read_yaml

_OF_GRAPHS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


@functools.cache
def reserved() -> Mapping[str, str]:
    """Return the reasons by argument."""
    return {name: reason for reason, names in read_yaml(Path(__file__).with_suffix(".yaml")).items() for name in names}


def check_arguments(config: Any, device: str) -> None:
    """Raise ConfigError for an argument of vLLM that is not the user's to give, or that would do nothing.

    config: a VLLMConfig. device: cpu or cuda; on CPUs the engine has no CUDA graphs unless it is told to compile.
    """
    is_eager = device == "cpu" if config.enforce_eager is None else config.enforce_eager
    for name in config.engine_args:
        if name in reserved():
            raise ConfigError(f"rollout.vllm.{name} cannot be set: {reserved()[name]}")
        if is_eager and name in _OF_GRAPHS:
            raise ConfigError(f"rollout.vllm.{name} would do nothing: the engine has no CUDA graphs (enforce_eager)")
        if config.tensor_parallel_size == 1 and name == "disable_custom_all_reduce":
            raise ConfigError(f"rollout.vllm.{name} would do nothing with tensor_parallel_size=1; leave it out")
