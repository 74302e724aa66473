"""Evaluation of the policy on sets of prompts: its samples, its metrics, and what counts as right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.batch import AnyBatch
from hybrid_rl.config import TrainerConfig
from hybrid_rl.data.gym_rows import is_gym
from hybrid_rl.data.mixture import MOST_LETTERS
from hybrid_rl.data.prompts import PROMPT_COLUMN, PromptEncoder, PromptRow
from hybrid_rl.data.source import SizedSource, load_source
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.metrics.eval_samples import ACCURACY, EvalSamples
from hybrid_rl.process import progress
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.rollout.successes import Grades, SuccessRule, eval_samples
from hybrid_rl.workers.groups import PolicyGroup
from hybrid_rl.workers.setup import RewardSetup

SINGLE = ""  # the name of a set that has none
# Beginnings of metrics after eval/, which a set of that name would be mistaken for.
TAKEN = frozenset({"agent", "agents", "completions", "judge", "log_metric", "rewards", "tools"})
KEPT_SAMPLES = 1000  # of each set and evaluation of a run, in eval-samples.jsonl

Sets = Mapping[str, SizedSource]


def load_sets(given: Any, encoder: PromptEncoder) -> dict[str, SizedSource]:
    """Return evaluation sets by name from a dataset, which has the name "", or from a mapping of names to datasets.

    Raises DataError for a dataset that is empty or cannot be used, and ConfigError for a stream and for a bad name.
    """
    if not are_sets(given):
        return {SINGLE: _sized(given, SINGLE, encoder)}
    if not given:
        raise DataError("eval_dataset is an empty mapping; give at least one set, or leave it out")
    for name in given:
        _check_name(name)
    return {name: _sized(dataset, name, encoder) for name, dataset in given.items()}


def are_sets(given: Any) -> bool:
    """Whether what was given as evaluation data are datasets by name, and not a single one."""
    return isinstance(given, Mapping) and PROMPT_COLUMN not in given and not is_gym(given)


def _sized(dataset: Any, name: str, encoder: PromptEncoder) -> SizedSource:
    which = f"eval_dataset[{name!r}]" if name else "eval_dataset"
    try:
        found = load_source(dataset, encoder)
    except DataError as error:
        raise DataError(f"{which}: {error}") from error if name else error
    if not isinstance(found, SizedSource):
        raise ConfigError(f"{which} is a stream; give a dataset of fixed size, so that evaluations can be compared")
    return found


def _check_name(name: Any) -> None:
    """Raise ConfigError for a name that metrics cannot have in the place of a set."""
    is_name = isinstance(name, str) and name.replace("-", "_").replace(".", "_").isidentifier() and name[0].isalpha()
    if not is_name or len(name) > MOST_LETTERS:
        raise ConfigError(
            f"eval_dataset has a set named {name!r:.80}, but metrics are named eval/<set>/accuracy: use letters, "
            f"digits and . _ - only, begin with a letter, and take at most {MOST_LETTERS}"
        )
    if name in TAKEN:
        raise ConfigError(f"eval_dataset has a set named {name!r}, which other metrics begin with; choose another name")


def rows_of(sets: Sets) -> dict[str, list[PromptRow]]:
    """Return the prompts of every set."""
    return {name: [source[index] for index in range(len(source))] for name, source in sets.items()}


def success_rule(config: TrainerConfig, rewards: RewardSetup, grades: Grades | None = None) -> SuccessRule | None:
    """Return what counts as a success. grades: of the run. None if the user has no reward functions. Raises ConfigError
    for a name that none of them has."""
    names, asked = rewards.entries.names, config.eval.success_functions
    own = names[: len(names) - rewards.num_added]
    if unknown := [name for name in asked if name not in own]:
        raise ConfigError(
            f"success_functions names {', '.join(map(repr, unknown))}, but the reward functions are "
            f"{', '.join(map(repr, own)) or 'none'}; give their names"
        )
    if not own:
        return None
    return SuccessRule(tuple(own.index(name) for name in asked) or (0,), config.eval.success_reward, grades)


class Evaluator:
    """Evaluates the policy on sets of prompts.

    longest: tokens that a prompt may have; None = not limited here.
    """

    def __init__(
        self,
        policy: PolicyGroup,
        collector: Collector,
        rule: SuccessRule | None,
        params: SamplingParams,
        num_generations: int,
        longest: int | None = None,
    ) -> None:
        self._policy, self._collector, self._rule = policy, collector, rule
        self._params, self._num_generations, self._longest = params, num_generations, longest

    def evaluate(
        self,
        sets: Mapping[str, Sequence[PromptRow]],
        version: int,
        state: TrainerState,
        folder: Path | None,
        kept: int | None = KEPT_SAMPLES,
    ) -> tuple[dict[str, float], dict[str, EvalSamples]]:
        """Return metrics of all sets, named eval/..., or eval/<set>/... for sets with a name, and their samples by set.

        folder: where their samples are appended to eval-samples.jsonl, of each set whole groups of about `kept`
        samples (None = all); None = nowhere. Raises DataError for a prompt that is too long for the engine.
        """
        for name, rows in sets.items():
            self._check_lengths(name, rows)
        metrics: dict[str, float] = {}
        latest: dict[str, EvalSamples] = {}
        for name, rows in sets.items():
            batch, found = self._roll_out(name, rows, version, state)
            answers = [pair for part in self._policy.answers(batch) for pair in part]
            samples = eval_samples(batch, rows, self._rule, answers, self._params.max_tokens)
            found |= _share_metrics(samples)
            if folder is not None:
                self._keep(batch, name, state.global_step, folder, kept)
            prefix = f"eval/{name}/" if name else "eval/"
            metrics |= {prefix + metric: value for metric, value in found.items()}
            latest[name] = samples
        return metrics, latest

    def _roll_out(
        self, name: str, rows: Sequence[PromptRow], version: int, state: TrainerState
    ) -> tuple[AnyBatch, dict[str, float]]:
        """Return the samples of a set, and the metrics of its rollout without spreads, which mean little here."""
        purpose = f"evaluation/{state.global_step}" + (f"/{name}" if name else "")
        call = (rows, self._num_generations, self._params, version, state)
        with progress.doing(f"evaluation of {name}" if name else "evaluation"):
            made = self._collector.rollout(*call, purpose=purpose)
        metrics = {
            name: value
            for name, value in made.metrics.items()
            if "std" not in name.split("/")[-1] and not name.startswith("pass@")
        }
        return made.batch, metrics

    def _keep(self, batch: AnyBatch, name: str, step: int, folder: Path, kept: int | None) -> None:
        """Have the ranks write down the samples of a set, or those of its first prompts."""
        group = batch["group"]
        first = (int(group.min()), int(batch["trajectory"].min()))
        if kept is not None and batch.num_samples > kept:
            prompts = max(1, kept // self._num_generations)
            batch = batch.select((group < group.min() + prompts).nonzero()[:, 0])
        self._policy.log_samples(batch, step, folder, first, name)

    def _check_lengths(self, name: str, rows: Sequence[PromptRow]) -> None:
        for place, row in enumerate(rows):
            if self._longest is not None and len(row.prompt_ids) > self._longest:
                raise DataError(
                    f"row {place} of {f'set {name!r}' if name else 'the data'} has {len(row.prompt_ids)} tokens, but "
                    f"the engine was made for prompts of at most {self._longest}; set max_prompt_length when the "
                    "Trainer is made, or shorten it"
                )


def _share_metrics(samples: EvalSamples) -> dict[str, float]:
    """Return accuracy, pass@k and maj@k, and the interval of the accuracy."""
    estimates = samples.estimates()
    metrics = {name: found.value for name, found in estimates.items()}
    if ACCURACY in estimates:
        metrics |= {f"{ACCURACY}_low": estimates[ACCURACY].low, f"{ACCURACY}_high": estimates[ACCURACY].high}
    return metrics
