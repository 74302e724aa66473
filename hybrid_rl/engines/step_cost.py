"""The seconds of engine steps, summed up so that those of other steps follow from them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class StepCost:
    """Sums over the steps of an engine. No step is kept by itself.

    num_decoding, sequences, squared_sequences, decoding_seconds, sequence_seconds: of the steps that only decoded,
    their number, and the sums of their sequences (one token of each), of the squares of these, of their seconds, and
    of sequences times seconds. num_mixed, mixed_sequences: of the steps that computed prompts too. prompt_tokens: the
    tokens of prompts, and of completions that went on, that were computed; tokens_again: those of them that had been
    computed before. seconds: of all steps. waited_seconds: for other ranks, between steps. most_sequences: of a step.
    num_ranks: that share the engine, each of which counts all of its steps.
    """

    num_decoding: int = 0
    sequences: int = 0
    squared_sequences: int = 0
    decoding_seconds: float = 0.0
    sequence_seconds: float = 0.0
    num_mixed: int = 0
    mixed_sequences: int = 0
    prompt_tokens: int = 0
    tokens_again: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    most_sequences: int = 0
    num_ranks: int = 1

    def add(self, num_sequences: int, num_prompt_tokens: int, seconds: float) -> None:
        """Count a step that generated a token of so many sequences, and computed so many tokens of prompts."""
        self.seconds += seconds
        if num_prompt_tokens:
            self.num_mixed += 1
            self.mixed_sequences += num_sequences
            self.prompt_tokens += num_prompt_tokens
        elif num_sequences:  # otherwise it ended requests, or computed a part of a prompt
            self.num_decoding += 1
            self.sequences += num_sequences
            self.squared_sequences += num_sequences * num_sequences
            self.decoding_seconds += seconds
            self.sequence_seconds += num_sequences * seconds
        self.most_sequences = max(self.most_sequences, num_sequences)

    def merge(self, other: StepCost) -> None:
        """Add the steps of an engine like this one."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            is_bound = field.name in ("most_sequences", "num_ranks")
            setattr(self, field.name, max(mine, theirs) if is_bound else mine + theirs)

    def rates(self) -> StepRates | None:
        """Fit the seconds of a step by least squares: a part that every step takes, and a part for each sequence,
        neither of them negative; what prompts add is what is left. None until steps with different numbers of
        sequences were seen, which alone tell the two parts apart."""
        count, total = self.num_decoding, self.sequences
        spread = count * self.squared_sequences - total * total
        if not spread:
            return None
        of_sequence = (count * self.sequence_seconds - total * self.decoding_seconds) / spread
        of_step = (self.decoding_seconds - of_sequence * total) / count
        if of_sequence < 0:
            of_step, of_sequence = self.decoding_seconds / count, 0.0
        elif of_step < 0:
            of_step, of_sequence = 0.0, self.sequence_seconds / self.squared_sequences
        rest = self.seconds - self.decoding_seconds - of_step * self.num_mixed - of_sequence * self.mixed_sequences
        return StepRates(of_step, of_sequence, max(0.0, rest) / self.prompt_tokens if self.prompt_tokens else 0.0)


@dataclass(frozen=True)
class StepRates:
    """Seconds of an engine step: of every one, of each sequence that it decodes, of each token of a prompt."""

    of_step: float
    of_sequence: float
    of_prompt_token: float
