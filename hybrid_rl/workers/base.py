"""What every worker has."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from hybrid_rl.batch import Batch
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.memory import Leases, measure
from hybrid_rl.training.plan import Plan, align_plans, make_plan, num_micro_batches
from hybrid_rl.workers.preflight import RankProbe, probe_rank

# On a CPU larger micro-batches gain 5 % of time at most and take up to 40 % more memory (128 x 4 and 256 x 8 layers); a
# GPU wants more tokens at once.
TOKENS_PER_MICRO_BATCH = {"cpu": 4096}


def rank_plan(batch: Batch, step: int, config: TrainerConfig, context: RankContext, device: torch.device) -> Plan:
    """The one plan of a rank's batch in a training step; as many micro-batches as any other rank has."""
    optimizer, data = config.optimizer, config.data
    cap = optimizer.tokens_per_micro_batch
    if cap is None:
        lengths = (batch["prompt_ids"].lengths + batch["completion_ids"].lengths).tolist()
        cap = max(TOKENS_PER_MICRO_BATCH.get(device.type, 16384), *lengths, 1)
    plan = make_plan(
        batch,
        num_mini_batches=data.prompts_per_step // (optimizer.prompts_per_mini_batch or data.prompts_per_step),
        tokens_per_micro_batch=cap,
        seed=config.seed + step,
        is_packed=config.rollout.is_packed,
    )
    return align_plans(plan, context.gather(num_micro_batches(plan)))


class WorkerBase:
    """A rank of a worker group: its leases and its measured memory."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        # An engine's memory comes from the device itself: PyTorch must not sit on what an update has freed.
        give_back = torch.cuda.empty_cache if context.device.type == "cuda" else None
        self.leases = Leases(gather=context.gather if context.num_ranks > 1 else None, give_back=give_back)

    def lease(self, tags: frozenset[str]) -> AbstractContextManager[None]:
        """Have these residents in memory inside the block."""
        return self.leases.lease(tags)

    @dispatch(collect="all")
    def memory_metrics(self) -> dict[str, float]:
        """Bytes by resident (0 = asleep), as measured for the process, and seconds of the sleeps and wakes since the
        last call."""
        metrics = {f"memory/{tag}_bytes": float(size) for tag, size in self.leases.resident_bytes().items()}
        metrics.update({f"memory/{name}_bytes": float(size) for name, size in measure().items()})
        moved = self.leases.drain_transitions()
        metrics["timing/sleep"] = sum(t.seconds for t in moved if not t.awake)
        metrics["timing/wake"] = sum(t.seconds for t in moved if t.awake)
        return metrics

    @dispatch(collect="all")
    def probe_rank(self) -> RankProbe:
        """Versions and speed of this rank, for `preflight`."""
        return probe_rank(self._context)

    def close(self) -> None:
        """Release what the worker holds; subclasses extend."""
