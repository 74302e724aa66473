"""Trajectories of agents as columns of a batch, as inputs of reward functions, and as metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hybrid_rl.agents.trajectory import Sample, Trajectory
from hybrid_rl.agents.turn_record import TrajectoryRecord
from hybrid_rl.batch import SampleKey
from hybrid_rl.data.prompts import Messages, Prompt
from hybrid_rl.engines.base import EngineStats, FinishedSample
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.rewards import RewardFailure, RewardInput
from hybrid_rl.rewards.calling import CallOutcome, as_json
from hybrid_rl.rewards.completions import TAIL_TOKENS, opening_of
from hybrid_rl.rewards.results import THE_AGENT, Part
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.sample_columns import columns_of

AGENT = "agent"  # the name of rewards that agents give, and the reason of failures
# Counts of what a trajectory did not do anew, or lost.
RECORDED = ("recorded_turns", "recorded_calls", "repeated_calls", "lost_environments", "dropped")
# End reasons whose counts are metrics.
ENDS = ("stop", "length", "turns", "time", "error", "abort")

Decode = Callable[[Sequence[int]], str]


@dataclass
class Attempt:
    """A trajectory at its place in a rollout. identity, group: its id in the run, and that of its group. failure: why
    it failed, a key of `rewards.results.MEANINGS`; "" if it did not. record: of its turns and calls."""

    task: RolloutTask
    generation: int
    identity: int
    trajectory: Trajectory
    failure: str = ""
    group: int = 0
    record: TrajectoryRecord = field(default_factory=TrajectoryRecord)

    @classmethod
    def begun(cls, task: RolloutTask, generation: int, call: RolloutCall, record: TrajectoryRecord) -> Attempt:
        """Return the attempt at a prompt of a call that has this number there, with a trajectory that is empty. record:
        of what an earlier life of it has finished."""
        identity = call.trajectory(task, generation)
        return cls(task, generation, identity, _empty(task), group=call.group(task), record=record)

    def begin_again(self, on_left: list[Callable[[], None]]) -> None:
        """Put an empty trajectory into the place of one whose environment is lost. on_left: hooks of the lost one
        that it goes on with."""
        lost, self.trajectory, self.failure = self.trajectory, _empty(self.task), ""
        self.record.begin_life()
        self.trajectory.on_left = on_left
        self.trajectory.counts["lost_environments"] = lost.counts["lost_environments"] + 1

    @property
    def samples(self) -> list[Sample]:
        """What is trained on: of a trajectory without any token a sample that teaches nothing. Those of the main
        conversation come after those of sub-agents, and last the one that was asked last: it stands for the
        trajectory where a single one does, as for judges."""
        made = [sample for sample in self.trajectory.samples if sample.token_ids]
        main = self._main_line(made)
        ordered = sorted(made, key=lambda sample: sample.asked if sample.line == main else 0)
        return ordered or [_nothing(self.task)]

    def _main_line(self, samples: Sequence[Sample]) -> int:
        """Return the conversation that is about the row's prompt: of several the first; without any, the first."""
        asked, ids = self.prompt, tuple(self.task.row.prompt_ids)
        for sample in samples:
            if not sample.messages:
                is_main = sample.prompt_ids[: len(ids)] == ids
            else:
                is_main = isinstance(asked, list) and all(message in sample.messages for message in asked)
            if is_main:
                return sample.line
        return samples[0].line if samples else 0

    @property
    def prompt(self) -> Prompt:
        """The prompt, with what the environment added."""
        return self.task.row.prompt if self.trajectory.prompt is None else self.trajectory.prompt

    @property
    def keys(self) -> list[SampleKey]:
        """The key of each sample."""
        return [SampleKey(self.identity, number) for number in range(len(self.samples))]

    def reward_failure(self) -> RewardFailure | None:
        """Return the failure that masks its reward, if it has failed."""
        if not self.failure:
            return None
        return RewardFailure(THE_AGENT, self.keys[-1], self.failure, self.trajectory.error)


def _empty(task: RolloutTask) -> Trajectory:
    prompt = {"prompt": task.row.prompt} if task.row.has_prompt else {}
    return Trajectory({**task.row.columns, **prompt})


def _nothing(task: RolloutTask) -> Sample:
    """Return a sample of which no token is the policy's: a batch has one for every trajectory, and none is empty."""
    prompt = tuple(task.row.prompt_ids) or (0,)
    sample = Sample(prompt)
    sample.add_environment(prompt[-1:])
    return sample


def conversation_of(attempt: Attempt, decode: Decode, number: int = -1) -> tuple[Prompt, str | Messages]:
    """Return the first prompt of a sample's conversation and what followed it up to the sample's end: messages if the
    policy was asked with messages. The last sample tells what reward functions get."""
    trajectory, samples = attempt.trajectory, attempt.samples
    sample, is_last = samples[number], number in (-1, len(samples) - 1)
    if is_last and trajectory.messages:
        return attempt.prompt, trajectory.messages
    known = [conversation for conversation in trajectory.conversations if conversation.sample is sample]
    opening = next(candidate for candidate in (*trajectory.samples, sample) if candidate.line == sample.line)
    if not known:
        is_main = sample.line == samples[-1].line
        return attempt.prompt if is_main else decode(opening.prompt_ids), decode(sample.token_ids)
    first = [dict(message) for message in opening.messages]
    last = [dict(message) for message in known[-1].messages]
    return first, last[len(first) :] if last[: len(first)] == first else last[-1:]


def reward_input(attempt: Attempt, decode: Decode) -> RewardInput:
    """Return what reward functions see of a trajectory: its main conversation, and the tokens of its last sample."""
    prompt, completion = conversation_of(attempt, decode)
    last = attempt.samples[-1]
    # Messages hold their thinking, what the prompt has opened of it included.
    opening = opening_of("", decode(last.prompt_ids[-TAIL_TOKENS:])) if isinstance(completion, str) else ""
    return RewardInput(
        attempt.keys[-1],
        prompt,
        completion,
        list(last.token_ids),
        attempt.task.row.columns,
        group=attempt.group,
        environment=attempt.trajectory.environment,
        given=attempt.trajectory.given,
        policy_length=sum(sum(sample.mask) for sample in attempt.samples),
        opening=opening,
    )


def sample_inputs(attempts: Sequence[Attempt], inputs: Mapping[int, RewardInput]) -> list[RewardInput]:
    """Return one input for each sample, to join rewards by. inputs: by trajectory, of its last sample."""
    inputs_of_samples = []
    for attempt in attempts:
        last = inputs[attempt.identity]
        for key, sample in zip(attempt.keys[:-1], attempt.samples, strict=False):
            inputs_of_samples.append(
                RewardInput(key, last.prompt, "", list(sample.token_ids), last.columns, last.group)
            )
        inputs_of_samples.append(last)
    return inputs_of_samples


def own_rewards(attempts: Sequence[Attempt], inputs: Sequence[RewardInput]) -> list[Part]:
    """Return what trajectories got while they were made, as calls of a reward function would give it: rewards of turns
    lie at the last token of their turn, that of the trajectory counts with its last sample. inputs: of all samples."""
    values: list[float | None] = []
    errors: dict[int, tuple[str, str]] = {}
    tokens: dict[int, list[float]] = {}
    for attempt in attempts:
        for number, sample in enumerate(attempt.samples):
            turn_rewards = [(span, reward) for span, reward in zip(sample.turns, sample.turn_rewards, strict=True)]
            value = attempt.trajectory.reward if number == len(attempt.samples) - 1 else None
            if any(reward is not None for _, reward in turn_rewards):
                dense = [0.0] * len(sample.token_ids)
                for (_, end), reward in turn_rewards:
                    dense[max(end - 1, 0)] += reward or 0.0
                tokens[len(values)] = dense
                value = (value or 0.0) + sum(dense)
            if value is not None and not math.isfinite(value):
                errors[len(values)] = "nan", f"rewards that were given by add_reward come to {value}; give finite ones"
            values.append(value)
    return [(inputs, CallOutcome(values, errors, None, {}, [], tokens))]


def has_own_reward(trajectory: Trajectory) -> bool:
    """Whether a trajectory got any reward while it was made."""
    return trajectory.reward is not None or has_turn_reward(trajectory)


def has_turn_reward(trajectory: Trajectory) -> bool:
    """Whether any turn of a trajectory got a reward of its own."""
    return any(reward is not None for sample in trajectory.samples for reward in sample.turn_rewards)


def trajectory_columns(
    attempts: Sequence[Attempt], call: RolloutCall, decode: Decode, experts_shape: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Make the columns of trajectories, sample by sample, before anything is scored. experts_shape: as `columns_of`."""
    turns = [(attempt, number, sample) for attempt in attempts for number, sample in enumerate(attempt.samples)]
    conversations = [conversation_of(attempt, decode, number) for attempt, number, _ in turns]
    columns = columns_of(
        [
            replace(attempt.task.row, prompt=prompt, prompt_ids=sample.prompt_ids)
            for (attempt, _, sample), (prompt, _) in zip(turns, conversations, strict=True)
        ],
        [attempt.group for attempt, _, _ in turns],
        [
            FinishedSample(a.identity, s.token_ids, s.logprobs, s.versions, "stop", s.routed_experts)
            for a, _, s in turns
        ],
        call.params.temperature,
        experts_shape,
    )
    masks = torch.tensor([is_policys for _, _, sample in turns for is_policys in sample.mask], dtype=torch.bool)
    versions = [[version for version in sample.versions if version >= 0] for _, _, sample in turns]

    def numbers(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64)

    return columns | {
        "completion_mask": columns["completion_ids"].with_values(masks),
        # A sample without any token of the policy is as old as its rollout.
        "oldest_version": numbers(min(of_sample, default=call.version) for of_sample in versions),
        "policy_length": numbers(sum(sample.mask) for _, _, sample in turns),
        "turn": numbers(number for _, number, _ in turns),
        "finish_reason": [attempt.trajectory.end_reason or "stop" for attempt, _, _ in turns],
        "completion": [decode(sample.token_ids) for _, _, sample in turns],
        "conversation": [
            _conversation(attempt, number, completion, decode)
            for (attempt, number, _), (_, completion) in zip(turns, conversations, strict=True)
        ],
    }


def _conversation(attempt: Attempt, number: int, completion: str | Messages, decode: Decode) -> dict[str, Any]:
    """Describe a sample for people. messages: of its own conversation, after the first prompt of that; tokens: who
    made them, with the reward of each turn; error: with the last sample of a trajectory only."""
    sample, is_last = attempt.samples[number], number == len(attempt.samples) - 1
    tokens: list[dict[str, Any]] = []
    place = 0
    for (start, end), reward in zip(sample.turns, sample.turn_rewards, strict=True):
        tokens += [_span("environment", sample.token_ids[place:start], decode)] if start > place else []
        tokens.append(_span("policy", sample.token_ids[start:end], decode) | {"reward": reward})
        place = end
    if place < len(sample.token_ids):
        tokens.append(_span("environment", sample.token_ids[place:], decode))
    messages = as_written(completion) if isinstance(completion, list) else None
    return {"tokens": tokens, "messages": messages, "error": attempt.trajectory.error or None if is_last else None}


def as_written(value: Any) -> Any:
    """Return a value of the user's as JSON gives it back, for records; what JSON cannot hold, as its text."""
    try:
        return as_json(value, "conversation", 0)
    except ValueError:
        return repr(value)


def _span(origin: str, token_ids: Sequence[int], decode: Decode) -> dict[str, Any]:
    return {"origin": origin, "num_tokens": len(token_ids), "text": decode(token_ids)}


def engine_metrics(before: EngineStats, after: EngineStats, most_open: int) -> MetricSums:
    """Return the metrics of what a rank's engine did for trajectories. before, after: its counts; most_open:
    trajectories that were under way at once."""
    metrics = MetricSums()
    metrics.mean("agents/prefix_hit_share", after.prefix_hit_share(before), 1)
    metrics.high("agents/open_max", most_open)
    return metrics


def agent_metrics(attempts: Sequence[Attempt]) -> MetricSums:
    """Return the metrics of the trajectories of a rank."""
    metrics, number = MetricSums(), len(attempts)
    counts = [attempt.trajectory.counts for attempt in attempts]

    def total(name: str) -> int:
        return sum(count[name] for count in counts)

    for name in ("turns", "tool_calls"):
        metrics.mean(f"agents/{name}_mean", total(name), number)
    metrics.mean("tools/call_frequency", total("tool_calls"), number)
    metrics.mean("tools/failure_frequency", total("tool_failures"), max(total("tool_calls"), 1))
    metrics.total("agents/tool_timeouts", total("tool_timeouts"))
    for name in ("forks", "sub_agents", *(name for name in RECORDED if total(name))):
        metrics.total(f"agents/{name}", total(name))
    for reason in ENDS:
        ended = sum(attempt.trajectory.end_reason == reason for attempt in attempts)
        metrics.mean(f"agents/ended_{reason}", ended, number)
    lengths = [sum(len(sample.token_ids) for sample in attempt.samples) for attempt in attempts]
    metrics.mean("agents/conversation_length_mean", sum(lengths), number)
    for attempt in attempts:
        for name, value in attempt.trajectory.metrics.items():
            metrics.mean(f"agent/{name}", value, 1)
    return metrics
