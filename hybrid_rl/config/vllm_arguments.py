"""Arguments of vLLM that cannot be given as rollout.engine_args.NAME: why, or what to set instead.

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

    config: a VLLMRolloutConfig. device: cpu or cuda; on CPUs there are no CUDA graphs unless it is told to compile.
    """
    args = config.engine_args
    is_eager = device == "cpu" if args.enforce_eager is None else args.enforce_eager
    for name in args.others:
        if name in reserved():
            raise ConfigError(f"rollout.engine_args.{name} cannot be set: {reserved()[name]}")
        if is_eager and name in _OF_GRAPHS:
            raise ConfigError(f"rollout.engine_args.{name} would do nothing: there are no CUDA graphs (enforce_eager)")
        if name == "cuda_graphs":
            raise ConfigError("rollout.engine_args.cuda_graphs belongs to rollout.engine=inplace; set enforce_eager")
        if config.tensor_parallel_size == 1 and name == "disable_custom_all_reduce":
            raise ConfigError(f"rollout.engine_args.{name} would do nothing with tensor_parallel_size=1; leave it out")
