"""The experts that tokens went to, kept beside their keys and values."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from hybrid_rl.engines.inplace.scheduler import Chunk, Sequence
from hybrid_rl.engines.inplace.slots import SlotTable
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.expert_choices import NO_EXPERT


class ExpertCache:
    """K experts in each of L layers for every place of the KV cache, on the host: int16 [blocks, tokens, L, K].

    What is at a place was chosen when its key was written. So prompts that are shared, prefixes that are found again
    and sequences that are computed again need nothing of their own. Pages are touched when they are first written.
    shape: (L, K).
    """

    def __init__(self, model: CausalLM, slots: SlotTable, num_blocks: int, block_size: int) -> None:
        self.shape = (model.choices.num_layers, model.choices.top_k)
        self._experts = np.zeros((num_blocks, block_size, *self.shape), dtype=np.int16)
        self._slots = slots

    def write(self, chunks: Rows[Chunk], experts: torch.Tensor) -> None:
        """Keep the choices of a pass over chunks, one after the other: int64 [T, L, K]."""
        size = self._experts.shape[1]
        places = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        rows = zip(chunks, places, strict=True)
        blocks = [self._slots.blocks[chunk.sequence.slot][place // size] for chunk, place in rows]
        offsets = np.concatenate(places) % size
        self._experts[np.concatenate(blocks), offsets] = experts.to(device="cpu", dtype=torch.int16).numpy()

    def copy_blocks(self, copies: Rows[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) each; all are read before any is written."""
        source, destination = (list(side) for side in zip(*copies, strict=True))
        self._experts[destination] = self._experts[source]

    def of(self, sequence: Sequence) -> npt.NDArray[np.int16]:
        """Return the experts of the tokens of a sequence that has just got its last one, prompt and completion,
        [tokens, L, K]: NO_EXPERT for that one, which no pass has read."""
        experts = np.full((sequence.num_tokens, *self.shape), NO_EXPERT, dtype=np.int16)
        # The last token may be the first of a block that the sequence does not have yet.
        experts[:-1] = self._experts[sequence.blocks].reshape(-1, *self.shape)[: len(experts) - 1]
        return experts
