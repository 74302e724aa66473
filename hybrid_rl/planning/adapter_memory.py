"""What adapters take besides weights and optimizer: on their way into vLLM, and in its own LoRA slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.config.schema import TrainerConfig, VLLMRolloutConfig
from hybrid_rl.models.lora.plain import ADAPTER, wrappers

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has kernels; a slot has the next larger one
FACTOR_BYTES = 4  # of an element of a factor on its way to the engine
CUT_INPUTS = ("o_proj", "down_proj", "dense")  # layers whose inputs tensor parallelism cuts; of others it cuts outputs


@dataclass(frozen=True)
class Factors:
    """The two factors of the adapter of a layer. inputs, outputs: of the layer, all experts together; rank: r times the
    experts."""

    layer: str
    inputs: int
    outputs: int
    rank: int


def factors_of(module: nn.Module) -> list[Factors]:
    """Return the factors of all adapters of a module, which may be on meta."""
    paths = {id(child): name for name, child in module.named_modules()}
    found = []
    for _, _, wrapper in wrappers(module):
        while hasattr(wrapper, "lora_A"):
            a, b = (side[ADAPTER].weight for side in (wrapper.lora_A, wrapper.lora_B))
            found.append(Factors(paths[id(wrapper)].rpartition(".")[2], a.shape[1], b.shape[0], a.shape[0]))
            wrapper = wrapper.base_layer
    return found


def merging_bytes(module: PreTrainedModel, *, is_whole: bool) -> tuple[int, str]:
    """Return what a handoff that merges adapters takes on a rank, and the arithmetic. is_whole: whether the trainer's
    factors are whole and float32, so that no copy of them is made."""
    factors = factors_of(module)
    outputs = sum(one.outputs * one.rank for one in factors)
    copied = 0 if is_whole else outputs + sum(one.inputs * one.rank for one in factors)
    words = [
        f"{count:,} {what} x {FACTOR_BYTES} B" for count, what in ((copied, "of factors"), (outputs, "scaled")) if count
    ]
    return (copied + outputs) * FACTOR_BYTES, " + ".join(words)


def slot_rank(module: nn.Module) -> int:
    """Return the rank of the slot that vLLM makes for the adapters of a module."""
    largest = max(one.rank for one in factors_of(module))
    return min((rank for rank in SLOT_RANKS if rank >= largest), default=largest)


def slot_numel(module: nn.Module, config: TrainerConfig) -> int:
    """Return the elements of vLLM's LoRA slot on one rank of a replica: of each layer one factor is cut, the other is
    on every rank; both are padded to one rank."""
    assert isinstance(config.rollout, VLLMRolloutConfig)
    size, rank = config.rollout.tensor_parallel_size, slot_rank(module)
    found = 0
    for one in factors_of(module):
        cut, whole = (one.inputs, one.outputs) if one.layer in CUT_INPUTS else (one.outputs, one.inputs)
        found += rank * (-(-cut // size) + whole)
    return found


def widest(module: nn.Module) -> int:
    """Return the most inputs or outputs that an adapted layer has."""
    return max(max(one.inputs, one.outputs) for one in factors_of(module))


def has_slot(config: TrainerConfig) -> bool:
    """Return whether vLLM has the adapters in a slot of its own."""
    return config.lora.is_on and config.rollout.handoff.lora == "adapter"
