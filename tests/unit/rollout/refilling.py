"""Rows that say what their samples will be worth, and ranks that make such samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.engines.base import FinishedSample, RolloutRequest, SamplingParams, SlotUse
from hybrid_rl.rewards import RewardRunner
from hybrid_rl.rollout.collector import Collector, StepPlan
from hybrid_rl.rollout.completion_stream import CompletionStream
from tests.support.inside.rollouts import set_plan
from tests.unit.rollout.scripted import STATE, Workers, decode

GREEDY_TOKEN = 8
PARAMS = SamplingParams(3)


class NumberedClient:
    """The completion of a prompt's k-th sample is the token k (from 1), that of a greedy one GREEDY_TOKEN."""

    experts_shape = None

    def __init__(self, between: Callable[[], Any] = lambda: None) -> None:
        self.calls: list[Sequence[RolloutRequest]] = []
        self.between = between

    def take_use(self) -> SlotUse:
        return SlotUse()

    def stream(self, requests: Sequence[RolloutRequest], version: int) -> Iterator[list[FinishedSample]]:
        self.calls.append(requests)
        self.between()
        seen: dict[Any, int] = {}
        for request in requests:
            seen[request.group] = seen.setdefault(request.group, 0) + 1
            token = seen[request.group] if request.params.temperature else GREEDY_TOKEN
            yield [FinishedSample(request.id, [token], [-0.5], [version], "stop")]


def worth(completion_ids, scores, greedy, **_):
    """What the row says of the sample."""
    return [
        right if ids == [GREEDY_TOKEN] else values[ids[0] - 1]
        for ids, values, right in zip(completion_ids, scores, greedy, strict=True)
    ]


def row_of(index: int, *scores: Any, greedy: Any = 0.0) -> PromptRow:
    """A row whose k-th sample is worth the k-th score."""
    return PromptRow(index, f"prompt {index}", (4, 5 + index), {"scores": list(scores), "greedy": greedy})


def rows_of(*groups: Sequence[Any]) -> list[PromptRow]:
    return [row_of(index, *scores) for index, scores in enumerate(groups)]


class ListSampler(PromptSampler):
    """Hands out rows one after another, and then none."""

    def __init__(self, rows: Sequence[PromptRow]) -> None:
        self.rows, self.asked, self.position = list(rows), [], 0

    def take(self, num_prompts: int) -> list[PromptRow]:
        self.asked.append(num_prompts)
        found = self.rows[self.position : self.position + num_prompts]
        self.position += len(found)
        return found

    def observe(self, rows: Sequence[PromptRow], rates: Sequence[float]) -> None:
        """Take in success rates, one for each row; nothing follows from them."""
        assert len(rows) == len(rates)

    def metrics(self) -> dict[str, float]:
        return {}


class Rig:
    """A collector over ranks of numbered samples."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        functions: Any = worth,
        *,
        num_ranks: int = 1,
        keep: bool = False,
        share: float = 1.0,
        weights: Sequence[float] | None = None,
        between: Callable[[], Any] = lambda: None,
        workers: type[Workers] = Workers,
    ) -> None:
        runners = [RewardRunner(functions, weights=weights) for _ in range(num_ranks)]
        self.rewards = runners[0]
        self.clients = [NumberedClient(between) for _ in range(num_ranks)]
        ranks = [CompletionStream(c, r, decode, seed=11) for c, r in zip(self.clients, runners, strict=True)]
        self.sampler = ListSampler(rows)
        self.workers = workers(ranks, keep=keep)
        self.collector = Collector(
            self.workers,
            runners[0].names,
            max_failure_share=share,
            reward_weights=runners[0].weights,
            shaping=runners[0].entries.shaping,
        )

    def collect(self, num_prompts: int, num_generations: int = 2, max_refills: int = 3, state=STATE, **options: Any):
        # One collector for all plans, so that ids go on from one collection to the next.
        plan = StepPlan(self.sampler, num_prompts, num_generations, PARAMS, max_refills=max_refills, **options)
        set_plan(self.collector, plan)
        return self.collector.take(9, state)

    def rolled(self) -> list[list[int]]:
        """The row indices of each rollout, in the order of its prompts."""
        rollouts = []
        for calls in zip(*(client.calls for client in self.clients), strict=True):
            groups = {request.group: request.prompt_ids[1] - 5 for requests in calls for request in requests}
            rollouts.append([index for _, index in sorted(groups.items())])
        return rollouts
