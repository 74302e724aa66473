"""Checks that a run still learns: repeatedly skipped updates end it, and steps whose rewards teach nothing cause a
warning."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoint.finding import checkpoints_of
from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import BrokenModelError, DivergedError
from hybrid_rl.run.causes import NO_CALLS, Scoring

logger = logging.getLogger("hybrid_rl")

MAX_LOST_STEPS = 3
NUM_MUTE_STEPS = 3
NAME_OF_MEAN = re.compile(r"rewards/.+/mean")
SCORING = Scoring()
ROLES = {"policy": "", "critic": "critic/"}


@contextlib.contextmanager
def broken_model_explained(doing: str, run: Path) -> Iterator[None]:
    """Add the work in progress and a remedy to the error of an engine whose model gives logits that are not finite."""
    try:
        yield
    except BrokenModelError as error:
        saved = checkpoints_of(run)
        remedy = (
            f"resume from an earlier checkpoint with a lower learning_rate; the newest is {saved[max(saved)]}"
            if saved
            else f"start again with a lower learning_rate, and with save_steps: {run} has no checkpoint"
        )
        raise BrokenModelError(f"{doing}: {error}. What to do: {remedy}") from error


class LearningWatch:
    """Counts the training steps in a row in which every update of the policy, or of the critic, was skipped.

    updates_per_step: optimizer steps of a training step.
    is_broken: whether weights are no longer finite, so that saving them would hide an earlier, sound checkpoint.
    """

    def __init__(self, updates_per_step: int) -> None:
        self._updates_per_step = updates_per_step
        self._lost = dict.fromkeys(ROLES, 0)
        self._has_warned = dict.fromkeys(ROLES, False)
        self.is_broken = False

    def look(
        self, step: int, metrics: Mapping[str, float], why: Callable[[], Mapping[str, Any]]
    ) -> DivergedError | None:
        """Take the metrics of a training step. why: called for the last skipped update of each role (`SkippedUpdate`).

        Warns of the first of a series. Returns the error that ends the run, if it is time for one.
        """
        error, causes = None, None
        self.is_broken = False
        for role, prefix in ROLES.items():
            skipped = int(metrics.get(f"{prefix}skipped_updates", 0))
            if not skipped:
                if f"{prefix}skipped_updates" in metrics:  # the policy is not updated while its critic warms up
                    self._lost[role], self._has_warned[role] = 0, False
                continue
            causes = why() if causes is None else causes
            cause = causes[role]
            self.is_broken |= bool(cause.weights)
            self._lost[role] = self._lost[role] + 1 if skipped >= self._updates_per_step else 0
            if self._lost[role] >= MAX_LOST_STEPS:
                error = error or DivergedError(
                    f"the {role} has not changed in the last {self._lost[role]} training steps, up to step {step}: all "
                    f"of their updates ({self._lost[role] * self._updates_per_step}) were skipped, because gradients "
                    f"were not finite. In the last one {cause}. What to do: {cause.remedy}. "
                    + ("" if cause.weights else "The weights are those of the last good update; ")
                    + "checkpoints already written are unchanged"
                )
            elif not self._has_warned[role]:
                logger.warning(
                    "training step %d: %d of %d updates of the %s were skipped: %s. If it happens again: %s",
                    *(step, skipped, self._updates_per_step, role, cause, cause.remedy),
                )
                self._has_warned[role] = True
        return error


class SignalWatch:
    """Warns of steps in a row that cannot teach what the user wants, each kind once in a run.

    - No completion got an advantage: rewards give no gradient, and only a KL penalty, an entropy bonus or weight decay
      changes the weights.
    - A reward function gave the same number to all completions since the run began: it says nothing so far.
    - The gradient was 0, though there were advantages.

    At the end of a `fit()` too short for the first of these, it says so if none of its steps taught anything. And it
    warns of a single step in which every trajectory of agents ran into trajectory_timeout_seconds. scoring: by which
    the likely causes are found.
    """

    def __init__(self, config: TrainerConfig, scoring: Scoring = SCORING) -> None:
        self._masks_truncated = config.algorithm.mask_truncated_completions
        options = {item.name: getattr(config.advantage, item.name) for item in dataclasses.fields(config.advantage)}
        self._estimator = options["estimator"]
        self._thresholds = {n: v for n, v in options.items() if n.endswith("_threshold") and v is not None}
        self._seconds = config.agents.trajectory_timeout_seconds
        self._scoring = scoring
        self._num_mute = self._num_still = 0
        self._last: tuple[int, Mapping[str, float]] = 0, {}  # the last of the steps in a row that taught nothing
        self._same: dict[str, tuple[float, int]] = {}  # of each function: its only value, and for how many steps
        self._told: set[str] = set()

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a training step."""
        if metrics.get("agents/ended_time") == 1.0:
            self._tell(
                "time",
                f"step {step}: all trajectories were ended by trajectory_timeout_seconds={self._seconds}, before their "
                "agents were done; look for what they wait for (samples.jsonl), or raise the limit",
            )
        if metrics.get("tools/call_frequency") == 0.0 and self._scoring.has_tools:
            self._tell("calls", f"step {step}: {NO_CALLS}")
        if "skipped_updates" not in metrics:  # the policy is not updated while its critic warms up
            return
        is_mute = metrics.get("advantages/zero_share", 1.0) == 1.0  # absent if no token is in the loss
        self._num_mute = self._num_mute + 1 if is_mute else 0
        self._num_still = self._num_still + 1 if metrics.get("grad_norm") == 0.0 and not is_mute else 0
        self._last = step, dict(metrics)
        silent = self._silent_functions(metrics)
        if self._num_mute >= NUM_MUTE_STEPS:
            self._tell(
                "mute",
                f"the last {self._num_mute} training steps, up to step {step}, taught nothing: no completion had an "
                f"advantage, so the rewards gave no gradient. {self._reason(metrics)}",
            )
        elif silent:
            names = " and ".join(silent)
            self._tell(
                f"silent {names}",
                f"up to step {step}, {names} gave every completion the same reward "
                f"({', '.join(f'{self._same[name][0]:g}' for name in silent)}), from which nothing is learned. "
                f"{self._scoring.advice(metrics, frozenset(silent))}",
            )
        if self._num_still >= NUM_MUTE_STEPS:
            self._tell(
                "still",
                f"the gradient was 0 in the last {self._num_still} training steps, up to step {step}, though "
                "completions had advantages: check which parameters of the model require gradients, and whether the "
                "policy loss clips everything (clip_ratio)",
            )

    def end(self, begun: int) -> None:
        """Warn if all steps since `begun` taught nothing, and there were too few of them for the usual warning."""
        step, metrics = self._last
        if step > begun and NUM_MUTE_STEPS > self._num_mute >= step - begun:
            steps = f"training step {step}" if step == begun + 1 else f"training steps {begun + 1} to {step}"
            self._tell(
                "mute",
                f"{steps} taught nothing: no completion had an advantage, so the rewards gave no gradient. "
                f"{self._reason(metrics)}",
            )

    def _silent_functions(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the functions that have given a single number so far, for long enough. One that gave another once is
        not among them again: a reward for the format may well become the same for all."""
        for name in filter(NAME_OF_MEAN.fullmatch, metrics):
            function, mean = name.removeprefix("rewards/").removesuffix("/mean"), metrics[name]
            value, count = self._same.get(function, (mean, 0))
            is_same = value == mean and metrics.get(f"rewards/{function}/std") == 0.0
            self._same[function] = (value, count + 1) if is_same and count >= 0 else (value, -1)
        return [name for name, (_, count) in self._same.items() if count >= NUM_MUTE_STEPS]

    def _tell(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s", sentence)

    def _reason(self, metrics: Mapping[str, float]) -> str:
        """Name the likely cause in the last of these steps, and a remedy."""
        reward = metrics.get("reward", float("nan"))
        if self._masks_truncated and metrics.get("completions/clipped_ratio") == 1.0:
            return (
                "All completions were truncated, and mask_truncated_completions=true leaves those out: raise the limit "
                "(max_completion_length; of agents also max_tool_calling_iterations and trajectory_timeout_seconds), "
                "or set mask_truncated_completions=false"
            )
        if reward != reward:
            return "No completion had a reward: check the reward functions"
        if metrics.get("agents/turns_mean") == 0.0:
            return (
                "The policy was never asked: look for what agents, tools and environments wait for, and why "
                "trajectories ended (agents/ended_*)"
            )
        if metrics.get("reward_std") == 0.0:
            return (
                f"All rewards were {reward:g}. {self._scoring.advice(metrics)}. And use prompts that the policy solves "
                "some of the time"
            )
        if metrics.get("frac_reward_zero_std") == 1.0:
            return (
                f"The completions of each prompt had equal rewards (their mean was {reward:g}): use prompts that the "
                "policy solves some of the time, or raise num_generations or temperature"
            )
        if self._thresholds:
            named = ", ".join(f"{name}={value:g}" for name, value in self._thresholds.items())
            return (
                f"Rewards differed (their mean was {reward:g}), but advantage={self._estimator} counts only those "
                f"from {named} upwards: set it between the lowest and the highest reward"
            )
        return f"Rewards differed (their mean was {reward:g}), but advantage={self._estimator} gave 0 for all of them"
