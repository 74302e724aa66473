"""Speculation: drafted tokens computed together with the last token of a sequence, where that saves time.

A token is drawn at each drafted position by the noise of that position, as if it were decoded alone. As long as the
drafts are what was drawn, all of that is kept, and with it the first token that differs. So drafts decide how many
tokens a pass gives, not which.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence as Rows
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from hybrid_rl.engines.inplace.drafts import Draft, Drafts
from hybrid_rl.engines.inplace.scheduler import Chunk, Scheduler, Sequence
from hybrid_rl.engines.sampling import uniform_numbers

MAX_DRAFTS = 8  # of one sequence in a pass
LEAST_CHANCE = 0.1  # of being accepted, below which no draft is made
HIGHEST_PRICE = 0.6  # of a row, above which not even likely drafts are looked for
LEAST_GAIN = 1.05  # tokens a second that a pass must promise, by those without drafts
FIRST_GAIN, PATIENCE = 1.1, 8.0  # of passes with drafts before any is known; over how many they are averaged
REST_PASSES, SHORT_REST_PASSES = 64, 4  # without drafts after they have not paid, or promised too little
DOWN, UP = 0.3, 0.05  # how far an average moves to a pass that took less, and to one that took longer


class PassSeconds:
    """The seconds of decode passes by their number of rows, which are tokens: nearer to the shortest than to the mean,
    because other processes only make passes longer, and made ascending."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # 1, 2, 3, 4, 6, 8, 12, ...: of passes from the one before to this one
        self._level: list[float] = []

    def add(self, num_rows: int, seconds: float) -> None:
        """Count a pass."""
        power = 1 << (num_rows - 1).bit_length()
        rows = power * 3 // 4 if power >= 4 and num_rows <= power * 3 // 4 else power
        place = bisect_left(self._rows, rows)
        if place == len(self._rows) or self._rows[place] != rows:
            self._rows.insert(place, rows)
            self._level.insert(place, seconds)
        gap = seconds - self._level[place]
        self._level[place] += gap * (UP if gap > 0 else DOWN)

    @property
    def most_rows(self) -> int:
        """Rows of the largest passes that were seen; 0 without any."""
        return self._rows[-1] if self._rows else 0

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the seconds of passes of so many rows; once there is one pass at least."""
        return np.interp(rows, self._rows, np.maximum.accumulate(self._level))


class Speculation:
    """Adds drafts to passes that only decode.

    mode: on = whatever there is; auto = as far as the seconds of earlier passes, and how often drafts were right,
    promise more tokens a second, and while they keep that promise. A clock decides then, which may be: which tokens
    come does not depend on it. Sequences with a repetition penalty get no drafts, nor do those that share a chunk.
    """

    def __init__(self, scheduler: Scheduler, mode: Literal["auto", "on"]) -> None:
        self._scheduler, self._is_on = scheduler, mode == "on"
        self._drafts = Drafts()
        self._seconds = PassSeconds()
        self._made: dict[int, list[Draft]] = {}  # the drafts of the pass, by request
        self._start, self._decodes = 0.0, False
        self._gain, self._rest = FIRST_GAIN, 0

    def begin_rollout(self) -> None:
        """Forget what is known of the sequences that ran; completions are kept."""
        self._drafts.begin_rollout()
        self._gain, self._rest = max(self._gain, FIRST_GAIN), 0

    def remember(self, sequence: Sequence) -> None:
        """Draft from a completion that has ended, from now on."""
        self._drafts.remember(sequence.request.id, sequence.request.prompt_ids, sequence.tokens)

    def add(self, chunks: Rows[Chunk]) -> None:
        """Add drafts to a scheduled pass, and the blocks that they need."""
        self._start, self._made = time.perf_counter(), {}
        self._decodes = all(chunk.is_decode for chunk in chunks)
        alone = [chunk for chunk in chunks if not chunk.followers]
        if not self._decodes or not alone or not (self._is_on or self._may_pay(len(chunks))):
            return
        least = LEAST_CHANCE if self._is_on else max(LEAST_CHANCE, self._price(len(chunks)))
        proposals = self._proposals([chunk.sequence for chunk in alone], least)
        if not self._is_on:
            chances = np.array([draft.chance for drafts in proposals for draft in drafts])
            least = self._least_chance(len(chunks), _num_sequences(chunks), chances)
        for chunk, drafts in zip(alone, proposals, strict=True):
            count = self._scheduler.make_room(chunk, sum(draft.chance >= least for draft in drafts))
            if count:
                self._made[chunk.sequence.request.id] = drafts[:count]
                chunk.add_drafts([draft.token for draft in drafts[:count]])

    def settle(self, chunks: Rows[Chunk]) -> None:
        """Learn from a pass whose tokens have been appended to their sequences."""
        if not self._decodes:
            return
        seconds = time.perf_counter() - self._start
        num_made = 0
        for chunk in chunks:
            num_made += chunk.num_made + len(chunk.followers)
            if chunk.drafts:
                self._scheduler.keep_drafts(chunk)
                drafts, made = self._made[chunk.sequence.request.id], chunk.sequence.tokens[-chunk.num_made :]
                for draft, token in zip(drafts, made, strict=False):
                    self._drafts.judge(draft, draft.token == token)
        num_rows = sum(chunk.count for chunk in chunks)
        self._seconds.add(num_rows, seconds)
        if self._made and not self._is_on:
            gain = num_made / _num_sequences(chunks) * self._of(len(chunks)) / self._of(num_rows)
            self._gain += (gain - self._gain) / PATIENCE
            if self._gain < 1.0:
                self._gain, self._rest = FIRST_GAIN, REST_PASSES

    def _of(self, num_rows: int) -> float:
        return float(self._seconds.of(np.array([num_rows]))[0])

    def _price(self, num_rows: int) -> float:
        """Return what a row more costs, by the seconds that a row of the pass takes."""
        more = min(2 * num_rows, self._seconds.most_rows)
        return (self._of(more) / self._of(num_rows) - 1) * num_rows / (more - num_rows)

    def _may_pay(self, num_rows: int) -> bool:
        """Return whether drafts could pay if most of them were right."""
        self._rest -= 1
        return self._rest < 0 and self._seconds.most_rows > num_rows and self._price(num_rows) < HIGHEST_PRICE

    def _least_chance(self, num_rows: int, num_sequences: int, chances: npt.NDArray[np.float64]) -> float:
        """Return the chance from which on drafts are kept: that with the most tokens a second; above 1 if none pays.
        num_rows: of the pass without drafts, which give each of the sequences a token."""
        ordered = -np.sort(-chances)[: self._seconds.most_rows - num_rows]
        tokens = num_sequences + np.concatenate(([0.0], np.cumsum(ordered)))
        rates = tokens / self._seconds.of(num_rows + np.arange(len(tokens)))
        best = int(rates.argmax())
        if rates[best] < LEAST_GAIN * rates[0]:
            self._rest = SHORT_REST_PASSES
            return 2.0
        return float(ordered[best - 1])

    def _proposals(self, sequences: Rows[Sequence], least: float) -> list[list[Draft]]:
        """Return the drafts of each sequence."""
        counts = [_most_drafts(sequence) for sequence in sequences]
        seeds = np.repeat([sequence.request.params.seed for sequence in sequences], counts)
        firsts = np.repeat([len(sequence.tokens) for sequence in sequences], counts)
        ends = np.cumsum(counts)
        positions = firsts + np.arange(len(seeds)) - np.repeat(ends - counts, counts)
        uniform = uniform_numbers(torch.from_numpy(seeds), torch.from_numpy(positions)).tolist()
        for sequence in sequences:
            self._drafts.follow(sequence.request.id, sequence.request.prompt_ids, sequence.tokens)
        return [
            self._drafts.propose(
                sequence.request.prompt_ids,
                sequence.tokens,
                uniform[end - count : end],
                greedy=sequence.request.params.temperature == 0,
                least_chance=least,
            )
            for sequence, count, end in zip(sequences, counts, ends, strict=True)
        ]


def _num_sequences(chunks: Rows[Chunk]) -> int:
    """Return how many sequences get tokens from chunks that decode."""
    return sum(1 + len(chunk.followers) for chunk in chunks)


def _most_drafts(sequence: Sequence) -> int:
    """Return how many drafts a sequence can use: one token comes without any."""
    params = sequence.request.params
    return min(MAX_DRAFTS, params.max_tokens - len(sequence.tokens) - 1) if params.repetition_penalty == 1 else 0
