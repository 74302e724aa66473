"""What runs in the next pass: sequences that decode, chunks of prompts, and who must make room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from hybrid_rl.engines.base import Counters, Generation, join_line
from hybrid_rl.engines.inplace.blocks import ROOT, BlockPool
from hybrid_rl.engines.inplace.slots import SlotTable


@dataclass(eq=False)
class Sequence(Generation):
    """A request being answered. num_cached: tokens whose keys and values are in the cache after the planned pass;
    nodes: of the prefixes of it that fill blocks which others can find, from the empty one on; stem: the same number
    for all that had the same tokens up to and with the planned pass, and hold the same blocks; -1 = nobody else."""

    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    slot: int = -1
    nodes: list[int] = field(default_factory=lambda: [ROOT])
    stem: int = -1

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of what was generated so far."""
        return len(self.request.prompt_ids) + len(self.tokens)

    def context(self, start: int, end: int) -> Rows[int]:
        """Tokens start .. end of prompt and completion."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return prompt[start:end]
        return (*prompt[start:], *self.tokens[max(start - len(prompt), 0) : end - len(prompt)])

    def is_sibling(self, other: Sequence) -> bool:
        """Return whether both are at the start of the same prompt, in the same group."""
        return (
            self.request.group is not None
            and self.request.group == other.request.group
            and not self.tokens
            and not other.tokens
            and self.request.prompt_ids == other.request.prompt_ids
        )


@dataclass
class Chunk:
    """Tokens start .. start + count of a sequence, to be computed in a pass. If they are its last ones, the sequence
    and its followers (samples of the same prompt with the same tokens so far, which share its blocks) each get a token
    from them. is_new: it was not in the pass before; what it found in the cache may be written by this very pass.
    copied_block: whose contents the first block that this chunk writes has to begin with, copied before the pass writes
    anything; -1 = none. drafts: tokens beyond those of the sequence that are computed too, in case they are what comes
    next."""

    sequence: Sequence
    start: int
    count: int
    followers: list[Sequence] = field(default_factory=list)
    is_new: bool = False
    copied_block: int = -1
    drafts: Rows[int] = ()

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.start + self.count - len(self.drafts) == self.sequence.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether it is the newest token of a sequence and nothing else but drafts."""
        return self.count - len(self.drafts) == 1 and bool(self.sequence.tokens) and self.is_last

    @property
    def continues(self) -> bool:
        """Whether it decodes for one sequence and reads nothing but its own key that this pass writes."""
        return self.is_decode and not self.is_new and not self.followers

    @property
    def sampled(self) -> list[Sequence]:
        """Who gets a token after this chunk, or a token for each place of a draft and the one after them."""
        if self.drafts:
            return [self.sequence] * self.count
        return [self.sequence, *self.followers] if self.is_last else []

    @property
    def num_made(self) -> int:
        """Tokens that a chunk which decodes has given its sequence, once they have been appended."""
        return self.sequence.num_tokens - self.start - 1

    def add_drafts(self, drafts: Rows[int]) -> None:
        """Compute these tokens, too."""
        self.drafts = drafts
        self.count += len(drafts)


class Scheduler:
    """Order of the passes: by priority, and first come, first served. Sequences that run get their next block before
    anybody is admitted; if none is left, the one that came last gives its blocks back and waits, to be computed again
    later.

    Samples of a prompt share its blocks, the last one too. When their tokens part, all but one of them copy that block
    before it is written. shares_decoding: those that have the same tokens so far decode as one chunk, as they were
    computed in the prompt; it saves time if that of a pass grows with its rows. counters: of the engine.

    max_running: sequences that may run at a time; as many as there are slots, unless a pass did not fit in memory."""

    def __init__(
        self,
        pool: BlockPool,
        slots: SlotTable,
        *,
        max_num_batched_tokens: int,
        remember_prefixes: bool,
        shares_decoding: bool,
        counters: Counters,
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.max_running = slots.num_slots
        self.max_num_batched_tokens = max_num_batched_tokens
        self.remember_prefixes = remember_prefixes
        self.shares_decoding = shares_decoding
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = counters
        self._num_stems = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.pool.block_size)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences, by priority."""
        join_line(self.waiting, sequences)

    def schedule(self) -> list[Chunk]:
        """Return the next pass, in the order of admission: one token of every sequence that decodes, and prompt tokens
        up to max_num_batched_tokens. Empty if nothing can run."""
        preemptions = self.counters.num_preemptions
        chunks, budget = self._continue_running(self.max_num_batched_tokens)
        if preemptions == self.counters.num_preemptions:
            for chunk in chunks:
                if not chunk.sequence.tokens and chunk.is_last:
                    self._fork(chunk)
            while self.waiting and len(self.running) < self.max_running and budget > 0:
                admitted = self._admit(budget)
                if admitted is None:
                    break
                chunks.append(admitted)
                budget -= admitted.count
                if admitted.is_last:
                    self._fork(admitted)
        self._name_stems(chunks)
        return chunks

    def _continue_running(self, budget: int) -> tuple[list[Chunk], int]:
        """Chunks of what runs already, and what is left of the budget of prompt tokens."""
        chunks = []
        size = self.pool.block_size
        leaders: dict[tuple[int, int], Chunk] = {}  # by stem and newest token
        stems: set[int] = set()  # that somebody has continued
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            copied_block = -1
            if sequence.stem >= 0:
                leader = leaders.get((sequence.stem, sequence.tokens[-1]))
                if leader is not None:
                    self._follow(sequence, leader)
                    index += 1
                    continue
                if sequence.stem in stems and sequence.num_cached % size:
                    if not self._make_free(1, sequence):
                        break
                    copied_block = self._part(sequence)
                stems.add(sequence.stem)
            count = sequence.num_tokens - sequence.num_cached
            if count > 1:
                count = min(count, budget)
                if count == 0:
                    index += 1
                    continue
            if sequence.num_cached + count > len(sequence.blocks) * size and not self._extend(sequence, count):
                break  # it gave its own blocks back, and was the last that ran
            if sequence.num_tokens - sequence.num_cached > 1:
                budget -= count
            chunk = Chunk(sequence, sequence.num_cached, count, copied_block=copied_block)
            chunks.append(chunk)
            if sequence.stem >= 0 and self.shares_decoding:
                leaders[sequence.stem, sequence.tokens[-1]] = chunk
            sequence.num_cached += count
            self._remember(sequence)
            index += 1
        return chunks, budget

    def _extend(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens, if need be from those who came later; False if it had to go itself."""
        needed = self.blocks_for(sequence.num_cached + count) - len(sequence.blocks)
        if not self._make_free(needed, sequence):
            return False
        self._give(sequence, self.pool.take(needed))
        return True

    def _make_free(self, needed: int, sequence: Sequence) -> bool:
        """Let those who came last go until so many blocks are free; False if the sequence itself had to go."""
        while needed > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _part(self, sequence: Sequence) -> int:
        """Give a sequence a block of its own for the last one, which another of its stem writes in this pass; return
        that one, to be copied."""
        index = sequence.num_cached // self.pool.block_size
        shared = sequence.blocks[index]
        blocks = self.pool.take(1)
        self.pool.release([shared])
        self._give(sequence, blocks, index)
        return shared

    def _follow(self, sequence: Sequence, leader: Chunk) -> None:
        """Let a sequence get its next token from the chunk of one that has the same tokens."""
        index = sequence.num_cached // self.pool.block_size
        blocks = leader.sequence.blocks[index:]
        if sequence.blocks[index:] != blocks:
            self.pool.share(blocks)
            self.pool.release(sequence.blocks[index:])
            self._give(sequence, blocks, index)
        sequence.num_cached = leader.sequence.num_cached
        self._remember(sequence)
        leader.followers.append(sequence)

    def _name_stems(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            chunk.sequence.stem = self._num_stems if chunk.followers else -1
            for follower in chunk.followers:
                follower.stem = self._num_stems
            self._num_stems += 1

    def make_room(self, chunk: Chunk, num_drafts: int) -> int:
        """Return how many drafts a chunk of the next pass has blocks for. It may get some that are free, as long as
        there is one more for everybody who runs: nobody makes room for drafts."""
        sequence, size = chunk.sequence, self.pool.block_size
        length = chunk.start + chunk.count
        needed = self.blocks_for(length + num_drafts) - len(sequence.blocks)
        if needed > 0:
            count = min(needed, max(0, self.pool.num_free - len(self.running)))
            self._give(sequence, self.pool.take(count))
        return min(num_drafts, len(sequence.blocks) * size - length)

    def keep_drafts(self, chunk: Chunk) -> None:
        """Count the drafts that became tokens: their keys and values are in the cache. Those of the others are written
        over by the next pass."""
        num_accepted = chunk.num_made - 1
        chunk.sequence.num_cached += num_accepted
        self._remember(chunk.sequence)
        self.counters.num_draft_tokens += len(chunk.drafts)
        self.counters.num_accepted_tokens += num_accepted

    def _give(self, sequence: Sequence, blocks: Rows[int], index: int | None = None) -> None:
        """Let these be the blocks of a sequence from `index` on; None = after those that it has."""
        index = len(sequence.blocks) if index is None else index
        sequence.blocks[index:] = blocks
        self.slots.blocks[sequence.slot, index : index + len(blocks)] = blocks

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.counters.num_preemptions += 1

    def _admit(self, budget: int) -> Chunk | None:
        """Admit the first that waits, as far as budget and blocks allow; None if it must go on waiting."""
        sequence = self.waiting[0]
        length = sequence.num_tokens
        size = self.pool.block_size
        shared: list[int] = []
        nodes = [ROOT]
        tail, num_tail = -1, 0
        if self.remember_prefixes:
            # The last token is always computed: its hidden state gives the next one.
            tokens = sequence.context(0, length - 1)
            shared, nodes = self.pool.find(tokens, len(tokens) // size)
            place = len(shared) * size
            tail, num_tail = self.pool.find_tail(nodes[-1], tokens[place : place + size - 1])
        num_cached = len(shared) * size + num_tail
        if num_tail and self.pool.may_continue(tail, num_tail):
            shared.append(tail)
            tail = -1
        self.pool.share(shared)
        count = min(length - num_cached, budget)
        needed = self.blocks_for(num_cached + count) - len(shared)
        # Whoever runs needs another block soon; without this margin the newcomer would push itself out again.
        if needed + len(self.running) > self.pool.num_free:
            self.pool.release(shared)
            return None
        self.waiting.popleft()
        self.counters.num_prefix_tokens += num_cached
        self.pool.touch(tail)
        sequence.nodes = nodes
        sequence.num_cached = num_cached + count
        self._start(sequence, [*shared, *self.pool.take(needed)])
        self._remember(sequence)
        return Chunk(sequence, num_cached, count, is_new=True, copied_block=tail)

    def _fork(self, chunk: Chunk) -> None:
        """Let those that wait for the same prompt share its blocks."""
        leader = chunk.sequence
        while self.waiting and len(self.running) < self.max_running and self.waiting[0].is_sibling(leader):
            # The last block, if it is not full, becomes one of each when they part.
            if len(self.running) + bool(leader.num_cached % self.pool.block_size) > self.pool.num_free:
                break
            follower = self.waiting.popleft()
            self.pool.share(leader.blocks)
            follower.num_cached = leader.num_cached
            follower.nodes = [*leader.nodes]
            self._start(follower, leader.blocks)
            chunk.followers.append(follower)

    def _start(self, sequence: Sequence, blocks: list[int]) -> None:
        request = sequence.request
        sequence.slot = self.slots.take(
            request.params,
            length=sequence.num_tokens,
            generated=len(sequence.tokens),
            last=sequence.tokens[-1] if sequence.tokens else request.prompt_ids[-1],
        )
        sequence.blocks = []
        self._give(sequence, blocks)
        self.running.append(sequence)

    def _remember(self, sequence: Sequence) -> None:
        """Blocks that this pass fills can be found from now on, also by who is in the same pass: a pass writes all its
        keys before it reads any."""
        size = self.pool.block_size
        while self.remember_prefixes and len(sequence.nodes) * size <= sequence.num_cached:
            index = len(sequence.nodes) - 1
            tokens = tuple(sequence.context(index * size, (index + 1) * size))
            sequence.nodes.append(self.pool.remember(sequence.nodes[index], tokens, sequence.blocks[index]))

    def _remember_tail(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the block that these tokens of a sequence fill in part be found from the next pass on: it is copied
        before that pass, so it must have been written by then."""
        full, rest = divmod(num_tokens, self.pool.block_size)
        if self.remember_prefixes and rest:
            tokens = tuple(sequence.context(num_tokens - rest, num_tokens))
            self.pool.remember_tail(sequence.nodes[full], tokens, sequence.blocks[full])

    def remove(self, sequence: Sequence) -> None:
        """Remove a running sequence: its blocks and its slot become free. Who continues it finds all that it had in the
        cache."""
        self._remember_tail(sequence, sequence.num_cached)
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        self.slots.release(sequence.slot)
        sequence.blocks, sequence.nodes = [], [ROOT]
        sequence.slot, sequence.num_cached, sequence.stem = -1, 0, -1

    def take_aborted(self, ids: set[int]) -> list[Sequence]:
        """Remove the sequences of these requests, running or waiting; returns them."""
        if not ids:
            return []
        leaving = [sequence for sequence in (*self.running, *self.waiting) if sequence.request.id in ids]
        for sequence in leaving:
            if sequence.slot >= 0:
                self.remove(sequence)
            else:
                self.waiting.remove(sequence)
        return leaving

    def complete(self, chunks: Iterable[Chunk]) -> None:
        """Count a pass that has been computed. Prompts whose last tokens it computed can be found but for the last one,
        from which every sample of the same prompt has to be computed."""
        self.counters.num_steps += 1
        for chunk in chunks:
            if chunk.is_last and not chunk.sequence.tokens:
                self._remember_tail(chunk.sequence, chunk.sequence.num_cached - 1)
            if not chunk.is_decode:
                self.counters.num_prompt_tokens += chunk.count
                self.counters.num_shared_prompt_tokens += (chunk.start + chunk.count) * len(chunk.followers)

    def halve(self, chunks: Rows[Chunk]) -> bool:
        """Let passes be half as large as this one, which did not fit in memory; False if they cannot be."""
        num_running = sum(1 + len(chunk.followers) for chunk in chunks)
        num_prompt = sum(chunk.count for chunk in chunks if not chunk.is_decode)
        if num_prompt > max(num_running, self.pool.block_size):  # more of its tokens are those of prompts
            self.max_num_batched_tokens = num_prompt // 2
            return True
        self.max_running = max(1, num_running // 2)
        return num_running > 1

    def requeue_running(self) -> None:
        """Put everything that runs back to the head of the queue, in order; its cache is lost."""
        for sequence in list(reversed(self.running)):
            self.remove(sequence)
            self.waiting.appendleft(sequence)
        self.pool.forget()
