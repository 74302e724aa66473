"""Several datasets by name, mixed by weights that can be changed while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

import numpy as np

from hybrid_rl.data.curriculum import make_sampler
from hybrid_rl.data.gym_rows import is_gym
from hybrid_rl.data.prompts import PROMPT_COLUMN, PromptEncoder, PromptRow
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.data.source import SizedSource, StreamSource, digest, load_source
from hybrid_rl.errors import ConfigError, DataError, counted

DATASET_COLUMN = "dataset"  # the name of the dataset that a row comes from
MOST_LETTERS = 100  # of a name, which metrics have in theirs
_STATE_VERSION = 1


class MixedSource(SizedSource):
    """Datasets of known length, one after the other. Rows have the columns of all, None where their dataset has no such
    column, and the column `dataset` with its name.

    parts: the datasets by name.
    """

    def __init__(self, parts: Mapping[str, SizedSource]) -> None:
        self.parts = dict(parts)
        sources = list(self.parts.values())
        for name, source in self.parts.items():
            if DATASET_COLUMN in source.column_names:
                raise DataError(
                    f"dataset {name!r} has a column {DATASET_COLUMN!r}, which tells the datasets apart; rename it"
                )
        kinds = {source.kind: name for name, source in reversed(self.parts.items())}
        if len(kinds) > 1:
            raise DataError(
                f"the prompts of dataset {kinds['text']!r} are text, those of {kinds['messages']!r} are messages; set "
                "data.apply_chat_template=true, which makes a text the message of a user"
            )
        self.kind, self.num_rows = sources[0].kind, sum(source.num_rows for source in sources)
        columns = chain(*(source.column_names for source in sources), [DATASET_COLUMN])
        self.column_names = tuple(dict.fromkeys(columns))
        if any(PROMPT_COLUMN not in source.column_names for source in sources):
            self.column_names = tuple(name for name in self.column_names if name != PROMPT_COLUMN)
        self.note = "\n".join(
            f"dataset {name}: {counted(len(source), 'prompt')}" + (f", {source.note}" if source.note else "")
            for name, source in self.parts.items()
        )
        self.fingerprint = digest(*(f"{name}={source.fingerprint};".encode() for name, source in self.parts.items()))
        self.is_gym = all(source.is_gym for source in sources)
        self._ends = np.cumsum([len(source) for source in sources])

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt."""
        return max(source.max_length for source in self.parts.values())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, position: int) -> PromptRow:
        """Return the prompt at `position` in 0 .. len - 1, counted through all datasets. Raises IndexError."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside the {len(self)} prompts of the datasets")
        place = int(np.searchsorted(self._ends, position, side="right"))
        name = list(self.parts)[place]
        return self.of(name, self.parts[name][position - (int(self._ends[place - 1]) if place else 0)])

    def prompt_keys(self) -> Iterator[bytes]:
        """Yield for each prompt what is equal for equal token ids, dataset by dataset."""
        return chain.from_iterable(source.prompt_keys() for source in self.parts.values())

    def of(self, name: str, row: PromptRow) -> PromptRow:
        """Return a row of one dataset as a row of all."""
        others = dict.fromkeys(column for column in self.column_names if column != PROMPT_COLUMN)
        columns = {**others, **row.columns, DATASET_COLUMN: name}
        return PromptRow(row.index, row.prompt, row.prompt_ids, columns, row.has_prompt)

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row and dataset by dataset, those of dropped rows too."""
        return chain.from_iterable(
            source.values(name)
            if name in source.column_names
            else repeat(part if name == DATASET_COLUMN else None, source.num_rows)
            for part, source in self.parts.items()
        )


class MixedSampler(PromptSampler):
    """Takes prompts from several datasets in proportion to their weights, each in the order of its own sampler.

    Every dataset earns its weight at each draw; the one with the most credit is drawn and pays 1 (smooth weighted
    round robin). So at any time a dataset was drawn less than once too often, and the order depends on the weights and
    on the seed only.
    """

    def __init__(
        self, source: MixedSource, samplers: Mapping[str, PromptSampler], weights: Mapping[str, float] | None = None
    ) -> None:
        """
        Args:
            source: what the prompts belong to.
            samplers: one for each of its datasets, by name.
            weights: of the datasets, in any unit; None or empty = in proportion to their sizes.

        Raises:
            ConfigError: weights that are not one finite number >= 0 for every dataset.
        """
        self._mixed, self._samplers = source, dict(samplers)
        self._weights = self._checked(weights or {name: len(part) for name, part in source.parts.items()})
        self._configured = dict(self._weights)
        self._credits = dict.fromkeys(self._samplers, 0.0)
        self._num_drawn = 0
        self._assigned: dict[str, float] | None = None

    def __repr__(self) -> str:
        return f"MixedSampler({', '.join(f'{name}={weight:.3g}' for name, weight in self._weights.items())})"

    @property
    def weights(self) -> Mapping[str, float]:
        """The shares of the datasets in the draws, by name; they sum up to 1. Assign a mapping to change them: it holds
        from the next draw on, and a checkpoint keeps it."""
        return MappingProxyType(self._weights)

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        self._assigned = self._weights = self._checked(weights)
        self._credits = dict.fromkeys(self._samplers, 0.0)  # what was earned under other weights is not owed

    def assigned(self) -> Mapping[str, float] | None:
        """Return the weights if they were assigned since the last call, else None."""
        weights, self._assigned = self._assigned, None
        return weights

    def take(self, num_prompts: int) -> list[PromptRow]:
        """Return the next prompts, in the order in which datasets were drawn."""
        credit, drawn = dict(self._credits), []
        for _ in range(num_prompts):
            for name, weight in self._weights.items():
                credit[name] += weight
            name = max(credit, key=credit.__getitem__)  # of equals the first
            credit[name] -= 1.0
            drawn.append(name)
        before = {name: sampler.state_dict() for name, sampler in self._samplers.items()}
        try:
            rows = {name: iter(self._samplers[name].take(drawn.count(name))) for name in dict.fromkeys(drawn)}
            taken = [self._mixed.of(name, next(rows[name])) for name in drawn]
        except BaseException:
            for name, state in before.items():
                self._samplers[name].load_state_dict(state)
            raise
        self._credits = credit
        self._num_drawn += num_prompts
        return taken

    @property
    def epoch(self) -> float:
        """Prompts drawn, in units of all datasets together."""
        return self._num_drawn / len(self._mixed)

    def observe(self, rows: Sequence[PromptRow], rates: Sequence[float]) -> None:
        for name, sampler in self._samplers.items():
            places = [place for place, row in enumerate(rows) if row.columns[DATASET_COLUMN] == name]
            sampler.observe([rows[place] for place in places], [rates[place] for place in places])

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, sampler in self._samplers.items():
            metrics[f"data/{name}/epoch"] = sampler.epoch
            metrics |= {f"data/{name}/{key}": value for key, value in sampler.metrics().items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the positions in all datasets, and the weights, as plain JSON values."""
        return {
            "version": _STATE_VERSION,
            "datasets": {name: sampler.state_dict() for name, sampler in self._samplers.items()},
            "weights": dict(self._weights),
            "configured_weights": dict(self._configured),
            "credits": dict(self._credits),
            "num_drawn": self._num_drawn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken. Weights are those of the state, also if they were changed while
        the run went on, unless the configuration now has others than then.

        Raises:
            DataError: the state is damaged, or belongs to other datasets.
        """
        keys = ("datasets", "weights", "configured_weights", "credits", "num_drawn")
        if state.get("version") != _STATE_VERSION or any(key not in state for key in keys):
            raise DataError(
                "the saved data position is not one of several datasets by name; resume with the dataset of then, or "
                "start a new run"
            )
        if list(state["datasets"]) != list(self._samplers):
            raise DataError(
                f"the saved data position belongs to the datasets {', '.join(state['datasets'])}, now they are "
                f"{', '.join(self._samplers)}; resume with the same, in this order, or start a new run"
            )
        for name, sampler in self._samplers.items():
            try:
                sampler.load_state_dict(state["datasets"][name])
            except DataError as error:
                raise DataError(f"dataset {name!r}: {error}") from error
        self._num_drawn = state["num_drawn"]
        if state["configured_weights"] == self._configured:
            self._weights, self._credits = dict(state["weights"]), dict(state["credits"])

    def _checked(self, weights: Mapping[str, float]) -> dict[str, float]:
        names = list(self._samplers)
        if not isinstance(weights, Mapping):
            raise ConfigError(f"dataset weights {weights!r} must be a mapping such as {dict.fromkeys(names, 1.0)}")
        unknown = [name for name in weights if name not in self._samplers]
        missing = [name for name in names if name not in weights]
        if unknown or missing:
            raise ConfigError(
                f"dataset weights {dict(weights)} "
                + (f"name {unknown[0]!r}, which is no dataset" if unknown else f"leave out {missing[0]!r}")
                + f"; give one for each of {', '.join(names)} (0 = never)"
            )
        for name, value in weights.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= 0):
                raise ConfigError(f"dataset weights: {name}={value!r} must be a finite number of at least 0")
        largest = max(weights.values(), default=0)
        if not largest:
            raise ConfigError(f"dataset weights {dict(weights)} are all 0; give at least one dataset a weight above 0")
        parts = {name: weights[name] / largest for name in names}  # or the sum of huge ones would overflow
        total = math.fsum(parts.values())
        return {name: part / total for name, part in parts.items()}


def load_sources(dataset: Any, encoder: PromptEncoder) -> SizedSource | StreamSource:
    """Make a prompt source from one dataset (`load_source`), or from a mapping of names to several.

    Raises DataError, with the name of the dataset, for one that cannot be read or is a stream.
    """
    if not isinstance(dataset, Mapping) or is_gym(dataset) or not is_named(dataset):
        return load_source(dataset, encoder)
    parts: dict[str, SizedSource] = {}
    for name, part in dataset.items():
        if not name.isprintable() or not name.strip() or "/" in name or len(name) > MOST_LETTERS:
            raise DataError(
                f"a dataset is named {name!r:.80}, but metrics are named data/<name>/reward: use at most "
                f"{MOST_LETTERS} printable characters, without /"
            )
        try:
            source = load_source(part, encoder)
        except DataError as error:
            raise DataError(f"dataset {name!r}: {error}") from error
        if not isinstance(source, SizedSource):
            raise DataError(
                f"dataset {name!r} is a stream; only datasets of known size can be mixed: load it, or mix it"
            )
        parts[str(name)] = source
    return MixedSource(parts)


def is_named(dataset: Mapping[Any, Any]) -> bool:
    """Whether a mapping is one of names to datasets, and not of columns to values or of a hub's splits."""
    if not dataset or PROMPT_COLUMN in dataset or type(dataset).__name__.endswith("DatasetDict"):
        return False
    return all(isinstance(name, str) and _may_be_dataset(value) for name, value in dataset.items())


def _may_be_dataset(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    return value is not None and not isinstance(value, bytes | int | float)


def sampler_of(
    source: SizedSource | StreamSource,
    *,
    shuffle: bool | None,
    seed: int,
    weights: Mapping[str, float] | None = None,
    floor: float | None = None,
) -> PromptSampler:
    """Return the sampler of a source. weights: of several datasets; floor: of the curriculum, None = there is none.

    Raises ConfigError or DataError for options that this source has no use for.
    """
    if isinstance(source, MixedSource):
        parts = {n: make_sampler(p, shuffle=shuffle, seed=seed, floor=floor) for n, p in source.parts.items()}
        return MixedSampler(source, parts, weights)
    if weights:
        raise ConfigError(
            f"dataset_weights={dict(weights)}, but there is one dataset without a name; give several by name, or leave "
            "it out"
        )
    return make_sampler(source, shuffle=shuffle, seed=seed, floor=floor)
