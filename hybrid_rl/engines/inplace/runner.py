"""What is around the layers in a pass of the model: chunks become tensors, and hidden states the next tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.engines.inplace.cuda_graphs import DecodeGraphs, DecodePass
from hybrid_rl.engines.inplace.expert_cache import ExpertCache
from hybrid_rl.engines.inplace.host_to_device import Tables, reads_host_memory
from hybrid_rl.engines.inplace.kv_cache import PagedCache
from hybrid_rl.engines.inplace.paged_attention import PagedBatch, decodes_in_triton, paged_attention
from hybrid_rl.engines.inplace.paged_kernel import paged_kernel
from hybrid_rl.engines.inplace.scheduler import Chunk, Sequence
from hybrid_rl.engines.inplace.slots import SlotSampling, SlotTable
from hybrid_rl.engines.sampling import check_finite, choose, chosen_on_host, in_one, penalise, sample
from hybrid_rl.models import AttentionContext, CausalLM

# Multiplications of a pass in the model's largest matrix below which a second thread costs more than it brings.
SMALLEST_PARALLEL_PRODUCT = 1 << 22


@dataclass(frozen=True)
class Sampled:
    """The sequences that got a token in a pass, the tokens, and ln p of each. A sequence with drafts is there as often
    as it got one."""

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Pass:
    """A pass of the model from `Runner.prepare` to `Runner.sample`.

    chunks: those that are not replayed. sequences: all that get a token, the replayed ones first; chosen: what graphs
    gave, if any was replayed. inputs: token ids, positions and attention of the chunks, None without any. sampling: of
    the sequences that get a token from chunks; picks: whether the table `index` says which hidden states have a next
    token; repeats: whether the table `repeats` says which of those each sequence takes.
    """

    chunks: list[Chunk]
    sequences: list[Sequence]
    chosen: list[Tensor]
    tables: Tables
    sampling: SlotSampling
    picks: bool = False
    repeats: bool = False
    inputs: tuple[Tensor, Tensor, AttentionContext] | None = None


class Runner:
    """Puts passes over the cache of one model together, and samples from what the layers give.

    cuda_graphs: replay decode passes if the device can. What decodes is then replayed in a mixed pass too, before the
    chunks of prompts run eagerly. No key is read before it is written: what ran before reads only what earlier passes
    wrote, and its own; what is new, or has more than a token to go, may read all that this pass writes.

    experts: where the experts that tokens go to are kept; needs cuda_graphs=False. None = they are not.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: PagedCache,
        slots: SlotTable,
        *,
        cuda_graphs: bool,
        experts: ExpertCache | None = None,
    ) -> None:
        self._model = model
        self._experts = experts
        self._cache = cache
        self._slots = slots
        captures = cuda_graphs and decodes_in_triton(cache)
        self._graphs = DecodeGraphs(model, cache, slots.num_slots) if captures else None
        self._is_prepared = False
        self._pages = paged_kernel(cache, model.attention.name)
        # The head runs on few rows only, and the embedding is not a product.
        module = model.module
        ends = {id(end.weight) for end in (module.get_input_embeddings(), module.get_output_embeddings())}
        matrices = [p.numel() for p in module.parameters() if p.dim() == 2 and id(p) not in ends]
        self._largest_matrix = max(matrices, default=SMALLEST_PARALLEL_PRODUCT)

    def expect_moves(self) -> None:
        """Look before the next pass whether weights or cache have moved, or sequences may be longer."""
        self._is_prepared = False

    def prepare(self, chunks: list[Chunk]) -> Pass:
        """Copy the blocks that newcomers continue, and those who part from others, replay the chunks that a graph can
        compute, and upload what the layers need for the others."""
        self._copy_continued(chunks)
        replayed: list[Sequence] = []
        if self._graphs is not None and not self._is_prepared:
            if not self._graphs.prepare(self._slots.blocks.shape[1]):
                self._graphs = None
            self._is_prepared = True
        if self._graphs is not None:
            replayed = [chunk.sequence for chunk in chunks if chunk.continues]
            chunks = [chunk for chunk in chunks if not chunk.continues]
        chosen = [self._replay(replayed)] if replayed else []
        sequences = [sequence for chunk in chunks for sequence in chunk.sampled]
        sampling = self._slots.sampling(_slots_of(sequences), _places(chunks, [len(c.sampled) for c in chunks]))
        tables = Tables(self._model.device)
        step = Pass(chunks, [*replayed, *sequences], chosen, tables, sampling)
        if chunks:
            step.picks, step.repeats = self._add_picks(tables, chunks)
            if sequences:
                self._add_sampling(tables, sequences, sampling)
            attention = self._add_pass(tables, chunks)
            tables.send()
            step.inputs = tables["token_ids"], tables["positions"], attention
        return step

    @contextmanager
    def recording(self, step: Pass) -> Iterator[None]:
        """Keep the experts that the layers choose inside the block, if they are kept."""
        if step.inputs is None or self._experts is None:
            yield
            return
        with self._model.choices.choosing(None) as noted:
            yield
        self._experts.write(step.chunks, noted.experts)

    def sample(self, step: Pass, hidden: Tensor | None) -> Sampled:
        """Sample for every sequence whose last chunk is in the pass, and for its followers. hidden: [T, H], what the
        layers made of `step.inputs`. Raises ModelError if logits are not finite."""
        chosen = [*step.chosen]
        if hidden is not None and any(chunk.sampled for chunk in step.chunks):
            picked = hidden[step.tables["index"]] if step.picks else hidden
            chosen.append(self._choose(picked, step.tables, step.sampling, repeats=step.repeats))
        if not chosen:
            return Sampled([], [], [])
        tokens, logprobs = chosen_on_host(chosen[0] if len(chosen) == 1 else torch.cat(chosen))
        check_finite(logprobs)
        sequences = step.sequences
        if any(chunk.drafts for chunk in step.chunks):
            kept = _kept(step.chunks, tokens)
            sequences, tokens = [sequences[row] for row in kept], tokens[kept]
            logprobs = [logprobs[row] for row in kept]
        self._slots.advance(_slots_of(sequences), tokens)
        return Sampled(sequences, tokens.tolist(), logprobs)

    @contextmanager
    def fewer_threads(self, chunks: list[Chunk]) -> Iterator[None]:
        """Use one thread for a small pass on a CPU; most decode passes of small models are small."""
        before = torch.get_num_threads()
        is_small = sum(chunk.count for chunk in chunks) * self._largest_matrix < SMALLEST_PARALLEL_PRODUCT
        if before == 1 or not is_small or self._model.device.type != "cpu":
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _replay(self, sequences: list[Sequence]) -> Tensor:
        """Generate one token of every sequence by a graph; see `choose` for what comes back."""
        assert self._graphs is not None
        slots = _slots_of(sequences)
        sampling = self._slots.sampling(slots)
        lengths = self._slots.length[slots]
        step = DecodePass(
            self._slots.last[slots],
            lengths - 1,
            sampling.columns["temperature"],
            sampling.uniform(),
            self._table(slots, int(lengths.max())),
        )
        hidden, chosen = self._graphs.run(step)
        if sampling.is_plain:
            return chosen
        # The graph has drawn from the whole distribution, which is not what was asked for.
        tables = Tables(self._model.device)
        self._add_sampling(tables, sequences, sampling)
        tables.send()
        return self._choose(hidden, tables, sampling)

    @staticmethod
    def _add_picks(tables: Tables, chunks: list[Chunk]) -> tuple[bool, bool]:
        """Add which hidden states are sampled from, as `index`, and which of those is each sequence's, as `repeats`;
        False, and nothing added, if each is, and if each is once."""
        ends = np.cumsum([chunk.count for chunk in chunks]) - 1
        counts = [1 + len(chunk.drafts) if chunk.is_last else 0 for chunk in chunks]
        index = np.repeat(ends - [len(chunk.drafts) for chunk in chunks], counts) + _places(chunks, counts)
        picks = len(index) != ends[-1] + 1
        if picks:
            tables.add("index", index)
        repeats = any(chunk.followers for chunk in chunks)
        if repeats:
            times = np.repeat([1 + len(chunk.followers) for chunk in chunks], counts)
            tables.add("repeats", np.repeat(np.arange(len(index)), times))
        return picks, repeats

    def _add_pass(self, tables: Tables, chunks: list[Chunk]) -> AttentionContext:
        """Add what the layers need of the chunks, one after the other."""
        slots = _slots_of([chunk.sequence for chunk in chunks])
        counts = [chunk.count for chunk in chunks]
        lengths = [chunk.start + chunk.count for chunk in chunks]
        if all(chunk.is_decode for chunk in chunks):
            ahead = _places(chunks, counts)
            token_ids = np.repeat(self._slots.last[slots], counts)
            positions = np.repeat(self._slots.length[slots] - 1, counts) + ahead
            token_ids[ahead > 0] = [token for chunk in chunks for token in chunk.drafts]
        else:
            parts = [chunk.sequence.context(chunk.start, chunk.start + chunk.count) for chunk in chunks]
            token_ids = np.fromiter((token for part in parts for token in part), np.int64, sum(counts))
            positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks])
        tables.add("token_ids", token_ids)
        tables.add("positions", positions)
        table = np.ascontiguousarray(self._table(slots, max(lengths)))
        batch = PagedBatch(torch.from_numpy(table), counts, lengths)
        return paged_attention(self._cache, batch, tables, self._model.attention.kernel, pages=self._pages)

    def _table(self, slots: npt.NDArray[np.int64], longest: int) -> npt.NDArray[np.int32]:
        return self._slots.blocks[slots, : -(-longest // self._cache.block_size)]

    def _add_sampling(self, tables: Tables, sequences: list[Sequence], sampling: SlotSampling) -> None:
        sampling.add_to(tables)
        if sampling.penalises:
            tables.add("history", _histories(sequences))
        if reads_host_memory(self._model.device):
            tables.add("generated", sampling.generated)
        else:
            tables.add("uniform", sampling.uniform(), np.float64)

    def _choose(self, hidden: Tensor, tables: Tables, sampling: SlotSampling, *, repeats: bool = False) -> Tensor:
        """int32 [B, 2], see `choose` of sampling.py, for hidden states [B, H]; with `repeats` for those that this table
        names."""
        params = sampling.tensors(tables)
        logits = self._model.logits(hidden)
        if repeats:
            logits = logits.index_select(0, tables["repeats"])
        if params.penalises:
            logits = penalise(logits, params.repetition_penalty, tables["history"])
        if reads_host_memory(hidden.device):
            tokens, logprobs = sample(logits, params, tables["generated"])
            if self._model.is_exact:  # a trainer does not truncate, and NaN marks a row that is not a distribution
                exact = self._model.chosen_logprobs(logits, tokens, params.temperature)
                logprobs = torch.where(params.cuts | logprobs.isnan(), logprobs, exact)
            return in_one(tokens, logprobs)
        return choose(logits, params, tables["uniform"])

    def _copy_continued(self, chunks: list[Chunk]) -> None:
        """Before anything is written: a block that is copied may belong to somebody else in this pass already."""
        size = self._cache.block_size
        self._copy(
            [
                (chunk.copied_block, chunk.sequence.blocks[chunk.start // size])
                for chunk in chunks
                if chunk.copied_block >= 0
            ]
        )

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) each; all are read before any is written."""
        if copies:
            tables = Tables(self._model.device)
            source, destination = zip(*copies, strict=True)
            tables.add("source", source)
            tables.add("destination", destination)
            tables.send()
            self._cache.copy_blocks(tables["source"], tables["destination"])
            if self._experts is not None:
                self._experts.copy_blocks(copies)


def _slots_of(sequences: list[Sequence]) -> npt.NDArray[np.int64]:
    return np.array([sequence.slot for sequence in sequences], np.int64)


def _places(chunks: list[Chunk], counts: list[int]) -> npt.NDArray[np.int64]:
    """Return the place of each row among the `counts` of its chunk; 0 in chunks without drafts."""
    places = np.zeros(sum(counts), np.int64)
    end = 0
    for chunk, count in zip(chunks, counts, strict=True):
        end += count
        if chunk.drafts:
            places[end - count : end] = np.arange(count)
    return places


def _kept(chunks: list[Chunk], tokens: npt.NDArray[np.int64]) -> list[int]:
    """Return which of the sampled tokens count: those after drafts that were right up to there."""
    kept: list[int] = []
    row = 0
    for chunk in chunks:
        count = len(chunk.sampled)
        if chunk.drafts:
            is_wrong = tokens[row : row + count - 1] != chunk.drafts
            kept += range(row, row + 1 + (int(is_wrong.argmax()) if is_wrong.any() else count - 1))
        else:
            kept += range(row, row + count)
        row += count
    return kept


def _histories(sequences: list[Sequence]) -> npt.NDArray[np.int64]:
    """Tokens of prompt and completion, [B, longest], -1 after the end."""
    rows = np.full((len(sequences), max(sequence.num_tokens for sequence in sequences)), -1)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: sequence.num_tokens] = sequence.context(0, sequence.num_tokens)
    return rows
