"""Rollouts with the engine's answers written down, on one worker or dealt out over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.batch.ref import store
from hybrid_rl.controller import RankMesh
from hybrid_rl.controller.dispatch import dispatch_of
from hybrid_rl.controller.exchange import collect, cut
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import FinishedSample, RolloutRequest, SamplingParams, SlotUse
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.collector import StepPlan, replay
from hybrid_rl.rollout.completion_stream import CompletionStream
from hybrid_rl.rollout.counters import Collected
from hybrid_rl.workers.hybrid import HybridWorker

STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)
ROWS = [
    PromptRow(0, "first", (4, 5), {"answer": "a"}),
    PromptRow(1, [{"role": "user", "content": "2"}], (6,), {"answer": "b"}),
]
WORDS = "?abcdefgh"
# (ids, finish reason) of two samples for each of ROWS.
SCRIPT: list[tuple[list[int], str]] = [([1, 2], "stop"), ([3], "stop"), ([1, 1, 1], "length"), ([2, 3], "stop")]


def replayed(
    folder: Path, step: int, num_prompts: int, num_generations: int, names: list[str], *, version: int, **options: Any
) -> Collected:
    """Replay a saved rollout under a plan of so many samples. options: of the plan."""
    sampler: Any = None
    params = SamplingParams(max_tokens=8)
    plan = StepPlan(sampler, num_prompts, num_generations, params, rollouts_path=folder, **options)
    return replay(plan, step, names, version)


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[token] if token < len(WORDS) else "?" for token in ids)


class ScriptedClient:
    """Answers the requests of each of ROWS with its two entries of `script`, in `batches` of indices of requests."""

    experts_shape = None

    def __init__(
        self,
        script: Sequence[tuple[list[int], str]] = SCRIPT,
        batches: Sequence[Sequence[int]] | None = None,
        between: Callable[[int], Any] = lambda number: None,
    ) -> None:
        self.script, self.batches, self.between = script, batches, between
        self.calls: list[tuple[Sequence[RolloutRequest], int]] = []
        self.use = SlotUse()

    def stream(self, requests: Sequence[RolloutRequest], version: int) -> Iterator[list[FinishedSample]]:
        self.calls.append((requests, version))
        for number, indices in enumerate(self.batches or [range(len(requests))]):
            self.between(number)
            yield [self.answer(requests, index) for index in indices]

    def take_use(self) -> SlotUse:
        return self.use

    def answer(self, requests: Sequence[RolloutRequest], index: int) -> FinishedSample:
        request = requests[index]
        row = next(row for row in ROWS if row.prompt_ids == request.prompt_ids)
        before = sum(other.prompt_ids == request.prompt_ids for other in requests[:index])
        ids, reason = self.script[2 * row.index + before]
        return FinishedSample(request.id, list(ids), [-0.5 * token for token in ids], [9] * len(ids), reason)


class Workers:
    """A worker group whose ranks make rollouts in this process, called as the real one declares it.

    With `keep` the samples stay with the ranks and a reference comes back, as between processes.
    """

    def __init__(self, ranks: Sequence[CompletionStream], *, keep: bool = False) -> None:
        self.ranks, self.keep = ranks, keep
        self.kept: list[Batch] = []

    def rollout(self, *args: Any) -> Any:
        record, num_ranks = dispatch_of(HybridWorker.rollout), len(self.ranks)
        parts = cut("rollout", record, args, num_ranks, lambda *_: [])
        answers = {}
        for rank, (scored, arguments) in enumerate(zip(self.ranks, parts.arguments, strict=True)):
            batch, report = scored.run(*arguments)
            answers[rank] = (self._reference(batch) if self.keep else batch), report
        mesh = RankMesh(dp_shard=num_ranks)
        return collect("rollout", record, parts, mesh, answers, self.kept.__getitem__)

    def _reference(self, batch: Batch) -> BatchRef:
        def put(block: Batch) -> int:
            self.kept.append(block)
            return len(self.kept) - 1

        return store(batch, put)
