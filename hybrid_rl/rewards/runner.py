"""RewardRunner: scores finished samples in the background while others are still generated."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args

from hybrid_rl.errors import ConfigError, DataError, RewardError
from hybrid_rl.rewards.entries import RewardList
from hybrid_rl.rewards.functions import RewardInput
from hybrid_rl.rewards.isolation import Task
from hybrid_rl.rewards.pool import ProcessPool
from hybrid_rl.rewards.results import Part, RewardResult, assemble
from hybrid_rl.rewards.threads import AsyncLane, SyncLane

ScoreBy = Literal["sample", "group"]
Join = Callable[[Sequence[RewardInput], list[tuple[int, Part]]], RewardResult]


class PendingScore:
    """One submission: collects the parts of its calls, in any order and from any thread, and answers its future."""

    def __init__(self, join: Join, inputs: Sequence[RewardInput], num_calls: int):
        self.join, self.inputs = join, inputs
        self.future: Future[RewardResult] = Future()
        self.future.set_running_or_notify_cancel()
        self.calls: list[list[tuple[int, Part]] | None] = [None] * num_calls
        self.lock = threading.Lock()
        self.answered = False
        if num_calls == 0:
            self._answer(join(inputs, []))

    def add(self, call: int, function_index: int, parts: list[Part]) -> None:
        """Take the outcome of call number `call`. A second outcome of the same call (it came too late) is ignored."""
        with self.lock:
            if self.calls[call] is not None or self.answered:
                return
            self.calls[call] = [(function_index, part) for part in parts]
            collected = [part for parts_of_call in self.calls for part in parts_of_call or ()]
            if any(parts_of_call is None for parts_of_call in self.calls):
                return
        try:
            result = self.join(self.inputs, collected)
        except BaseException as error:
            self.fail(error)
        else:
            self._answer(result)

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless already answered."""
        self._answer(error)

    def _answer(self, answer: RewardResult | BaseException) -> None:
        with self.lock:
            if self.answered:
                return
            self.answered = True
        # Outside the lock: this runs the callbacks of whoever waits.
        if isinstance(answer, BaseException):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


class RewardRunner:
    """Calls reward functions on finished samples and joins their values to one reward per sample.

    A function that raises, hangs, dies or returns anything but finite numbers (or None: "does not apply") fails on
    that sample; the sample's reward is then nan (masked), and the failure is listed with the user's traceback.

    When a call over several samples raises, it is repeated one sample at a time, so that only the offending samples
    are masked: functions may be called more than once for a sample, and what a failed call logged is dropped. Which
    samples share a call depends on when they finish (and, with processes, on the split over them): a function must
    not normalise over its call. With score_by="group" it may: every call holds one whole group, is never repeated or
    cut, and where it fails the whole group is masked.

    Reward models and judges take part by name and weight, `late` are their places: somebody else computes their values,
    and `merge_late` (rollout/late.py) adds them. Until then rewards are nan.

    Args:
        reward_funcs: a function or a list of them, plain or `async def`; see `functions.py` for what they receive;
            beside them reward models and judges.
        weights: one finite number per function; None: all 1.
        available_columns: the dataset's columns, to refuse a parameter that nothing can fill; None: unknown.
        num_processes: 0 = in this process: plain functions one after another in a thread, coroutines together on an
            event loop. More = so many processes, started at first use, which get the functions as they are now.
        timeout_seconds: limit of one call. A process past it is killed and replaced, a coroutine is cancelled. A
            thread cannot be killed: it is left behind, and all samples of its call fail.
        score_by: "sample", or "group": the samples of a group must be submitted together.

    Raises:
        ConfigError: an unusable function, weight, number of processes or limit; a function that compares the samples
            of a group without score_by="group".
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        weights: Sequence[float] | None = None,
        available_columns: Sequence[str] | None = None,
        num_processes: int = 0,
        timeout_seconds: float | None = None,
        score_by: ScoreBy = "sample",
    ) -> None:
        self.entries = RewardList.of(reward_funcs, available_columns)
        self.names = self.entries.names
        self.late = self.entries.late
        self.functions = list(self.entries.functions.values())
        self.score_by = check_score_by(score_by, [spec.name for spec in self.functions if spec.needs_group])
        self._places = list(self.entries.functions)
        self.weights = check_weights(weights, self.names)
        self.available_columns = tuple(available_columns or ())
        if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 0:
            raise ConfigError(f"num_processes={num_processes!r}; use 0 (threads of this process) or a positive number")
        if timeout_seconds is not None and not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
            raise ConfigError(f"timeout_seconds={timeout_seconds!r}; use a positive number, or None for no limit")
        self._pool = ProcessPool(self.functions, num_processes, timeout_seconds) if num_processes else None
        self._sync_lane = SyncLane(timeout_seconds)
        self._async_lane = AsyncLane(timeout_seconds)
        self._lock = threading.RLock()
        self._open: set[PendingScore] = set()
        self._closed = False

    def submit(self, inputs: Sequence[RewardInput], trainer_state: Any) -> "Future[RewardResult]":
        """Begin scoring and return at once; submissions may overlap.

        `trainer_state` is passed on as it is; with processes it must be picklable. The future raises RewardError
        when a process cannot load the functions, or when the runner is closed first.
        Raises RewardError on a closed runner, DataError for repeated keys.
        """
        inputs = list(inputs)
        if len({sample.key for sample in inputs}) != len(inputs):
            raise DataError(f"the samples to score have repeated keys: {[sample.key for sample in inputs]}")
        calls = [(index, chunk) for index in range(len(self.functions)) for chunk in self._chunks(inputs)]
        pending = PendingScore(self._join, inputs, len(calls))
        with self._lock:
            if self._closed:
                raise RewardError("the reward runner is closed; make a new one")
            self._open.add(pending)
            pending.future.add_done_callback(lambda _: self._forget(pending))
            for number, (index, chunk) in enumerate(calls):
                self._start(pending, number, index, chunk, trainer_state)
        return pending.future

    def _start(
        self, pending: PendingScore, number: int, index: int, inputs: Sequence[RewardInput], trainer_state: Any
    ) -> None:
        spec = self.functions[index]
        arguments = partial(spec.arguments, trainer_state=trainer_state, available_columns=self.available_columns)
        task = Task(
            function=spec,
            index=index,
            inputs=inputs,
            arguments=arguments,
            done=partial(pending.add, number, self._places[index]),
            fail=pending.fail,
            is_whole=self.score_by == "group",
        )
        lane = self._pool or (self._async_lane if spec.is_async else self._sync_lane)
        lane.start(task)

    def _chunks(self, inputs: Sequence[RewardInput]) -> list[Sequence[RewardInput]]:
        """The samples of each call."""
        if not inputs:
            return []
        if self.score_by == "group":
            groups: dict[int, list[RewardInput]] = {}
            for sample in inputs:
                groups.setdefault(sample.group, []).append(sample)
            return list(groups.values())
        return self._pool.split(inputs) if self._pool else [inputs]

    def _join(self, inputs: Sequence[RewardInput], parts: list[tuple[int, Part]]) -> RewardResult:
        dense = [place for place, spec in self.entries.functions.items() if spec.is_dense]
        return assemble(self.names, self.weights, inputs, parts, dense=dense, late=self.late)

    @property
    def is_dense(self) -> bool:
        """Whether any function may give a number per token."""
        return any(spec.is_dense for spec in self.functions)

    def score(self, inputs: Sequence[RewardInput], trainer_state: Any) -> RewardResult:
        """Score and wait. Raises as `submit` and its future."""
        return self.submit(inputs, trainer_state).result()

    def close(self) -> None:
        """Stop scoring: open futures get RewardError, processes are killed and reaped. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            still_open = list(self._open)
        for pending in still_open:
            pending.fail(RewardError("the reward runner was closed before scoring finished"))
        if self._pool:
            self._pool.close()
        self._sync_lane.close()
        self._async_lane.close()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self, pending: PendingScore) -> None:
        with self._lock:
            self._open.discard(pending)


def check_score_by(score_by: ScoreBy, comparing: Sequence[str]) -> ScoreBy:
    """Raise ConfigError for an unknown value, and where functions (by name) that compare samples get single ones."""
    if score_by not in get_args(ScoreBy):
        raise ConfigError(f"score_by={score_by!r}; use one of {', '.join(get_args(ScoreBy))}")
    if comparing and score_by != "group":
        raise ConfigError(
            f"reward function {comparing[0]!r} compares the completions of a prompt; set rewards.score_by=group"
        )
    return score_by


def check_weights(weights: Sequence[float] | None, names: Sequence[str]) -> list[float]:
    """Weights as floats, 1.0 each for None. Raises ConfigError on a wrong number of them or a non-finite one."""
    if weights is None:
        return [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigError(f"{len(weights)} reward weights for {len(names)} reward functions ({', '.join(names)})")
    for weight, name in zip(weights, names, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"the weight of reward function {name!r} is {weight!r}; use a finite number")
    return [float(weight) for weight in weights]
