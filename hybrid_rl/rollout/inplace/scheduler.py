"""Who runs: admission of waiting requests against cache blocks and slots of the decode batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hybrid_rl.rollout.base import FinishedSample, FinishReason, RolloutRequest
from hybrid_rl.rollout.inplace.kv_cache import BlockPool


@dataclass(eq=False)
class Sequence:
    """A request on its way."""

    request: RolloutRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def context_ids(self) -> list[int]:
        """Prompt and what was generated so far: what a prefill must compute."""
        return [*self.request.prompt_ids, *self.tokens]

    @property
    def max_length(self) -> int:
        """Tokens of prompt and longest completion."""
        return len(self.request.prompt_ids) + self.request.params.max_tokens

    def append(self, token: int, logprob: float, version: int) -> None:
        """One more generated token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence is at its end, None where it is not."""
        if self.tokens and self.tokens[-1] in self.request.params.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.request.params.max_tokens else None

    def finished(self, reason: FinishReason) -> FinishedSample:
        """The event for the caller."""
        return FinishedSample(self.request.id, self.tokens, self.logprobs, self.versions, reason)


@dataclass(frozen=True)
class Prefill:
    """Sequences whose context is computed now: the first of each list runs, the others share its blocks."""

    forks: list[list[Sequence]]

    @property
    def sequences(self) -> list[Sequence]:
        """All of them, fork by fork."""
        return [sequence for fork in self.forks for sequence in fork]


class Scheduler:
    """First come, first served. A sequence is admitted when the blocks of its longest possible form are free, so that
    nothing that runs is ever pushed out."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences."""
        self.waiting.extend(sequences)

    def admit(self) -> Prefill | None:
        """Take from the queue what fits now; None where nothing does."""
        forks: list[list[Sequence]] = []
        num_tokens = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            leader = self._leader(forks, sequence)
            context = len(sequence.request.prompt_ids) + len(sequence.tokens)
            if leader is None and forks and num_tokens + context > self.max_num_batched_tokens:
                break
            shared = leader.blocks[: context // self.block_size] if leader is not None else []
            needed = self.blocks_for(sequence.max_length) - len(shared)
            if needed > self.pool.num_free:
                break
            self.waiting.popleft()
            self.pool.share(shared)
            sequence.blocks = [*shared, *self.pool.take(needed)]
            self.running.append(sequence)
            if leader is None:
                forks.append([sequence])
                num_tokens += context
            else:
                forks[-1].append(sequence)
        return Prefill(forks) if forks else None

    def _leader(self, forks: list[list[Sequence]], sequence: Sequence) -> Sequence | None:
        """The sequence just before in the queue, where it has the same context: then its blocks are shared."""
        if not forks or sequence.request.group is None or sequence.tokens:
            return None
        leader = forks[-1][0]
        same = leader.request.group == sequence.request.group and not leader.tokens
        return leader if same and leader.request.prompt_ids == sequence.request.prompt_ids else None

    def remove(self, sequence: Sequence) -> None:
        """A running sequence is done: its blocks are free."""
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def requeue_running(self) -> None:
        """Put everything that runs back to the head of the queue, in order; its cache is lost."""
        for sequence in reversed(self.running):
            self.pool.release(sequence.blocks)
            sequence.blocks = []
            self.waiting.appendleft(sequence)
        self.running.clear()
