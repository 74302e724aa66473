"""Rows that do not run packed: each sequence by itself, through the module's own forward.

Linear attention, convolutions and state spaces carry something from every token to the next, in a packed row also from
one sample to the next. For such architectures the sequences of a row are laid next to each other, padded on the right
by their own last token: whatever is causal cannot tell that from a sequence alone. The prompt of a group is computed
once per different completion, and the architecture's own attention runs, as its config names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rl.memory.transfer import upload
from hybrid_rl.models.row import Layout, padded

NAME = "unpacked"  # as an attention of CausalLM; not a value of model.attention: rollout.engine=hf chooses it


class UnpackedRow:
    """How a row of T tokens becomes B sequences of L tokens, and back. The filler of a row becomes no sequence.

    places: int64 [T], the place of each token of the row among the B * L places of the sequences. is_padding: bool
    [B * L].
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        seen, last_root = layout.seen(), layout.first_child - layout.is_filled
        sequences = [*seen[layout.first_root + layout.num_shared : last_root], *seen[layout.first_child :]]
        spread = padded(sequences)
        # What several samples share is the same in all of them: its hidden states are those of the last.
        collect = torch.zeros(layout.num_tokens, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            collect[sequence] = row * spread.shape[1] + torch.arange(len(sequence))
        self.shape = spread.shape
        self._layout = layout
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        is_padding = torch.arange(spread.shape[1]) >= lengths[:, None]
        columns = (spread.flatten(), collect, is_padding.flatten())
        self._spread, self.places, self.is_padding = upload(columns, torch.device(device))

    def spread(self, tokens: Tensor) -> Tensor:
        """Lay [T, ...] out as [B, L, ...]. Raises ModelError for a row of another length."""
        self._layout.check_num_tokens(tokens)
        return tokens.index_select(0, self._spread).view(*self.shape, *tokens.shape[1:])

    def collect(self, hidden: Tensor) -> Tensor:
        """Take [B, L, H] back to [T, H]."""
        return hidden.flatten(0, 1).index_select(0, self.places)
