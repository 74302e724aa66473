"""Plans of batches that have no temperature and need no device."""

from __future__ import annotations

from hybrid_rl.batch import Batch
from hybrid_rl.training.batch_plan import Plan, PlanSpec, joined_plans


def make_plan(
    batch: Batch, *, num_mini_batches: int = 1, tokens_per_micro_batch: int, seed: int = 0, **options: bool
) -> Plan:
    """The plan of one rank, its groups packed in the order of this seed. options: as in `PlanSpec`."""
    spec = PlanSpec(num_mini_batches, tokens_per_micro_batch, seed, **options)
    return joined_plans(*spec.cut(batch, seed, tokens_per_micro_batch))
