"""Previews of datasets as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.errors import counted, visible
from hybrid_rl.extras.preview.dataset_preview import DatasetPreview

WIDTH = 80
BAR = 36  # columns of the longest bar
NUM_REASONS = 8  # rows whose refusal is explained
NUM_LINES = 14  # of a prompt that is shown


@dataclass(frozen=True)
class RewardNeeds:
    """The columns that a reward function reads. needs: alternatives, each a tuple of columns that suffices. is_known:
    whether it is ready-made, so that a null is known to give no reward; refused: types of values that it cannot use."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    is_known: bool = False
    refused: tuple[str, ...] = ()

    def missing(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that are missing for the first alternative, none if one of them is complete."""
        lacks = [tuple(name for name in names if name not in columns) for names in self.needs]
        return () if not lacks or () in lacks else lacks[0]

    def unusable(self, datasets: Sequence[DatasetPreview]) -> dict[str, int]:
        """Return the types of values in its columns that give no reward, with their numbers. Nulls count for every
        function: only it knows what it makes of them."""
        columns = [name for dataset in datasets for name in dataset.columns]
        used = next((names for names in self.needs if set(names) <= set(columns)), ())
        counts: Counter[str] = Counter()
        for dataset, name in ((dataset, name) for dataset in datasets for name in used):
            kinds = dataset.columns.get(name, ({"null": dataset.num_rows}, ""))[0]
            counts.update({kind: n for kind, n in kinds.items() if kind in ("null", *self.refused)})
        return {kind: n for kind, n in counts.items() if n}


@dataclass(frozen=True)
class Preview:
    """What a run would get from its data: print it, or leave it as the last line of a cell.

    train, held_out: each dataset. shared: prompts in both, as dataset and row of evaluation and of training. rewards:
    and what they need. failure_share: share of samples without a reward that ends a run (max_reward_failure_share).
    """

    train: tuple[DatasetPreview, ...]
    held_out: tuple[DatasetPreview, ...] = ()
    shared: tuple[tuple[str, int, str, int], ...] = ()
    rewards: tuple[RewardNeeds, ...] = ()
    failure_share: float = 0.1

    @property
    def would_start(self) -> bool:
        """Whether a run would take the data as it is."""
        return all(dataset.would_start for dataset in (*self.train, *self.held_out))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        columns = [name for dataset in self.train for name in dataset.columns]
        return {
            "would_start": self.would_start,
            "train": [dataset.to_dict() for dataset in self.train],
            "eval": [dataset.to_dict() for dataset in self.held_out],
            "in_both": [
                {"eval": other, "eval_row": row, "train": name, "train_row": first}
                for other, row, name, first in self.shared
            ],
            "rewards": [
                {
                    "name": reward.name,
                    "needs": reward.needs,
                    "missing": reward.missing(columns),
                    "unusable": reward.unusable(self.train),
                }
                for reward in self.rewards
            ],
        }

    def __str__(self) -> str:
        lines: list[str] = []
        for title, parts in (("", self.train), ("evaluation: ", self.held_out)):
            for dataset in parts:
                lines += [*_dataset_lines(dataset, title), ""]
        lines += self._reward_lines()
        lines += self._shared_lines()
        return "\n".join(visible(line.rstrip()) for line in [*lines, self._verdict()])

    def _reward_lines(self) -> Iterator[str]:
        if not self.rewards:
            return
        columns = [name for dataset in self.train for name in dataset.columns]
        yield "rewards and the columns that they need"
        for reward in self.rewards:
            needs = " or ".join(", ".join(names) for names in reward.needs) or "nothing but the completion"
            missing = reward.missing(columns)
            state = f"missing: {', '.join(missing)}" if missing else "there" + self._unusable(reward)
            yield from _wrapped(f"{reward.name}: {needs}: {state}", "  ", "    ")
        yield ""

    def _unusable(self, one: RewardNeeds) -> str:
        """Say which values of its columns a reward function gets that give no reward."""
        counts = one.unusable(self.train)
        if not counts:
            return ""
        number = f"in {sum(counts.values()):,} of {counted(sum(dataset.num_rows for dataset in self.train), 'row')}"
        why = ", which it cannot compare" if set(counts) - {"null"} else ""
        return f", but {', '.join(sorted(counts))} {number}{why}"

    @property
    def _is_hopeless(self) -> bool:
        """Whether no ready-made reward function could score enough rows."""
        num_rows = sum(dataset.num_rows for dataset in self.train)
        known = [sum(reward.unusable(self.train).values()) for reward in self.rewards if reward.is_known]
        return 0 < len(known) == len(self.rewards) and min(known) > self.failure_share * num_rows

    def _shared_lines(self) -> Iterator[str]:
        if self.held_out:
            number = len(self.shared)
            first = f"; the first: row {self.shared[0][1]} is training row {self.shared[0][3]}" if number else ""
            yield from _wrapped(f"prompts of evaluation that are trained on: {number:,}{first}", "", "  ")
            yield ""

    def _verdict(self) -> str:
        if self.would_start and self._is_hopeless:
            return "a run would take this data, but its rewards would end it or teach nothing: see above"
        if self.would_start:
            return "a run would take this data"
        return "a run would refuse this data: correct the rows above, or leave them out"


def _dataset_lines(one: DatasetPreview, title: str) -> Iterator[str]:
    yield _fit(f"{title}{one.name}: {counted(one.num_rows, 'row')}")
    if one.note:
        yield from _wrapped(one.note, "  ")
    for shown in one.shown:
        yield ""
        how = "as the model will see it" if one.unit == "tokens" else "as text (set model.path for tokens)"
        yield f"row {shown.row}, {shown.length:,} {one.unit}, {how}"
        yield from _prompt_lines(shown.text)
    yield ""
    yield from _column_lines(one)
    yield from _length_lines(one)
    if one.duplicates:
        row, first = one.duplicates[0]
        number = f"{len(one.duplicates):,} prompts were there before"
        yield from _wrapped(f"duplicates: {number}; the first: row {row} is row {first}", "", "  ")
    yield from _refused_lines(one)


def _prompt_lines(text: str) -> Iterator[str]:
    lines = [part for line in visible(text).split("\n") for part in (textwrap.wrap(line, WIDTH - 4) or [""])]
    yield from (f"  | {line}" for line in lines[:NUM_LINES])
    if len(lines) > NUM_LINES:
        yield f"  | ... ({len(lines) - NUM_LINES} more lines)"


def _column_lines(one: DatasetPreview) -> Iterator[str]:
    if not one.columns:
        return
    widest = min(max(map(len, one.columns)), 24)
    yield "columns, the types of their values, and a value"
    for name, (kinds, example) in one.columns.items():
        counts = next(iter(kinds)) if len(kinds) == 1 else ", ".join(f"{kind} {n:,}" for kind, n in kinds.items())
        yield _fit(f"  {name:<{widest}}  {counts or 'nothing':<5}  {example}")


def _length_lines(one: DatasetPreview) -> Iterator[str]:
    if not one.lengths:
        return
    yield ""
    yield f"length of prompts in {one.unit}: " + ", ".join(f"{name} {n:,}" for name, n in one.quantiles().items())
    most = max(count for _, _, count in one.histogram())
    for low, high, count in one.histogram():
        yield f"  {low:>7,} - {high:<7,} {'#' * -(-BAR * count // most):<{BAR}} {count:,}"
    if one.limit is not None:
        share = len(one.too_long) / len(one.lengths)
        fate = {"error": "refused", "drop": "dropped", "truncate": "cut to their end"}[one.overlong]
        row = f", the first is row {one.too_long[0]}" if one.too_long else ""
        over = f"over max_prompt_length={one.limit:,}: {len(one.too_long):,} ({share:.1%}), which would be {fate}{row}"
        yield from _wrapped(over, "", "  ")


def _refused_lines(one: DatasetPreview) -> Iterator[str]:
    if not one.refused:
        return
    yield ""
    unread = sum(row is None for row, _ in one.refused)
    lines = f", and {counted(unread, 'line')} without a row" if unread else ""
    yield f"would be refused: {len(one.refused) - unread:,} of {counted(one.num_rows, 'row')}{lines}"
    for _, why in one.refused[:NUM_REASONS]:
        yield from _wrapped(why, "  - ", "    ")
    if len(one.refused) > NUM_REASONS:
        yield f"  ... and {len(one.refused) - NUM_REASONS:,} more (--json has all)"


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=first if rest is None else rest)


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
