"""The samples of an evaluation, reduced to what its numbers need, and those numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_rl.errors import DataError
from hybrid_rl.metrics.intervals import Estimate, share
from hybrid_rl.metrics.paired import PairedTest, paired_test
from hybrid_rl.metrics.solved_shares import majority_at_k, pass_at_k, sizes

ACCURACY = "accuracy"
SMALLEST_BUDGET = 16  # tokens; the sweep halves the longest completion down to here


@dataclass(frozen=True, repr=False)
class EvalSamples:
    """Samples of a set of prompts, grouped by prompt; a prompt to which the reward does not apply is left out.

    prompts: a key of each prompt, equal for equal rows. right: for each prompt 1.0 or 0.0 per sample; None if it is not
    known what is right. lengths: tokens of each completion. finished: whether it ended before the limit. answers: what
    each votes for, None = it gives no answer; or None if the reward function does not extract answers. budget: the
    limit of tokens of a completion.
    """

    prompts: Sequence[str]
    right: Sequence[Sequence[float]] | None
    lengths: Sequence[Sequence[int]]
    finished: Sequence[Sequence[bool]]
    answers: Sequence[Sequence[str | None]] | None
    budget: int

    @property
    def num_samples(self) -> int:
        """Samples of a prompt; of the prompt with the fewest, if they differ."""
        return min((len(of_prompt) for of_prompt in self.lengths), default=0)

    def __repr__(self) -> str:
        prompts, samples, accuracy, length, finished = self._cells()
        return (
            f"EvalSamples({prompts} prompts, {samples} samples, accuracy {accuracy}, {length} tokens on average, "
            f"{finished} finished)"
        )

    def _cells(self) -> tuple[str, str, str, str, str]:
        """Return what a line says of it: prompts, samples, accuracy, mean length, share that ended by themselves."""
        lengths = [length for row in self.lengths for length in row]
        ends = [done for row in self.finished for done in row]
        accuracy = self.estimates().get(ACCURACY)
        mean, share_done = (f"{np.mean(lengths):.1f}", f"{100 * np.mean(ends):.0f} %") if lengths else ("-", "-")
        return str(len(self.prompts)), str(len(lengths)), "-" if accuracy is None else str(accuracy), mean, share_done

    def estimates(self) -> dict[str, Estimate]:
        """Return accuracy, pass@k and maj@k for k = 2, 4, ... up to the samples of a prompt, with intervals over
        prompts; {} if it is not known what is right."""
        if self.right is None or not self.right:
            return {}
        n = self.num_samples
        estimates = {ACCURACY: share([sum(row) / len(row) for row in self.right], n)}
        for k in sizes(n)[1:]:
            estimates[f"pass@{k}"] = self.passes(k)
        if self.answers is not None and n > 1:
            # A vote of two is one sample of the two, as ties are split: maj@k begins at 3 or 4.
            ks = [k for k in sizes(n) if k > 2]
            shares = [majority_at_k(*both, ks) for both in zip(self.answers, self.right, strict=True)] if ks else []
            for place, k in enumerate(ks):
                estimates[f"maj@{k}"] = share([row[place] for row in shares], max(1, n // k))
        return estimates

    def passes(self, k: int) -> Estimate:
        """Return pass@k. Raises DataError if a prompt has fewer than k samples, or if nobody knows what is right."""
        rows = self._right()
        return share([pass_at_k(len(row), round(sum(row)), k) for row in rows], max(1, self.num_samples // k))

    def votes(self, k: int) -> Estimate:
        """Return majority@k. Raises DataError as `passes` does, and if no answers were extracted."""
        rows = self._right()
        if self.answers is None:
            raise DataError(
                "there are no answers to vote on: the reward function extracts none. math_reward and exact_match do; "
                'one of your own does with log_extra("extracted_answer", [...])'
            )
        both = zip(self.answers, rows, strict=True)
        return share([majority_at_k(answers, right, [k])[0] for answers, right in both], self.num_samples // k)

    def within(self, budgets: Sequence[int] | None = None) -> dict[int, Estimate]:
        """Return the accuracy by budget of tokens, as if each completion had been cut off there.

        A sample counts as right within a budget if it is right and ended by itself within it; at the limit of the
        evaluation itself, as it was scored there. budgets: None = the limit, its half, and so on down to 16. Raises
        DataError for a budget above the limit: what would have followed is not known.
        """
        rows = self._right()
        if budgets is None:
            budgets = [self.budget >> halvings for halvings in range(self.budget.bit_length())]
            budgets = [num_tokens for num_tokens in budgets if num_tokens >= SMALLEST_BUDGET] or [self.budget]
        curve = {}
        for budget in sorted(set(budgets)):
            if not 1 <= budget <= self.budget:
                raise DataError(
                    f"a budget of {budget} tokens cannot be judged from completions of at most {self.budget}; choose "
                    f"one from 1 to {self.budget}, or evaluate with max_completion_length={budget}"
                )
            is_all = budget == self.budget
            numbers = []
            for right, lengths, finished in zip(rows, self.lengths, self.finished, strict=True):
                ends = zip(right, lengths, finished, strict=True)
                numbers.append(sum(score for score, length, done in ends if is_all or (done and length <= budget)))
                numbers[-1] /= len(right)
            curve[budget] = share(numbers, self.num_samples)
        return curve

    def against(self, baseline: EvalSamples) -> PairedTest:
        """Compare with other samples of the same prompts: the difference is that of these samples to the baseline.
        Raises DataError if the prompts differ."""
        mine, theirs = self._right(), baseline._right()
        if list(self.prompts) != list(baseline.prompts):
            common = len(set(self.prompts) & set(baseline.prompts))
            raise DataError(
                f"the two evaluations are of different prompts: {len(self.prompts)} and {len(baseline.prompts)}, of "
                f"which {common} are in both; a paired test needs the same rows in the same order"
            )
        means = ([sum(row) / len(row) for row in rows] for rows in (theirs, mine))
        return paired_test(*means, num_samples=(baseline.num_samples, self.num_samples))

    def to_json(self) -> dict[str, Any]:
        """Return what a file keeps of it, as mappings and lists."""
        return {
            "budget": self.budget,
            "prompts": list(self.prompts),
            "right": None if self.right is None else [list(map(int, row)) for row in self.right],
            "lengths": [list(row) for row in self.lengths],
            "finished": [list(map(int, row)) for row in self.finished],
            "answers": None if self.answers is None else [list(row) for row in self.answers],
        }

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> EvalSamples:
        """Return what `to_json` wrote. Raises DataError if it is not that."""
        try:
            right = kept["right"]
            return cls(
                [str(key) for key in kept["prompts"]],
                None if right is None else [[float(score) for score in row] for row in right],
                [[int(length) for length in row] for row in kept["lengths"]],
                [[bool(flag) for flag in row] for row in kept["finished"]],
                kept["answers"],
                int(kept["budget"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"these are not the samples of an evaluation: {type(error).__name__}: {error}") from error

    def _right(self) -> Sequence[Sequence[float]]:
        if self.right is None:
            raise DataError(
                "nobody knows which samples are right: the reward function gives numbers other than 0 and 1, or no "
                "number at all. Set success_reward to the smallest reward of a right answer, or success_functions to a "
                "function that gives 0 and 1"
            )
        if not self.right:
            raise DataError("the reward function applies to no prompt of this set, so there is nothing to count")
        return self.right


def grouped(
    group: Sequence[int],
    right: Sequence[float] | None,
    lengths: Sequence[int],
    finished: Sequence[bool],
    answers: Sequence[str | None] | None,
    keys: Sequence[str],
    budget: int,
) -> EvalSamples:
    """Group samples by prompt, in the order of the prompts.

    group: the number of each sample's prompt, which indexes keys. right: NaN where the reward does not apply; such a
    sample is left out, and a prompt without any other.
    """
    known = [right is None or not math.isnan(right[place]) for place in range(len(group))]
    order = np.argsort(np.asarray(group), kind="stable")
    rows: dict[int, list[int]] = {}
    for place in order.tolist():
        if known[place]:
            rows.setdefault(group[place], []).append(place)

    def of(values: Sequence[Any]) -> list[list[Any]]:
        return [[values[place] for place in places] for places in rows.values()]

    return EvalSamples(
        [keys[number] for number in rows],
        None if right is None else of(right),
        of(lengths),
        of(finished),
        None if answers is None else of(answers),
        budget,
    )


class Evaluations(dict[str, EvalSamples]):
    """The samples of an evaluation by set, "" for a single one. A dict that shows itself as a short table."""

    def __repr__(self) -> str:
        rows = [("set", "prompts", "samples", "accuracy", "mean length", "finished")]
        rows += [(name or "eval", *samples._cells()) for name, samples in self.items()]
        if len(rows) == 1:
            return "Evaluations(): nothing was evaluated yet"
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)
