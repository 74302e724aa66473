"""The order in which prompts are used, resumable at any prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.data.source import SizedSource, StreamSource
from hybrid_rl.errors import ConfigError, DataError

_STATE_VERSION = 1


class PromptSampler:
    """Takes prompts from a source, epoch after epoch.

    The order of an epoch depends only on (seed, epoch, number of prompts): neither the sizes of the requests nor a
    resume change it. The position moves only when `take` returns; an error or Ctrl-C inside it loses nothing.
    """

    def __init__(self, source: SizedSource | StreamSource, *, shuffle: bool | None = None, seed: int = 0) -> None:
        """
        Args:
            source: where the prompts come from.
            shuffle: whether each epoch has a new order; None = True for sized sources, False for streams.
            seed: of the order; at least 0.

        Raises:
            DataError: shuffle is set for a stream.
        """
        sized = isinstance(source, SizedSource)
        if shuffle and not sized:
            raise DataError(
                "shuffle=True, but a stream is used in the order it comes; shuffle the stream itself, for example "
                "IterableDataset.shuffle(seed=0, buffer_size=10_000), and leave shuffle unset"
            )
        self._source = source
        self._seed = seed
        self._shuffle = sized if shuffle is None else shuffle
        self._epoch = 0  # finished passes
        self._position = 0  # within the pass: counts prompts of a sized source, rows of a stream
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # (epoch, order)
        self._stream: Iterator[PromptRow] | None = None

    def take(self, num_prompts: int) -> list[PromptRow]:
        """Return the next `num_prompts` prompts, across epochs.

        Raises:
            DataError: the stream yielded a bad row.
        """
        if isinstance(self._source, SizedSource):
            return self._take_sized(self._source, num_prompts)
        return self._take_stream(self._source, num_prompts)

    @property
    def epoch(self) -> float:
        """Passes completed: 1.25 = a quarter of the second. For a stream, of unknown length, whole passes only."""
        if isinstance(self._source, SizedSource):
            return self._epoch + self._position / len(self._source)
        return float(self._epoch)

    @property
    def weights(self) -> Mapping[str, float]:
        """The shares of several datasets, by name; empty for a single one."""
        return {}

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        raise ConfigError(
            f"weights={weights!r}: there is one dataset without a name; pass several by name, such as "
            'train_dataset={"easy": ..., "hard": ...}'
        )

    def assigned(self) -> Mapping[str, float] | None:
        """Return the weights if they were assigned since the last call; of a single dataset there are none."""
        return None

    def observe(self, rows: Sequence[PromptRow], rates: Sequence[float]) -> None:
        """Note measured success rates of these rows (0 to 1, NaN = not measured). This sampler needs none."""

    def metrics(self) -> dict[str, float]:
        """Return what is worth a curve, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the identity of the data that it belongs to, as plain JSON values."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "position": self._position,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken.

        Raises:
            DataError: the state is damaged or belongs to another dataset, seed or shuffle setting.
        """
        identity = self._identity()
        missing = [key for key in ("version", "epoch", "position", *identity) if key not in state]
        if missing or state["version"] != _STATE_VERSION:
            raise DataError(
                f"the saved data position cannot be read (missing: {missing}, version: {state.get('version')!r}, "
                f"this library reads {_STATE_VERSION}); resume from another checkpoint"
            )
        self._check_identity(state)
        epoch, position = state["epoch"], state["position"]
        limit = len(self._source) - 1 if isinstance(self._source, SizedSource) else math.inf
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position <= limit):
            raise DataError(
                f"the saved data position epoch={epoch!r}, position={position!r} is impossible; resume from another "
                "checkpoint"
            )
        self._epoch, self._position = epoch, position
        self._stream = None

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        """Raise DataError for a state of other data or settings."""
        identity = self._identity()
        changed = [
            f"{key}: saved {state.get(key)!r}, now {now!r}" for key, now in identity.items() if state.get(key) != now
        ]
        if changed:
            raise DataError(
                f"the saved data position belongs to other data or settings ({'; '.join(changed)}); resume with the "
                "same dataset, tokenizer, prompt limits, seed and shuffle, or start a new run"
            )

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self._source) if isinstance(self._source, SizedSource) else None,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._source.fingerprint,
        }

    def _take_sized(self, source: SizedSource, num_prompts: int) -> list[PromptRow]:
        epoch, position = self._epoch, self._position
        taken: list[PromptRow] = []
        while len(taken) < num_prompts:
            order = self._epoch_order(epoch, len(source))
            part = order[position : position + num_prompts - len(taken)]
            taken.extend(source[int(index)] for index in part)
            position += len(part)
            if position == len(source):
                epoch, position = epoch + 1, 0
        self._epoch, self._position = epoch, position
        return taken

    def _take_stream(self, source: StreamSource, num_prompts: int) -> list[PromptRow]:
        epoch, position = self._epoch, self._position
        taken: list[PromptRow] = []
        try:
            while len(taken) < num_prompts:
                if self._stream is None:
                    self._stream = source.iterate(position, epoch)
                row = next(self._stream, None)
                if row is None:
                    self._stream = None
                    epoch, position = epoch + 1, 0
                else:
                    taken.append(row)
                    position = row.index + 1
        except BaseException:
            self._stream = None  # so that the next call yields the rows taken in this one again
            raise
        self._epoch, self._position = epoch, position
        return taken

    def _epoch_order(self, epoch: int, num_prompts: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            if self._shuffle:
                # Raw bits are sorted instead of calling Generator.permutation: numpy promises that the bits of PCG64
                # never change, but not what a Generator does with them, and a resumed run may have another numpy.
                keys = np.random.PCG64([self._seed, epoch]).random_raw(num_prompts)
                order = np.argsort(keys, kind="stable")
            else:
                order = np.arange(num_prompts)
            self._order = (epoch, order)
        return self._order[1]
