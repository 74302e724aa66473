"""What versions of the policy take in shared memory, on their way to ranks that only generate."""

from __future__ import annotations

from transformers import PreTrainedModel

from hybrid_rl.config.lora_keys import LoraKeys
from hybrid_rl.config.schema import ColocatedRolloutConfig, TrainerConfig
from hybrid_rl.planning.ledger import VERSIONS, Share
from hybrid_rl.planning.shapes import shard_bytes, weights_share
from hybrid_rl.training.sharding.fsdp import ShardOptions

NUM_VERSIONS = 2  # while one is written, the one before it is there


def versions_share(policy: PreTrainedModel, config: TrainerConfig, sharding: ShardOptions | None) -> Share:
    """Return the part of a rank that trains in the files that it and others write (`workers/policy_versions.py`), when
    there are most of them. They are in the dtype in which that rank keeps the weights."""
    whole = weights_share(VERSIONS, [policy], sharding)
    is_embedded = not isinstance(config.rollout, ColocatedRolloutConfig)
    lora = config.lora
    if not isinstance(lora, LoraKeys) or (lora.peft.modules_to_save and not is_embedded):
        return Share(VERSIONS, NUM_VERSIONS * whole.num_bytes, f"{NUM_VERSIONS} versions x {whole.formula}")
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    moving = sum(p.numel() * p.itemsize for p in trained) if sharding is None else shard_bytes(policy, sharding)
    base = 0 if is_embedded else whole.num_bytes - moving  # written once; embedded engines have loaded it
    words = f"{NUM_VERSIONS} versions x {moving:,} B of adapters" + (f" + {base:,} B of their base" if base else "")
    return Share(VERSIONS, NUM_VERSIONS * moving + base, words)
