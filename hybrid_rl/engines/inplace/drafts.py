"""Drafts of the next tokens of a sequence, without a model: from other completions of its prompt, and its own text.

After the last tokens of a sequence, those that followed the same tokens elsewhere are a sample of what may come. A
draft is that quantile of this sample which the noise of the draft's position names. The engine draws its token by the
same number from the distribution itself, so the two are often equal even where many tokens are likely.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mode
from typing import NamedTuple

MAX_STORED_TOKENS = 1 << 20  # of prompts and completions that are kept, about 40 MB
MAX_READ_TOKENS = 1 << 16  # in the tables of all prompts, about 60 MB
MAX_SHARED_TOKENS = 1 << 15  # in the table that all prompts share, about 20 MB; it is begun anew then
MAX_COMPLETIONS = 32  # of one prompt that are kept
MAX_UNREAD = 64  # completions that wait for the shared table
MAX_FOLLOWERS = 1024  # tokens that one context keeps
# Lengths of the contexts that are looked up, the longest first: among the sequences of the same prompt, and among all.
OWN_LENGTHS = (6, 3, 1)
SHARED_LENGTHS = (2, 1, 0)
LONGEST = OWN_LENGTHS[0]
PRIOR_HITS, PRIOR_TRIES = 0.5, 2.0  # of a kind of draft that was never tried
LATEST_TRIES = 200.0  # that decide how often a kind of draft is right

Table = dict[tuple[int, ...], list[int]]  # by context, what followed it, ascending
Kind = tuple[int, int]  # which lookup a draft is from, and the bits of the number of examples that it had


class Draft(NamedTuple):
    """A drafted token. chance: that it and all drafts before it are accepted; kind: whose record that comes from."""

    token: int
    chance: float
    kind: Kind


@dataclass
class _Prompt:
    """What is known of one prompt. completions: that have ended, the newest last; table: of all sequences that were
    read, and how many tokens those have; num_read: of each running sequence, by request; unread: the last completions
    that the table lacks."""

    completions: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=MAX_COMPLETIONS))
    table: Table = field(default_factory=dict)
    num_table: int = 0
    num_read: dict[int, int] = field(default_factory=dict)
    num_unread: int = 0


class Drafts:
    """What sequences continued with, by prompt and by context.

    It is a cache, bounded in tokens, and what it says need not be right: new weights leave it as it is, and nothing of
    it is in checkpoints. Sequences are read into tables when a draft for their prompt is asked for; what was used least
    recently makes room.
    """

    def __init__(self, max_stored_tokens: int = MAX_STORED_TOKENS, max_read_tokens: int = MAX_READ_TOKENS) -> None:
        self._max_stored_tokens, self._num_stored = max_stored_tokens, 0
        self._max_read_tokens, self._num_read = max_read_tokens, 0
        self._prompts: OrderedDict[tuple[int, ...], _Prompt] = OrderedDict()
        self._shared: Table = {}
        self._num_shared = 0
        self._unread: deque[Sequence[int]] = deque(maxlen=MAX_UNREAD)
        self._record: dict[Kind, tuple[float, float]] = {}  # right ones, and all, of the latest drafts of a kind
        self._chances: dict[Kind, float] = {}

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of the prompts and completions that are kept."""
        return self._num_stored

    def begin_rollout(self) -> None:
        """Forget which sequences ran."""
        for prompt in self._prompts.values():
            prompt.num_read.clear()

    def remember(self, identity: int, prompt_ids: tuple[int, ...], token_ids: Sequence[int]) -> None:
        """Keep a completion that has ended. identity: of its request."""
        prompt = self._prompt(prompt_ids)
        if identity in prompt.num_read:
            self._read(prompt, prompt_ids, token_ids, prompt.num_read.pop(identity))
        else:
            prompt.num_unread += 1
        self._unread.append(token_ids)
        if len(prompt.completions) == MAX_COMPLETIONS:
            self._num_stored -= len(prompt.completions[0])
        prompt.completions.append(tuple(token_ids))
        self._num_stored += len(token_ids)
        while self._num_stored > self._max_stored_tokens:
            oldest_ids, oldest = self._prompts.popitem(last=False)
            self._num_stored -= len(oldest_ids) + sum(map(len, oldest.completions))
            self._num_read -= oldest.num_table

    def follow(self, identity: int, prompt_ids: tuple[int, ...], token_ids: Sequence[int]) -> None:
        """Read what a running sequence has got so far, for itself and for those of the same prompt."""
        prompt = self._prompt(prompt_ids)
        if not prompt.num_table:
            self._grow(prompt, prompt_ids, 0)
        for ended in [*prompt.completions][-prompt.num_unread :] if prompt.num_unread else ():
            self._read(prompt, prompt_ids, ended, 0)
        prompt.num_unread = 0
        self._read(prompt, prompt_ids, token_ids, prompt.num_read.get(identity, 0))
        prompt.num_read[identity] = len(token_ids)
        while self._unread:
            completion = self._unread.popleft()
            self._num_shared += len(completion)
            if self._num_shared > MAX_SHARED_TOKENS:
                self._shared, self._num_shared = {}, len(completion)
            _add(self._shared, SHARED_LENGTHS, completion, 0)

    def propose(
        self,
        prompt_ids: tuple[int, ...],
        token_ids: Sequence[int],
        uniform: Sequence[float],
        *,
        greedy: bool,
        least_chance: float,
    ) -> list[Draft]:
        """Draft the next tokens of a sequence that was followed.

        uniform: the number that picks each token; one draft for each, unless it gets less likely than `least_chance`
        that this draft and all before it are accepted. greedy: the best token is wanted, whatever the number.
        """
        own = self._prompts[prompt_ids].table
        lookups = [*((own, length) for length in OWN_LENGTHS), *((self._shared, length) for length in SHARED_LENGTHS)]
        context = (*prompt_ids[-LONGEST:], *token_ids[-LONGEST:])[-LONGEST:]
        drafts: list[Draft] = []
        chance = 1.0
        for number in uniform:
            best, followers, kind = 0.0, None, (0, 0)
            for place, (table, length) in enumerate(lookups):
                examples = table.get(context[len(context) - length :]) if length <= len(context) else None
                if examples is not None:
                    likelihood = self._chances.get((place, len(examples).bit_length()), PRIOR_HITS / PRIOR_TRIES)
                    if likelihood > best:
                        best, followers, kind = likelihood, examples, (place, len(examples).bit_length())
            chance *= best
            if followers is None or chance < least_chance:
                break
            token = mode(followers) if greedy else followers[int(number * len(followers))]
            drafts.append(Draft(token, chance, kind))
            context = (*context, token)[-LONGEST:]
        return drafts

    def judge(self, draft: Draft, is_right: bool) -> None:
        """Learn whether a draft was the token that came, all before it having been right."""
        hits, tries = self._record.get(draft.kind, (PRIOR_HITS, PRIOR_TRIES))
        kept = min(1.0, LATEST_TRIES / tries)
        hits, tries = kept * hits + is_right, kept * tries + 1
        self._record[draft.kind] = hits, tries
        self._chances[draft.kind] = hits / tries

    def _prompt(self, prompt_ids: tuple[int, ...]) -> _Prompt:
        """Return what is known of a prompt, which is used now."""
        if prompt_ids not in self._prompts:
            self._prompts[prompt_ids] = _Prompt()
            self._num_stored += len(prompt_ids)
        self._prompts.move_to_end(prompt_ids)
        return self._prompts[prompt_ids]

    def _read(self, prompt: _Prompt, prompt_ids: tuple[int, ...], token_ids: Sequence[int], num_read: int) -> None:
        """Add a completion to the table of its prompt, from token `num_read` on."""
        if num_read < LONGEST:
            start = min(LONGEST, len(prompt_ids))
            token_ids, num_read = (*prompt_ids[len(prompt_ids) - start :], *token_ids), num_read + start
        self._grow(prompt, token_ids, num_read)

    def _grow(self, prompt: _Prompt, token_ids: Sequence[int], first: int) -> None:
        _add(prompt.table, OWN_LENGTHS, token_ids, first)
        prompt.num_table += len(token_ids) - first
        self._num_read += len(token_ids) - first
        for other in self._prompts.values():
            if self._num_read <= self._max_read_tokens or other is prompt:
                break
            self._num_read -= other.num_table
            other.table, other.num_table, other.num_unread = {}, 0, len(other.completions)


def _add(table: Table, lengths: Sequence[int], token_ids: Sequence[int], first: int) -> None:
    """Let a table read the tokens of a sequence from place `first` on."""
    for place in range(first, len(token_ids)):
        for length in lengths:
            if length <= place:
                context = tuple(token_ids[place - length : place])
                followers = table.get(context)
                if followers is None:
                    table[context] = [token_ids[place]]
                    continue
                insort(followers, token_ids[place])
                if len(followers) > MAX_FOLLOWERS:
                    del followers[::2]  # the quantiles stay, and what comes weighs more
