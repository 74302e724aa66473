"""What adapters take besides weights and optimizer: on their way into vLLM, and in its own LoRA slot."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.config.schema import TrainerConfig, VLLMRolloutConfig
from hybrid_rl.models.lora.factors import adapter_shapes

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has kernels; a slot has the next larger one
FACTOR_BYTES = 4  # of an element of a factor on its way to the engine
CUT_INPUTS = ("o_proj", "down_proj", "dense")  # layers whose inputs tensor parallelism cuts; of others it cuts outputs


def merging_bytes(module: PreTrainedModel, *, is_whole: bool) -> tuple[int, str]:
    """Return what a handoff that merges adapters takes on a rank, and the arithmetic. is_whole: whether the trainer's
    factors are whole and float32, so that no copy of them is made."""
    factors = adapter_shapes(module).values()
    outputs = sum(shape.outputs * shape.width for shape in factors)
    copied = 0 if is_whole else outputs + sum(shape.inputs * shape.width for shape in factors)
    words = [
        f"{count:,} {label} x {FACTOR_BYTES} B"
        for count, label in ((copied, "of factors"), (outputs, "scaled"))
        if count
    ]
    return (copied + outputs) * FACTOR_BYTES, " + ".join(words)


def slot_rank(module: nn.Module) -> int:
    """Return the rank of the slot that vLLM makes for the adapters of a module."""
    largest = max(shape.width for shape in adapter_shapes(module).values())
    return min((rank for rank in SLOT_RANKS if rank >= largest), default=largest)


def slot_numel(module: nn.Module, config: TrainerConfig) -> int:
    """Return the elements of vLLM's LoRA slot on one rank of a replica: of each layer one factor is cut, the other is
    on every rank; both are padded to one rank."""
    assert isinstance(config.rollout, VLLMRolloutConfig)
    size, rank = config.rollout.tensor_parallel_size, slot_rank(module)
    numel = 0
    for shape in adapter_shapes(module).values():
        cut, whole = (shape.inputs, shape.outputs) if shape.layer in CUT_INPUTS else (shape.outputs, shape.inputs)
        numel += rank * (-(-cut // size) + whole)
    return numel


def widest(module: nn.Module) -> int:
    """Return the most inputs or outputs that an adapted layer has."""
    return max(max(shape.inputs, shape.outputs) for shape in adapter_shapes(module).values())


def has_slot(config: TrainerConfig) -> bool:
    """Return whether vLLM has the adapters in a slot of its own."""
    return config.lora.is_on and config.rollout.handoff.lora == "adapter"
