"""Samples of a batch one by one, for people: as objects, as a pandas table, as a view of a notebook or terminal."""

from __future__ import annotations

import difflib
import functools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from hybrid_rl.batch.fields import FIELDS
from hybrid_rl.batch.messages import prompt_text
from hybrid_rl.batch.texts import Reader, token_texts
from hybrid_rl.errors import REPORT_EXTRA, ConfigError, DataError
from hybrid_rl.process.hooks import extra

if TYPE_CHECKING:
    import pandas

MAX_SHOWN = 8  # samples of a batch
DEFAULT_COLOR = "advantage"

# What is looked for in attributes of a batch.
TEXTS = frozenset({"completions", "prompts", "texts", "reward", "advantage", "responses", "sequences"})
EXAMPLES = ("batch['completion_ids']", "batch['rewards']")
# The numbers of a token, by its attribute, and the columns that they come from.
TOKEN_COLUMNS = {
    "version": "policy_version",
    "logprob": "rollout_logprobs",
    "trainer_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "advantage": "advantages",
    "reward": "token_rewards",
    "value": "values",
    "ratio": "ratio",
    "clipped": "clipped",
    "loss_weight": "loss_weight",
    "gradient_share": "gradient_share",
}


class Token(NamedTuple):
    """A token of a completion. text: None if the batch has no tokenizer, "" of a part of a character. is_policy: False
    if a tool or an environment put it there. version: of the policy that sampled it. logprob: ln p when it was sampled;
    trainer_logprob, ref_logprob: of the trainer before the update, and of the reference. ratio, clipped, loss_weight,
    gradient_share: what the update did with it, of replayed steps. What the batch has no column for is None."""

    text: str | None
    id: int
    is_policy: bool
    version: int | None = None
    logprob: float | None = None
    trainer_logprob: float | None = None
    ref_logprob: float | None = None
    advantage: float | None = None
    reward: float | None = None
    value: float | None = None
    ratio: float | None = None
    clipped: bool | None = None
    loss_weight: float | None = None
    gradient_share: float | None = None

    @property
    def gap(self) -> float | None:
        """|ln p of the engine - ln p of the trainer|; None unless both are known."""
        if self.logprob is None or self.trainer_logprob is None:
            return None
        return abs(self.logprob - self.trainer_logprob)


class Sample:
    """One sample of a batch.

    prompt: as in the dataset, text or chat messages; prompt_text: the same as text. completion: text, without special
    tokens. messages: the conversation after the prompt, if an agent held one in messages. reward: None if it failed, or
    there is none; rewards: by function. advantage: the mean over the policy's tokens. group, trajectory, turn: as in
    the batch. row: the dataset's other columns; extra: what reward functions gave to log_extra. Tokens are made when
    they are first asked for.
    """

    def __init__(self, columns: Mapping[str, Any], index: int, reader: Reader | None) -> None:
        def of(name: str, default: Any = None) -> Any:
            value = columns[name][index] if name in columns else default
            return value.item() if isinstance(value, Tensor) else value

        self._columns, self._index, self._reader = columns, index, reader
        self.prompt: Any = of("prompt")
        self.completion: str | None = of("completion")
        conversation = of("conversation") or {}
        self.messages: list[dict[str, Any]] | None = conversation.get("messages")
        self.error: str | None = conversation.get("error")
        self.reward = _number(of("rewards"))
        self.rewards = _by_name(of("function_rewards") or (), reader)
        self.advantage = self._mean_advantage()
        self.group: int | None = of("group")
        self.trajectory: int | None = of("trajectory")
        self.turn: int | None = of("turn")
        self.prompt_length: int | None = of("prompt_length")
        self.completion_length: int | None = of("completion_length")
        self.finish_reason: str | None = of("finish_reason")
        self.row: dict[str, Any] = of("row") or {}
        self.extra: dict[str, Any] = of("extra") or {}

    @property
    def prompt_text(self) -> str:
        """The prompt as text; of chat messages a line each."""
        return prompt_text(self.prompt)

    @functools.cached_property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens of the completion, with the numbers that the batch has for them."""
        if "completion_ids" not in self._columns:
            return ()
        ids = self._columns["completion_ids"][self._index].tolist()
        texts: Sequence[str | None] = [None] * len(ids)
        if self._reader is not None:
            texts = token_texts(self._reader.tokenizer, ids)
        made = [True] * len(ids)
        if "completion_mask" in self._columns:
            made = self._columns["completion_mask"][self._index].tolist()
        columns = {name: column for name, column in TOKEN_COLUMNS.items() if column in self._columns}
        numbers = zip(*(self._columns[column][self._index].tolist() for column in columns.values()), strict=True)
        rows = numbers if columns else [()] * len(ids)
        return tuple(
            Token(text, token, is_policy, **dict(zip(columns, row, strict=True)))
            for text, token, is_policy, row in zip(texts, ids, made, rows, strict=True)
        )

    def _mean_advantage(self) -> float | None:
        if "advantages" not in self._columns:
            return None
        values = self._columns["advantages"][self._index]
        if "completion_mask" in self._columns:
            values = values[self._columns["completion_mask"][self._index]]
        return float(values.mean()) if len(values) else None

    def __repr__(self) -> str:
        texts = (repr(text if len(text) <= 60 else f"{text[:57]}...") for text in (self.prompt_text, self.shown_text))
        numbers = (f"{name} {value:.3g}" for name, value in self._numbers() if value is not None)
        return f"Sample({', '.join(['{} -> {}'.format(*texts), *numbers, str(self.finish_reason)])})"

    def _repr_html_(self) -> str:
        return extra("view_samples")([self], 1).html()

    def _numbers(self) -> Iterator[tuple[str, float | None]]:
        yield from (("group", self.group), ("reward", self.reward), ("advantage", self.advantage))

    @property
    def shown_text(self) -> str:
        """The completion for readers: an agent's conversation with its roles, otherwise the completion."""
        return self.completion or "" if self.messages is None else prompt_text(self.messages)


class Readable(Mapping[str, Any]):
    """What batches and references to batches have for people who look at samples. `load`, `select` and `_with_reader`
    are theirs."""

    num_samples: int
    _reader: Reader | None = None

    def load(self) -> Any:
        """Return the batch in this process."""
        raise NotImplementedError

    def select(self, indices: Any) -> Any:
        """Return the samples at `indices`."""
        raise NotImplementedError

    def with_reader(self, tokenizer: Any, reward_names: Sequence[str] = ()) -> Self:
        """Return the same samples with a tokenizer, which gives tokens their texts, and the names of the reward
        functions. A Trainer's batches have both; neither is a column, and other processes do not get them."""
        raise NotImplementedError

    def _read_by(self, reader: Reader | None) -> Self:
        """Give a reader to a batch that was just made."""
        self._reader = reader
        return self

    if not TYPE_CHECKING:  # or every misspelled attribute would pass the type checker

        def __getattr__(self, name: str) -> Any:
            """Say where that is which people look for in an attribute."""
            advice = "" if name.startswith("_") else _advice(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    def samples(self) -> list[Sample]:
        """Return the samples one by one, in order, on one rank and on many."""
        batch = self.load()
        return [Sample(batch, index, batch._reader) for index in range(batch.num_samples)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with a row for each sample: prompt and completion as text, reward, a column
        `rewards/NAME` for each function, advantage, and every other column with one value per sample. The dataset's
        other columns and those of log_extra follow; one whose name is taken becomes `row/NAME` or `extra/NAME`.

        Raises ConfigError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(f"to_pandas() needs pandas, which is not installed: {REPORT_EXTRA}") from error
        batch = self.load()
        return pandas.DataFrame(list(_records(batch, batch.samples())))

    def show(self, color: str = DEFAULT_COLOR, *, first: int = MAX_SHOWN) -> Any:
        """Return a table of the first samples: leave it as the last line of a cell, or print it.

        color: what colours a token: advantage, gap (engine and trainer disagree), logprob (how likely the token was),
        kl (against the reference), reward, value or version; of replayed steps ratio, clipped, loss_weight and
        gradient_share. Raises DataError for a colour whose columns the batch lacks.
        """
        if isinstance(first, bool) or not isinstance(first, int) or first < 1:
            raise DataError(f"first={first!r} must be a whole number of samples, at least 1")
        extra("check_color")(color, self._columns_known())
        part = self if first >= self.num_samples else self.select(range(first))
        num_groups = len(set(self.get("group", torch.empty(0)).tolist()))
        return extra("view_samples")(part.samples(), self.num_samples, color, num_groups)

    def _columns_known(self) -> frozenset[str]:
        return frozenset(self)

    def _repr_html_(self) -> str:
        is_sampled_only = "advantages" not in (known := self._columns_known()) and "rollout_logprobs" in known
        return self.show("logprob" if is_sampled_only else DEFAULT_COLOR).html()

    def _lines(self, kind: str, advice: str, columns: Iterable[str]) -> str:
        """Describe the batch for a terminal: what it is, what can be done with it, and its columns."""
        names = textwrap.fill(f"columns: {', '.join(columns)}", 100, initial_indent="  ", subsequent_indent=" " * 11)
        return f"{kind}: {self._described()}\n  {advice}\n{names}"

    def _described(self) -> str:
        """Describe the batch in a line: samples, groups, tokens and rewards."""
        parts = [f"{self.num_samples} sample{'s' * (self.num_samples != 1)}"]
        if "group" in self:
            parts[0] += f" in {len(self['group'].unique())} group{'s' * (len(self['group'].unique()) != 1)}"
        if "completion_length" in self:
            parts.append(f"{int(self['completion_length'].sum()):,} completion tokens")
        rewards = self["rewards"] if "rewards" in self else torch.empty(0)
        rewards = rewards[rewards.isfinite()]
        if len(rewards):
            parts.append(
                f"reward {float(rewards.mean()):.3g} ({float(rewards.min()):.3g} to {float(rewards.max()):.3g})"
            )
        return ", ".join(parts)


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _by_name(values: Sequence[float], reader: Reader | None) -> dict[str, float | None]:
    """Name the rewards of functions; by number if their names are not known."""
    names = () if reader is None else reader.reward_names
    known = names if len(names) == len(values) else tuple(map(str, range(len(values))))
    return dict(zip(known, map(_number, values), strict=True))


def _records(batch: Mapping[str, Any], samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    named = {"prompt", "completion", "rewards", "finish_reason"}
    plain = [name for name, column in batch.items() if isinstance(column, Tensor) and name not in named]
    numbers = {name: batch[name].tolist() for name in plain if FIELDS[name].align == "sample"}
    for index, sample in enumerate(samples):
        record: dict[str, Any] = {"prompt": sample.prompt_text, "completion": sample.shown_text}
        record["reward"] = sample.reward
        record |= {f"rewards/{name}": value for name, value in sample.rewards.items()}
        record |= {"advantage": sample.advantage, "finish_reason": sample.finish_reason}
        record |= {name: values[index] for name, values in numbers.items()}
        for home, values in (("row", sample.row), ("extra", sample.extra)):
            record |= {f"{home}/{name}" if name in record else name: value for name, value in values.items()}
        yield record


def _advice(name: str) -> str:
    """Return where a batch has what is looked for in an attribute of this name."""
    if name in FIELDS:
        return f": it is a column, batch[{name!r}]"
    if name in TEXTS:
        return ": samples() has texts and rewards sample by sample, and to_pandas() as a table"
    near = difflib.get_close_matches(name, [member for member in dir(Readable) if not member.startswith("_")], n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; columns are read as {' or '.join(EXAMPLES)}"
