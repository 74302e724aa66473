"""Ranks: how a model is sharded over them, and the processes in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybrid_rl.algos.options import entries, key


@dataclass(frozen=True)
class FSDPConfig:
    """Sharding of a model over several ranks with FSDP2, with fp32 shards as masters. One rank shards nothing."""

    dp_replicate: int = key(
        1, "hybrid sharding: copies of the model, each sharded over num_ranks / dp_replicate ranks", minimum=1
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key("float32", "dtype in which gradients are summed over ranks")
    reshard_after_forward: bool = key(
        True, "free a block's full weights between its forward and its backward pass: less memory, one more all-gather"
    )
    sync_every_micro_batch: bool | None = key(
        None,
        "reduce gradients after every micro-batch: they stay sharded, at one more reduction each; None = yes on GPUs, "
        "whose memory whole gradients would fill",
    )


@dataclass(frozen=True)
class ControllerConfig:
    """The processes in which the workers run. This class is controller.backend=local."""

    backend: Literal["local", "ray"] = key("local", "local (this process, one rank) or ray (a process per rank)")


@dataclass(frozen=True)
class RayConfig:
    """The processes of ranks on Ray."""

    placement: Literal["pack", "spread"] = key("pack", "ranks on as few nodes as possible, or over all nodes")
    cpus_per_rank: int | None = key(
        None, "CPU threads and Ray CPUs of a rank; None = its share of the node's cores", minimum=1
    )
    env_vars: dict[str, Any] = key({}, "environment variables of the ranks")
    start_timeout_seconds: float = key(300.0, "limit for starting the ranks", above=0)
    watchdog_seconds: float = key(1800.0, "time without progress after which a rank counts as hung", above=0)


@dataclass(frozen=True)
class RayControllerConfig(ControllerConfig):
    """controller.backend=ray."""

    backend: Literal["ray"] = key("ray", "local (this process, one rank) or ray (a process per rank)")
    address: str | None = key(
        None, "address of a running Ray cluster; auto = the one on this machine; None = start one here"
    )
    reference_ranks: int = key(
        0, "additional ranks only for the reference model; 0 = it shares the ranks of the policy", minimum=0
    )
    rollout_ranks: int = key(
        0,
        "additional ranks that only generate, while those of num_ranks train on what they made before (async_level "
        "batches ahead, by default 1; with 0 they take turns); 0 = the same ranks generate and train in turn",
        minimum=0,
    )
    ray: RayConfig = entries(RayConfig, "how the ranks are placed, started and watched")
