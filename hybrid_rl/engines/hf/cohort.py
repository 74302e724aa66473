"""Sequences that decode together because they are equally long."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.engines.inplace.runner import Sampled
from hybrid_rl.engines.inplace.scheduler import Sequence
from hybrid_rl.engines.sampling import (
    SamplingTensors,
    check_finite,
    choose,
    chosen_on_host,
    in_one,
    penalise,
    sample,
    uniform_numbers,
)
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.cache import ModelCache, next_states


class Prompts:
    """What is computed at once: rows of tokens of one length, and for each row the sequences that begin with it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.sequences: list[list[Sequence]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.length * len(self.sequences)

    @property
    def all_sequences(self) -> list[Sequence]:
        """In the order of their rows."""
        return [sequence for some in self.sequences for sequence in some]

    def num_new_tokens(self, sequence: Sequence) -> int:
        """Tokens to compute for one more sequence: none if another sample of its prompt is here."""
        return 0 if self._siblings(sequence) else self.length

    def add(self, sequence: Sequence) -> None:
        """Compute a sequence of this length too."""
        siblings = self._siblings(sequence)
        if siblings is None:
            self.sequences.append([sequence])
        else:
            siblings.append(sequence)

    def _siblings(self, sequence: Sequence) -> list[Sequence] | None:
        return next((some for some in reversed(self.sequences) if sequence.is_sibling(some[0])), None)


class Cohort:
    """B sequences of one length with one cache. No architecture needs padding or a mask for that, and none can tell
    them from single sequences; those that finish leave, and none can join."""

    def __init__(self, model: CausalLM, sequences: list[Sequence], cached: ModelCache) -> None:
        self.sequences = sequences
        self._model = model
        self._cached = cached
        self._params: SamplingTensors | None = None

    @classmethod
    def start(cls, model: CausalLM, prompts: Prompts) -> tuple[Cohort, Sampled]:
        """Compute prompts, each once, and choose the next token of every sequence. Raises ModelError if logits are
        not finite."""
        prompt_ids: Any = [some[0].context(0, prompts.length) for some in prompts.sequences]
        token_ids = torch.tensor(prompt_ids, device=model.device)
        hidden, cached = next_states(model, token_ids, None)
        rows = [row for row, some in enumerate(prompts.sequences) for _ in some]
        if len(rows) > len(prompts.sequences):
            cached.select(rows)
            hidden = hidden[rows]
        cohort = cls(model, prompts.all_sequences, cached)
        return cohort, cohort._choose(hidden)

    def decode(self) -> Sampled:
        """Generate one more token of every sequence. Raises ModelError if logits are not finite."""
        last = torch.tensor([[sequence.tokens[-1]] for sequence in self.sequences], device=self._model.device)
        hidden, self._cached = next_states(self._model, last, self._cached)
        return self._choose(hidden)

    def drop(self, leaving: Rows[Sequence]) -> None:
        """Go on without these sequences."""
        gone = set(map(id, leaving))
        rows = [row for row, sequence in enumerate(self.sequences) if id(sequence) not in gone]
        if len(rows) == len(self.sequences):
            return
        self.sequences = [self.sequences[row] for row in rows]
        self._params = None
        if rows:
            self._cached.select(rows)

    def _choose(self, hidden: Tensor) -> Sampled:
        device = hidden.device
        if self._params is None:
            self._params = SamplingTensors.of([sequence.request.params for sequence in self.sequences], device)
        params = self._params
        logits = self._model.logits(hidden)
        if params.penalises:
            # All are equally long: there is nothing to fill up.
            history: Any = [sequence.context(0, sequence.num_tokens) for sequence in self.sequences]
            logits = penalise(logits, params.repetition_penalty, torch.tensor(history, device=device))
        positions = torch.tensor([len(sequence.tokens) for sequence in self.sequences])
        if device.type == "cpu":
            chosen = in_one(*sample(logits, params, positions))
        else:
            chosen = choose(logits, params, uniform_numbers(params.seed.cpu(), positions).to(device))
        tokens, logprobs = chosen_on_host(chosen)
        check_finite(logprobs)
        return Sampled(list(self.sequences), tokens.tolist(), logprobs)
