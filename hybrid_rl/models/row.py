"""A micro-batch as one packed row, in which samples of the same prompt share its tokens.

The row holds roots, then children. A root is a separate sequence: the whole of a sample, or a prompt that several
samples share, with the tokens with which all of their completions begin. A child is the rest of such a completion; it
attends to its root and causally to itself. Completions that are the same token for token are one child: short answers
often are. If all prompts begin alike, as with a system prompt and the schemas of tools, those tokens stand once in
front of the roots: a prefix, to which everything after it attends. With the prefix and the prompts in front and the
children of a root side by side, both sides of "completions attend to their prompt" are contiguous slices of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.batch import Jagged, lengths_to_offsets
from hybrid_rl.errors import ModelError
from hybrid_rl.memory.transfer import upload

# Large rows are filled up to a multiple of this by a sequence that is never read. Libraries prepare a matrix product
# again for every number of rows, and memory of ever new sizes is never reused. It repeats the row's first token: one
# that is in no sample may have an embedding of zeros, at which some norms have an infinite slope: 0 * inf is NaN.
ROW_STEP = 128
SMALLEST_FILLED_ROW = 1024
# A prefix is shared if that saves this part of the row's tokens.
LEAST_SAVED = 1 / 32
# The head computes what is wanted several times once if that saves this part of it.
LEAST_REPEATED = 1 / 32
TOKEN_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd: parts hashes of experts from ids of tokens


@dataclass(frozen=True)
class Layout:
    """The segments of a row, in order.

    roots: tokens of each root, those with children first; children: tokens of each child, at least 1; parents: the
    root of each child: 0 at first, then rising by 0 or 1. is_filled: the last root fills the row up, and is not
    read. prefix: tokens in front of the roots, with which all sequences begin.
    """

    roots: tuple[int, ...]
    children: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    is_filled: bool = False
    prefix: int = 0

    def __post_init__(self) -> None:
        steps = [after - before for before, after in zip((-1, *self.parents), self.parents, strict=False)]
        if len(self.parents) != len(self.children) or steps[:1] not in ([], [1]) or set(steps) - {0, 1}:
            raise ValueError(f"{len(self.children)} children need parents 0, .. rising by 0 or 1, not {self.parents}")
        if self.num_shared > len(self.roots) or min((*self.roots, *self.children, 1)) < 1 or self.prefix < 0:
            raise ValueError(f"every segment has at least 1 token and every child a root, not {self}")

    @property
    def num_shared(self) -> int:
        """Roots with children."""
        return self.parents[-1] + 1 if self.parents else 0

    @property
    def first_root(self) -> int:
        """The segment that is the first root: 1 after a prefix."""
        return int(self.prefix > 0)

    @property
    def first_child(self) -> int:
        """The segment that is the first child, if there is one."""
        return self.first_root + len(self.roots)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every segment."""
        return [*([self.prefix] if self.prefix else []), *self.roots, *self.children]

    @property
    def num_root_tokens(self) -> int:
        """Tokens before the first child."""
        return self.prefix + sum(self.roots)

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return self.num_root_tokens + sum(self.children)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, a child's root included."""
        whole = (self.roots[root] + length for root, length in zip(self.parents, self.children, strict=True))
        return self.prefix + max((*self.roots, *whole), default=0)

    def child_totals(self) -> list[int]:
        """Count the tokens of all children of each root that has any."""
        totals = [0] * self.num_shared
        for root, length in zip(self.parents, self.children, strict=True):
            totals[root] += length
        return totals

    def seen(self) -> list[Tensor]:
        """Return the places of the tokens that the last token of each segment sees: those of the prefix and of its
        root, then its own; int64 each."""
        own = torch.arange(self.num_tokens).split(self.lengths)
        prefix, roots = own[: self.first_root], own[self.first_root : self.first_child]
        whole = [torch.cat([*prefix, root]) if prefix else root for root in roots]
        children = zip(self.parents, own[self.first_child :], strict=True)
        return [*prefix, *whole, *(torch.cat([whole[root], child]) for root, child in children)]

    def check_num_tokens(self, rows: Tensor) -> None:
        """Raise ModelError if these are not the T tokens that were laid out."""
        if rows.shape[0] != self.num_tokens:
            raise ModelError(f"the packed row was planned for {self.num_tokens} tokens but got {rows.shape[0]}")

    def positions(self) -> Tensor:
        """Return the position of every token in its sequence, int64 [T]."""
        own = [0] * len(self.roots) + [self.roots[root] for root in self.parents]
        first = torch.tensor([0] * self.first_root + [self.prefix + before for before in own])
        lengths = torch.tensor(self.lengths)
        return torch.arange(self.num_tokens) + (first - lengths.cumsum(0) + lengths).repeat_interleave(lengths)


def padded(sequences: Sequence[Tensor]) -> Tensor:
    """Lay sequences of [length] out as rows [N, longest]. After its end a sequence repeats its last number, which
    changes nothing before it in causal models."""
    length = max(map(len, sequences))
    return torch.stack([torch.cat([s, s[-1:].expand(length - len(s))]) for s in sequences])


@dataclass(frozen=True)
class PackedRow:
    """A micro-batch as one row of T tokens, with the M completion tokens whose logprobs are wanted.

    token_ids, positions: int64 [T]; labels: int64 [M], the completion tokens in the order of completion_ids; sources:
    int64 [M], the place whose hidden state predicts each of them. distinct: of equal labels with one
    source the first, int64 [D], and which of those each label is, int64 [M]; None if next to all differ. `row_logprobs`
    uses it. ends: the segment in which each sample ends, -1 if it takes no place. experts: int16 [T, L, K], those that
    the routers of a mixture are made to choose, -1 = their own choice; None = always.
    """

    token_ids: Tensor
    positions: Tensor
    labels: Tensor
    sources: Tensor
    layout: Layout
    distinct: tuple[Tensor, Tensor] | None = None
    ends: tuple[int, ...] = ()
    experts: Tensor | None = None

    def at(self, labels: Tensor) -> PackedRow:
        """Return the row with these of its labels alone. labels: int64 indices."""
        return replace(self, labels=self.labels[labels], sources=self.sources[labels], distinct=None)

    def places(self) -> list[Tensor | None]:
        """Return the places of the tokens of each sample, prompt and completion, int64 each on the host; None for one
        that takes no place."""
        seen = self.layout.seen()
        return [seen[end] if end >= 0 else None for end in self.ends]

    def of_samples(self, values: Tensor, lengths: Sequence[int], missing: int) -> Tensor:
        """Take numbers of the tokens of the row, [T, ...], to those of the samples, whose numbers of tokens are
        `lengths`: [sum(lengths), ...], `missing` for samples that take no place."""
        seen = zip(self.places(), lengths, strict=True)
        where = torch.cat([torch.full((n,), -1) if places is None else places for places, n in seen])
        (index,) = upload((where,), values.device)
        taken = values[index]  # of -1 the last, which is replaced
        taken[index < 0] = missing
        return taken

    def _spread(self, experts: Jagged, device: torch.device) -> Tensor:
        spread = experts.values.new_full((self.layout.num_tokens, *experts.values.shape[1:]), -1)
        for places, of_sample in zip(self.places(), experts, strict=True):
            if places is not None:
                spread[places] = of_sample
        (on_device,) = upload((spread,), device)
        return on_device

    @classmethod
    def of(
        cls,
        prompts: Jagged,
        completions: Jagged,
        device: torch.device,
        least_saved: float | None = None,
        experts: Jagged | None = None,
    ) -> PackedRow:
        """Lay out N samples. A sample without completion tokens takes no place (but one does if all are such).
        least_saved: the part of the row's tokens that a prefix must save; None = `LEAST_SAVED`. experts: int16
        [.., L, K] of the tokens of each sample, prompt and completion: tokens are shared only if theirs are the same.

        Logprobs have the order of the completions whatever the order of the row; the first token of every completion
        comes from the last token of its prompt, shared or not.
        """
        keys = (prompts, completions) if experts is None else token_keys(prompts, completions, experts)
        groups = _groups(*keys)
        prompt_rows, completion_rows = list(prompts), list(completions)
        prefix = _prefix(list(keys[0]), groups, LEAST_SAVED if least_saved is None else least_saved)
        sizes = [len(prompt_rows[group.first]) - prefix for group in groups]
        roots = [size + group.stem for size, group in zip(sizes, groups, strict=True)]
        children = [group.children for group in groups]
        filler = _filler(prefix + sum(roots) + sum(map(sum, children)))
        layout = Layout(
            (*roots, *([filler] if filler else [])),
            tuple(length for lengths in children for length in lengths),
            tuple(root for root, lengths in enumerate(children) for _ in lengths),
            is_filled=filler > 0,
            prefix=prefix,
        )
        first = prompt_rows[groups[0].first]
        parts = [first[:prefix]]
        for group in groups:
            parts += [prompt_rows[group.first][prefix:], completion_rows[group.first][: group.stem]]
        parts += [first[:1].expand(filler)]
        for group in groups:
            parts += [completion_rows[alike[0]][group.stem :] for alike in group.alike if group.children]
        sources = _sources(layout, groups, sizes, completions)
        columns = (torch.cat(parts), layout.positions(), completions.values, sources)
        token_ids, positions, labels, places = upload(columns, device)
        row = cls(token_ids, positions, labels, places, layout, ends=_ends(layout, groups, len(completions)))
        if experts is not None:
            row = replace(row, experts=row._spread(experts, device))
        # Of long completions that have no more in common than a few first tokens too little repeats.
        is_long = completions.values.numel() * LEAST_REPEATED > len(completions)
        if is_long and not any(group.repeats for group in groups):
            return row
        distinct = _distinct(sources, completions.values)
        if distinct is None:
            return row
        first_of, which = upload(distinct, device)
        return replace(row, distinct=(first_of, which))


def place_weights(row: PackedRow, prompts: Jagged, weights: Sequence[tuple[float, float]]) -> Tensor:
    """Return how many tokens each place of a row counts as, float32 [T]. A place counts for all samples that share it,
    the filler for none.

    prompts: of the samples; weights: of a token of the prompt and one of the completion, for each sample.
    """
    counted = torch.zeros(row.layout.num_tokens)
    for places, prompt, (of_prompt, of_completion) in zip(row.places(), prompts.lengths.tolist(), weights, strict=True):
        if places is not None:
            counted[places[:prompt]] += of_prompt
            counted[places[prompt:]] += of_completion
    return counted


def token_keys(prompts: Jagged, completions: Jagged, experts: Jagged) -> tuple[Jagged, Jagged]:
    """Return numbers for the tokens of prompts and completions, int64, the same if token and experts are. They are
    hashes of 64 bits by factors that are always the same; that two of a batch are equal by chance is not expected."""
    num_tokens = prompts.lengths + completions.lengths
    if not torch.equal(experts.lengths, num_tokens):
        raise ModelError(
            f"experts are recorded for {experts.lengths.tolist()[:8]} tokens of the samples, which have "
            f"{num_tokens.tolist()[:8]}; the columns are those of other samples: roll out again"
        )
    chosen = experts.values.flatten(1).to(torch.int64)
    odd = torch.randint(-(2**62), 2**62, (chosen.shape[1],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    hashes = experts.with_values((chosen * odd).sum(1))
    parts = [
        row.split([prompt, len(row) - prompt]) for row, prompt in zip(hashes, prompts.lengths.tolist(), strict=True)
    ]
    of_prompts, of_completions = (torch.cat(side) for side in zip(*parts, strict=True))
    return (
        prompts.with_values(of_prompts * TOKEN_FACTOR + prompts.values),
        completions.with_values(of_completions * TOKEN_FACTOR + completions.values),
    )


@dataclass(frozen=True)
class _Group:
    """The samples of one prompt: a root, with children if their completions differ.

    alike: samples by completion: those in one list have the same. stem: tokens of completions in the root: those with
    which all begin, or the whole of the only one. children: tokens of each different completion after the stem.
    """

    alike: list[list[int]]
    stem: int
    children: list[int]

    @property
    def first(self) -> int:
        """The sample whose prompt and stem stand for all."""
        return self.alike[0][0]

    @property
    def repeats(self) -> bool:
        """Whether tokens of several samples stand in one place."""
        return max(map(len, self.alike)) > 1 or (self.stem > 0 and len(self.children) > 1)


def _groups(prompts: Jagged, completions: Jagged) -> list[_Group]:
    """Return the samples by prompt, those with children first, as a layout has them. A sample without completion tokens
    is left out, unless all are."""
    rows = [row.numpy() for row in completions]
    wanted = [index for index, row in enumerate(rows) if len(row)] or [0]
    groups = []
    for samples in prompt_groups(prompts, wanted):
        same = _same([rows[index].tobytes() for index in samples])
        alike = [[samples[number] for number in numbers] for numbers in same.values()]
        different = [rows[numbers[0]] for numbers in alike]
        if len(different) == 1:
            groups.append(_Group(alike, len(different[0]), []))
            continue
        # What the least and the greatest in any order begin with, all begin with.
        least, greatest = (np.frombuffer(end, dtype=np.int64) for end in (min(same), max(same)))
        longest = min(map(len, different)) - 1
        differs = least[:longest] != greatest[:longest]
        stem = int(differs.argmax()) if differs.any() else longest
        groups.append(_Group(alike, stem, [len(row) - stem for row in different]))
    return sorted(groups, key=lambda group: not group.children)


def _prefix(prompts: Sequence[Tensor], groups: Sequence[_Group], least_saved: float) -> int:
    """Return the tokens that all prompts begin with, 0 if sharing them saves less than a part of the row."""
    rows = [prompts[group.first] for group in groups]
    num_tokens = sum(len(row) + group.stem + sum(group.children) for row, group in zip(rows, groups, strict=True))
    prefix = common_prefix(rows)
    return prefix if prefix * (len(rows) - 1) >= max(least_saved * num_tokens, 1) else 0


def common_prefix(prompts: Sequence[Tensor]) -> int:
    """Return how many tokens all prompts begin with, of which every one that has tokens has at least one more."""
    length = max(min(map(len, prompts)) - 1, 0)
    alike = torch.ones(length, dtype=torch.bool)
    for prompt in prompts[1:]:
        alike &= prompt[:length] == prompts[0][:length]
    return int(alike.cumprod(0).sum())


def _filler(num_tokens: int) -> int:
    """Return the tokens that fill a large row up to a whole number of steps."""
    return -num_tokens % ROW_STEP if num_tokens >= SMALLEST_FILLED_ROW else 0


def _sources(layout: Layout, groups: Sequence[_Group], sizes: Sequence[int], completions: Jagged) -> Tensor:
    """Return the place before each token of the completions: in the root for the stem and the token after it, then in
    the child."""
    starts = lengths_to_offsets(layout.lengths).tolist()
    # By sample: the place before its first token, tokens in the root, and the place before its first token if all of it
    # were in the child (not read if there is none).
    in_root, stems, in_child = ([0] * len(completions) for _ in range(3))
    child = layout.first_child
    for root, (group, size) in enumerate(zip(groups, sizes, strict=True), layout.first_root):
        for alike in group.alike:
            for index in alike:
                in_root[index] = starts[root] + size - 1
                stems[index] = group.stem
                in_child[index] = starts[child] - group.stem - 1
            child += bool(group.children)
    rows = completions.row_index()
    places = torch.arange(rows.numel()) - completions.offsets[:-1][rows]
    before, stem, before_child = torch.tensor([in_root, stems, in_child])[:, rows]
    # The token after the stem comes from the root, too.
    return places + torch.where(places <= stem, before, before_child)


def _distinct(sources: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first of each different pair, int64 [D], in order, and which of them each pair is, int64 [M]; None if
    few repeat."""
    keys = sources * (labels.amax() + 1) + labels if len(labels) else labels
    values, which = torch.unique(keys, return_inverse=True)
    if len(which) - len(values) < max(LEAST_REPEATED * len(which), 1):
        return None
    first = torch.full_like(values, len(which)).scatter_reduce_(0, which, torch.arange(len(which)), "amin")
    order = first.argsort()  # they came in order of their numbers
    return first[order], order.argsort()[which]


def _ends(layout: Layout, groups: Sequence[_Group], num_samples: int) -> tuple[int, ...]:
    """Return the segment in which each sample ends: its child, or its root if that has none; -1 without any."""
    ends, child = [-1] * num_samples, layout.first_child
    for root, group in enumerate(groups, layout.first_root):
        for alike in group.alike:
            for index in alike:
                ends[index] = child if group.children else root
            child += bool(group.children)
    return tuple(ends)


def _same(sequences: Sequence[bytes]) -> dict[bytes, list[int]]:
    """Return the numbers of sequences that are the same, in order of first appearance."""
    numbers: dict[bytes, list[int]] = {}
    for number, sequence in enumerate(sequences):
        numbers.setdefault(sequence, []).append(number)
    return numbers


def prompt_groups(prompts: Jagged, samples: Sequence[int]) -> list[list[int]]:
    """Group those of `samples` (indices into prompts) whose prompt is the same, token for token; groups in order of
    first appearance.

    Sharing has no lower limit: measured on a CPU, 16 prompts of 5 tokens with 8 completions of 13 each take 10 to 25 %
    less time than unshared, and if there is next to nothing to share (completions 25 times as long as the prompt)
    the time is the same within 3 %.
    """
    rows = list(prompts)
    same = _same([rows[index].numpy().tobytes() for index in samples])
    return [[samples[number] for number in numbers] for numbers in same.values()]
