"""The layers of a model that repeat: found, and run through torch.compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from hybrid_rl.compat.torch import compiled_form, is_compiled, use_compiled
from hybrid_rl.compat.transformers import block_class_names
from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.attention_function import NAME, attention_forward

# A compiled block excludes its attention, which depends on the row: each row would be compiled again.
APART = f"{NAME}_apart"
AttentionInterface.register(APART, torch.compiler.disable(attention_forward))


def transformer_blocks(module: PreTrainedModel) -> list[nn.Module]:
    """Find the transformer blocks of a model, in order: the modules that transformers does not split over devices.

    Raises ModelError if there are none.
    """
    names = block_class_names(module)
    # Classes with their bases: sharding puts a class in front of a module's own.
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    blocks = [
        block for children in lists for block in children if {kind.__name__ for kind in type(block).__mro__} & names
    ]
    if not blocks:
        raise ModelError(
            f"{type(module).__name__} names no transformer blocks (_no_split_modules={sorted(names)}); it cannot be "
            f"sharded or compiled block by block"
        )
    return blocks


class CompiledBlocks:
    """Transformer blocks that `active` switches over to their compiled forms and back.

    Engines and users that call the module run it as it is: their rows have other sizes and other modes of autograd, and
    each would be another compilation.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._calls: list[Any] = [compiled_form(block) for block in blocks]

    @property
    def is_active(self) -> bool:
        """Whether the blocks are switched over now."""
        return any(is_compiled(block) for block in self._blocks[:1])

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the transformer blocks compiled inside the block."""
        if self.is_active:
            yield
            return
        for block, call in zip(self._blocks, self._calls, strict=True):
            use_compiled(block, call)
        try:
            yield
        finally:
            for block in self._blocks:
                use_compiled(block, None)
