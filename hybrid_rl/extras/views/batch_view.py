"""A view of samples: as HTML in a notebook, as text in a terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from hybrid_rl.batch.messages import is_chat, message_content
from hybrid_rl.batch.samples import DEFAULT_COLOR, TOKEN_COLUMNS, Sample
from hybrid_rl.errors import DataError, visible
from hybrid_rl.extras.views.html import (
    Scale,
    cell,
    escaped,
    folded,
    messages_html,
    page_part,
    scale_of,
    table,
    tokens_html,
)
from hybrid_rl.metrics.metric_sums import number

MAX_CELL = 400  # characters of a text in a terminal


class Color(NamedTuple):
    """A choice of colour. columns: that it needs. of: its number of a token. scale: of the numbers shown."""

    columns: tuple[str, ...]
    of: Callable[[Any], float | None]
    scale: Callable[[Sequence[float | None]], Scale]


def _above_reference(token: Any) -> float | None:
    logprob = token.trainer_logprob if token.trainer_logprob is not None else token.logprob
    return None if logprob is None or token.ref_logprob is None else logprob - token.ref_logprob


COLORS: Mapping[str, Color] = {
    "advantage": Color(("advantages",), lambda token: token.advantage, lambda found: scale_of("advantage", found)),
    # Fixed: what rounding makes (1e-7 in float32) must not look like a fault. In bfloat16 0.01 is usual.
    "gap": Color(
        ("rollout_logprobs", "old_logprobs"),
        lambda token: token.gap,
        lambda _: Scale("|ln p of the engine − ln p of the trainer|", 1.0, 0.001, is_signed=False, is_log=True),
    ),
    "logprob": Color(
        ("rollout_logprobs",),
        lambda token: token.logprob,
        lambda _: Scale("−ln p when it was sampled: strong = unlikely", 6.0, is_signed=False),
    ),
    "kl": Color(
        ("ref_logprobs",),
        _above_reference,
        lambda found: scale_of("ln p of the policy − ln p of the reference", found),
    ),
    "reward": Color(("token_rewards",), lambda token: token.reward, lambda found: scale_of("reward", found)),
    "value": Color(("values",), lambda token: token.value, lambda found: scale_of("value (critic)", found)),
    "ratio": Color(
        ("ratio",),
        lambda token: None if token.ratio is None else token.ratio - 1,
        lambda found: scale_of("importance ratio − 1", found),
    ),
    "clipped": Color(("clipped",), lambda token: token.clipped, lambda _: Scale("clipped", 1.0, is_signed=False)),
    "loss_weight": Color(
        ("loss_weight",), lambda token: token.loss_weight, lambda found: scale_of("weight in the loss", found)
    ),
    "gradient_share": Color(
        ("gradient_share",), lambda token: token.gradient_share, lambda found: scale_of("share of the gradient", found)
    ),
    "version": Color(("policy_version",), lambda token: token.version, lambda found: scale_of("policy version", found)),
}


def check_color(color: str, columns: Collection[str]) -> None:
    """Raise DataError unless the colour exists and a batch with these columns can show it."""
    possible = [name for name, choice in COLORS.items() if set(choice.columns) <= set(columns)]
    if color not in COLORS:
        raise DataError(f"color={color!r} is unknown; use one of {', '.join(COLORS)}")
    if color not in possible and color != DEFAULT_COLOR:
        missing = [column for column in COLORS[color].columns if column not in columns]
        raise DataError(
            f"color={color!r} needs the columns {missing}, which this batch does not have; it can show "
            f"{', '.join(possible) or 'no colours'}"
        )


@dataclass(frozen=True, repr=False)
class BatchView:
    """Some samples of a batch of num_samples in num_groups, with tokens coloured by `color`."""

    samples: Sequence[Sample]
    num_samples: int
    color: str = DEFAULT_COLOR
    num_groups: int = 0

    def __repr__(self) -> str:
        """Return the samples as a table of text, as wide as the terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=SIMPLE_HEAD, title=self._title(), title_justify="left", show_lines=False)
        for title in ("prompt", "completion"):
            grid.add_column(title, overflow="fold")
        for title in ("reward", "advantage", "end"):
            grid.add_column(title, justify="right", no_wrap=True)
        last: int | None = None
        for sample in self.samples:
            prompt = "" if sample.group is not None and sample.group == last else _cut(sample.prompt_text)
            numbers = (number(sample.reward), number(sample.advantage), sample.finish_reason or "")
            grid.add_row(Text(prompt), Text(_cut(sample.shown_text)), *map(Text, numbers))
            last = sample.group
        file = io.StringIO()
        width = min(shutil.get_terminal_size((100, 24)).columns, 160)
        Console(file=file, width=width, no_color=True, force_terminal=False, force_jupyter=False).print(grid)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """Return the samples as a table of HTML. Its size is bounded: long texts and conversations are cut."""
        choice = COLORS[self.color]
        scale = choice.scale([choice.of(token) for sample in self.samples for token in sample.tokens])
        functions = list(dict.fromkeys(name for sample in self.samples for name in sample.rewards))
        functions = functions if len(functions) > 1 else []
        rows = []
        for _, members in groupby(self.samples, key=_group_of):
            for place, sample in enumerate(group := list(members)):
                prompt = cell(_prompt_html(sample), rows=len(group)) if place == 0 else ""
                numbers = [sample.reward, *(sample.rewards.get(name) for name in functions), sample.advantage]
                cells = [cell(_completion_html(sample, choice, scale))]
                cells += [cell(escaped(number(value)), is_number=True) for value in numbers]
                cells.append(cell(escaped(sample.finish_reason or ""), is_number=True))
                rows.append(prompt + "".join(cells))
        titles = ("prompt", "completion", "reward", *functions, "advantage", "end")
        has_numbers = any(choice.of(token) is not None for sample in self.samples for token in sample.tokens)
        return page_part(escaped(self._title()), table(titles, rows), scale.legend() if has_numbers else "")

    def _title(self) -> str:
        if self.num_samples == 1 == len(self.samples):
            return ""
        groups = f" in {self.num_groups} group{'s' * (self.num_groups != 1)}" if self.num_groups else ""
        shown = len(self.samples)
        more = f"; the first {shown} are shown (show(first=...), samples())" if shown < self.num_samples else ""
        return f"{self.num_samples} samples{groups}{more}"


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(str(message["role"]), message_content(message)) for message in messages]


def _group_of(sample: Sample) -> Any:
    """Return what samples of one group have in common, and others do not."""
    return id(sample) if sample.group is None else (sample.group, sample.prompt_text)


def _cut(text: str) -> str:
    more = len(text) - MAX_CELL
    return visible(text[:MAX_CELL]) + (f"... ({more:,} more characters)" if more > 0 else "")


def _prompt_html(sample: Sample) -> str:
    return messages_html(_messages(sample.prompt)) if is_chat(sample.prompt) else escaped(sample.prompt_text)


def _completion_html(sample: Sample, choice: Color, scale: Scale) -> str:
    """Return the completion with its tokens coloured; a conversation as messages, its tokens folded below."""
    tokens = sample.tokens
    error = f"<div><b>error</b> {escaped(sample.error)}</div>" if sample.error else ""
    conversation = "" if sample.messages is None else messages_html(_messages(sample.messages))
    if not tokens or any(token.text is None for token in tokens):
        return (conversation if sample.messages is not None else escaped(sample.shown_text)) + error
    of_policy = [token.is_policy for token in tokens]
    shown = tokens_html(
        [token.text or "" for token in tokens],
        [choice.of(token) if token.is_policy else None for token in tokens],
        scale,
        is_policy=of_policy,
        titles=[_token_title(place, token) for place, token in enumerate(tokens)],
    )
    if sample.messages is None and all(of_policy):
        return shown + error
    spans = [(is_policy, len(list(run))) for is_policy, run in groupby(of_policy)]
    counts = ", ".join(f"{size} of the {'policy' if is_policy else 'environment'}" for is_policy, size in spans[:8])
    counts += ", ..." * (len(spans) > 8)
    return conversation + folded(f"tokens: {counts}", shown, is_open=not conversation) + error


def _token_title(place: int, token: Any) -> str:
    """Return what is shown under the mouse: number, id, and the numbers that are known."""
    known = [f"token {place}", f"id {token.id}"]
    for name, value in ((name, getattr(token, name)) for name in TOKEN_COLUMNS):
        if value is not None and token.is_policy:
            known.append(f"{name} {value:.4g}")
    return " · ".join(known if token.is_policy else [*known, "not of the policy"])
