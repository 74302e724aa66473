"""One pass of the model: chunks in, next tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.models import CausalLM
from hybrid_rl.rollout.inplace.cuda_graphs import DecodeGraphs
from hybrid_rl.rollout.inplace.kv_cache import PagedCache
from hybrid_rl.rollout.inplace.paged_attention import PagedBatch, decodes_in_triton, paged_attention
from hybrid_rl.rollout.inplace.scheduler import Chunk, Sequence
from hybrid_rl.rollout.inplace.seats import SeatTable
from hybrid_rl.rollout.inplace.upload import upload
from hybrid_rl.rollout.sampling import check_finite, penalise, sample

# Multiplications of a pass in the model's largest matrix below which a second thread costs more than it brings.
SMALLEST_PARALLEL_PRODUCT = 1 << 22


@dataclass(frozen=True)
class Sampled:
    """The sequences that got a token in a pass, the tokens, and ln p of each."""

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[float]


class Runner:
    """Runs passes over the cache of one model. cuda_graphs: replay decode passes where the device can."""

    def __init__(self, model: CausalLM, cache: PagedCache, seats: SeatTable, *, cuda_graphs: bool) -> None:
        self._model = model
        self._cache = cache
        self._seats = seats
        captures = cuda_graphs and decodes_in_triton(cache)
        self._graphs = DecodeGraphs(model, cache, seats.num_seats) if captures else None
        # The head runs on few rows only, and the embedding is no product.
        module = model.module
        ends = {id(end.weight) for end in (module.get_input_embeddings(), module.get_output_embeddings())}
        matrices = [p.numel() for p in module.parameters() if p.dim() == 2 and id(p) not in ends]
        self._largest_matrix = max(matrices, default=SMALLEST_PARALLEL_PRODUCT)

    def drop_graphs(self) -> None:
        """To be called before the memory of the cache goes away."""
        if self._graphs is not None:
            self._graphs.drop()

    def run(self, chunks: list[Chunk]) -> Sampled:
        """Compute the chunks; sample for every sequence whose last chunk it was and for its followers.

        Raises ModelError where logits are not finite.
        """
        with self._fewer_threads(sum(chunk.count for chunk in chunks)):
            return self._run(chunks)

    @contextmanager
    def _fewer_threads(self, num_tokens: int) -> Iterator[None]:
        """One thread for a small pass on a CPU: most decode passes of small models are."""
        before = torch.get_num_threads()
        small = num_tokens * self._largest_matrix < SMALLEST_PARALLEL_PRODUCT
        if before == 1 or not small or self._model.device.type != "cpu":
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _run(self, chunks: list[Chunk]) -> Sampled:
        hidden = self._forward(chunks)
        self._copy_tails(chunks)
        sequences = [sequence for chunk in chunks for sequence in chunk.sampled]
        if not sequences:
            return Sampled([], [], [])
        ends = np.cumsum([chunk.count for chunk in chunks]) - 1
        index = np.repeat(ends, [len(chunk.sampled) for chunk in chunks])
        if len(index) != hidden.shape[0] or (index[1:] <= index[:-1]).any():
            hidden = hidden[upload(index, hidden.device)]
        tokens, logprobs = self._sample(hidden, sequences)
        check_finite(logprobs)
        return Sampled(sequences, tokens, logprobs)

    def _sample(self, hidden: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        device = hidden.device
        seats = np.array([sequence.seat for sequence in sequences])
        params = self._seats.sampling(seats, device)
        logits = self._model.logits(hidden)
        if params.penalises:
            logits = penalise(logits, params.repetition_penalty, _histories(sequences, device))
        tokens, logprobs = sample(logits, params, upload(self._seats.generated[seats], device))
        # One transfer, in a dtype that holds both exactly.
        both = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()
        chosen = both[0].astype(np.int64)
        self._seats.advance(seats, chosen)
        return chosen.tolist(), both[1].tolist()

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        """Last hidden states [T, H] of the chunks, one after the other."""
        device = self._model.device
        seats = np.array([chunk.sequence.seat for chunk in chunks])
        counts = [chunk.count for chunk in chunks]
        lengths = [chunk.start + chunk.count for chunk in chunks]
        table = self._seats.blocks[seats, : -(-max(lengths) // self._cache.block_size)]
        if all(chunk.is_decode for chunk in chunks):
            token_ids, positions = self._seats.last[seats], self._seats.length[seats] - 1
            if self._graphs is not None:
                return self._graphs.run(token_ids, positions, table, self._seats.blocks.shape[1])
        else:
            parts = [chunk.sequence.context(chunk.start, chunk.start + chunk.count) for chunk in chunks]
            token_ids = np.fromiter((token for part in parts for token in part), np.int64, sum(counts))
            positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks])
        batch = PagedBatch(upload(table, device, np.int32), counts, lengths)
        attention = paged_attention(self._cache, batch, self._model.attention.kernel)
        return self._model.hidden_states(upload(token_ids, device), upload(positions, device), attention)

    def _copy_tails(self, chunks: list[Chunk]) -> None:
        """Full prompt blocks are shared; the last, partly filled one is written by each sequence and so is copied."""
        source: list[int] = []
        destination: list[int] = []
        for chunk in chunks:
            full, rest = divmod(chunk.start + chunk.count, self._cache.block_size)
            if rest:
                source += [chunk.sequence.blocks[full]] * len(chunk.followers)
                destination += [follower.blocks[full] for follower in chunk.followers]
        if source:
            self._cache.copy_blocks(*(upload(blocks, self._model.device) for blocks in (source, destination)))


def _histories(sequences: list[Sequence], device: torch.device) -> Tensor:
    """Tokens of prompt and completion, int64 [B, longest], -1 behind the end."""
    rows = np.full((len(sequences), max(sequence.num_tokens for sequence in sequences)), -1)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: sequence.num_tokens] = sequence.context(0, sequence.num_tokens)
    return upload(rows, device)
