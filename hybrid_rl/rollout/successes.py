"""What counts as a success, and the samples of an evaluation as its statistics take them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.batch import TRUNCATIONS, AnyBatch, SampleKey, Trajectories
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.metrics.eval_samples import EvalSamples, grouped
from hybrid_rl.rollout.lengths import policy_lengths

ANSWER = "extracted_answer"  # the column of log_extra in which a reward function leaves what it read in a completion


@dataclass
class Grades:
    """Whether rewards other than 0 and 1 were seen in a run. From then on it has no accuracy without success_reward:
    one that came back whenever all values happen to be 0 or 1 would mean something else each time."""

    are_seen: bool = False


@dataclass(frozen=True)
class SuccessRule:
    """Which samples are successful. columns: of the reward functions that say so; of each sample the first of them that
    gives it a value. The others only shape the reward. threshold: the smallest value that is a success; None: 1, if all
    values are 0 or 1, and those before were, else it is not known. grades: what a run remembers of those before."""

    columns: tuple[int, ...] = (0,)
    threshold: float | None = None
    grades: Grades | None = None

    def values(self, batch: AnyBatch) -> Tensor:
        """Return what the functions gave to each of M trajectories, float64 [M]; NaN if they do not apply."""
        rows = batch["function_rewards"]
        first = Trajectories.of(batch).first
        values = torch.full((len(first),), torch.nan, dtype=torch.float64)
        if not rows or not rows[0]:
            return values
        function_rewards = torch.tensor(rows, dtype=torch.float64).view(len(rows), -1)[first]
        for column in self.columns:
            values = torch.where(values.isnan(), function_rewards[:, column], values)
        return values

    def of(self, batch: AnyBatch) -> Tensor | None:
        """Return for each of M trajectories 1 or 0, float64 [M]; None if it is not known of any.

        A trajectory without a reward is not successful; one to which the functions do not apply is NaN.
        """
        values = self.values(batch)
        known = values[~values.isnan()]
        if self.threshold is None:
            is_graded = not bool(((known == 0) | (known == 1)).all())
            if self.grades is not None:
                is_graded = self.grades.are_seen = self.grades.are_seen or is_graded
            if is_graded or not known.numel():
                return None
        right = (values >= (1.0 if self.threshold is None else self.threshold)).double()
        has_reward = ~batch["rewards"][Trajectories.of(batch).first].isnan()
        return torch.where(values.isnan() & has_reward, torch.nan, right)

    def metrics(self, batch: AnyBatch) -> dict[str, float]:
        """Return the rates of success: pass@1, the share of successful trajectories; and, for groups of n, pass@n, the
        share of groups with at least one. Empty if they are not known."""
        right = self.of(batch)
        if right is None or right.isnan().all():
            return {}
        counts = ~right.isnan()
        success, group = right[counts], batch["group"][Trajectories.of(batch).first][counts]
        metrics = {"pass@1": float(success.mean())}
        _, place, sizes = group.unique(return_inverse=True, return_counts=True)
        size = int(sizes.max())
        if size > 1:
            successes = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, place, success)
            metrics[f"pass@{size}"] = float((successes > 0).double().mean())
        return metrics


FIRST_FUNCTION = SuccessRule()


def eval_samples(
    batch: AnyBatch,
    rows: Sequence[PromptRow],
    rule: SuccessRule | None,
    answers: Iterable[tuple[SampleKey, str | None]],
    budget: int,
) -> EvalSamples:
    """Reduce the batch of an evaluation to what its statistics need.

    rows: its prompts. rule: None = it is not known what is right. answers: what each sample that has one answers; the
    last turn of a trajectory speaks for it; none at all = they are not known. budget: the limit of a completion.
    """
    trajectories = Trajectories.of(batch)
    group = batch["group"][trajectories.first]
    right = None if rule is None else rule.of(batch)
    by_trajectory = {key.trajectory: answer for key, answer in sorted(answers, key=lambda pair: pair[0])}
    reasons = [batch["finish_reason"][sample] for sample in trajectories.last.tolist()]
    return grouped(
        (group - group.min()).tolist(),
        None if right is None else right.tolist(),
        policy_lengths(batch).tolist(),
        [reason not in TRUNCATIONS for reason in reasons],
        [by_trajectory.get(trajectory) for trajectory in batch["trajectory"][trajectories.first].tolist()]
        if by_trajectory
        else None,
        [row_key(row) for row in rows],
        budget,
    )


def row_key(row: PromptRow) -> str:
    """Return a name of a row that is the same in every evaluation of it, whatever the tokenizer: a hash of the prompt
    and of the columns that are texts or numbers."""
    plain = {name: value for name, value in row.columns.items() if isinstance(value, str | int | float)}
    text = json.dumps([_plain(row.prompt), plain], sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _plain(prompt: object) -> object:
    """Return a prompt without what is not text: images have no text that stays the same."""
    if isinstance(prompt, Mapping):
        return {str(name): _plain(value) for name, value in prompt.items()}
    if isinstance(prompt, str | int | float) or prompt is None:
        return prompt
    return [_plain(part) for part in prompt] if isinstance(prompt, Sequence) else type(prompt).__name__
