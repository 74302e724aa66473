"""vLLM's CPU worker, with shared memory that is this run's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_rl.errors import ConfigError
from hybrid_rl.vllm.build_engine import RUN
from hybrid_rl.vllm.versions import has

SHARED_MEMORY = Path("/dev/shm")


def check_head_size(size: int) -> None:
    """Raise ConfigError for a number of dims of an attention head that vLLM's attention on CPUs does not compute."""
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size and size not in sizes:  # 0: a model without attention, of which vLLM says what it lacks
        raise ConfigError(
            f"the model's attention heads have head_dim={size}, and vLLM's attention on CPUs only computes "
            f"{', '.join(map(str, sizes))}; take a model of such a head_dim, or set rollout.engine=inplace"
        )


def keep_seeds(sampler: TopKTopPSampler) -> None:
    """Have requests draw from their own seeds whatever shares their batch. If not all of a batch have seeds, the
    sampler for CPUs of vLLM 0.25.1 takes the process's generator for all of them; the one for any platform does not."""
    if has("seeds_hold_in_any_batch", sampler):
        return
    theirs = sampler.forward

    def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        is_mixed = generators and len(generators) != len(logits)
        return (sampler.forward_native if is_mixed else theirs)(logits, generators, k, p)

    sampler.forward = forward


class RunWorker(CPUWorker):
    """Tensor-parallel ranks on CPUs meet in files of shared memory. vLLM names them after the address at which ranks
    find each other, which is the same for all runs that were launched from outside: two runs on one machine would take
    each other's memory, and one that was killed would leave files that no later run gets past. Here they carry the name
    of the run, and have none any more once all ranks have opened them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        check_head_size(vllm_config.model_config.get_head_size())
        self._run = os.environ[RUN]
        # What follows the last colon is the name; ranks have found each other already.
        address = f"{distributed_init_method}:{self._run}"
        super().__init__(vllm_config, local_rank, rank, address, is_driver_worker=is_driver_worker)

    def load_model(self, **arguments: Any) -> None:
        """Load the model and check its heads: layers may have heads of their own sizes, which vLLM would only notice
        when it attends."""
        super().load_model(**arguments)
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        for size in sorted({layer.head_size for layer in layers if hasattr(layer, "head_size")}):
            check_head_size(size)

    def init_device(self) -> None:
        """Set the device up, and remove shared files, which all ranks have opened by then."""
        super().init_device()
        keep_seeds(self.model_runner.sampler.topk_topp_sampler)
        for path in SHARED_MEMORY.glob(f"{self._run}-*"):
            path.unlink(missing_ok=True)
        queue = get_tp_group().mq_broadcaster
        buffer = None if queue is None else getattr(queue, "buffer", None)
        if buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False  # who made the file removes it at the end
