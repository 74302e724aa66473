"""What the trainer said of tokens before it learned from them, kept for the records of samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from hybrid_rl.batch import Batch, Jagged, SampleKey
from hybrid_rl.batch.trajectories import sample_keys


@dataclass(frozen=True)
class FirstWords:
    """Logprobs and entropies of the samples of a training step's first mini-batch, under the weights that sampled them;
    of later mini-batches they would be those of weights that have changed since.

    samples: their columns that are one number per sample. logprobs, entropies: float32, aligned with their completions.
    """

    samples: Batch
    logprobs: Jagged
    entropies: Jagged

    @classmethod
    def of(cls, batch: Batch, values: Tensor) -> FirstWords:
        """Take the values of a mini-batch. values: [2, M] on the host, logprobs and entropies of its M tokens."""
        completions: Jagged = batch["completion_ids"]
        samples = Batch({name: column for name, column in batch.items() if isinstance(column, Tensor)})
        return cls(samples, completions.with_values(values[0]), completions.with_values(values[1]))

    @cached_property
    def _places(self) -> dict[SampleKey, int]:
        return {key: place for place, key in enumerate(sample_keys(self.samples))}

    def about(self, key: SampleKey) -> tuple[Tensor, Tensor] | None:
        """Return logprobs and entropies of a sample, [T] each; None if it was not in the first mini-batch."""
        place = self._places.get(key)
        return None if place is None else (self.logprobs[place], self.entropies[place])
