"""Scoring of finished samples in the background while others are still generated."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import math
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from numbers import Real
from typing import Any, Literal

from hybrid_rl.errors import ConfigError, DataError, RewardError
from hybrid_rl.process.call_process import END_SECONDS
from hybrid_rl.process.threads import JOIN_SECONDS, LoopThread
from hybrid_rl.rewards.calling import CallOutcome
from hybrid_rl.rewards.entries import RewardList
from hybrid_rl.rewards.functions import ENVIRONMENTS, RewardInput
from hybrid_rl.rewards.in_process import ThreadCaller, on_device
from hybrid_rl.rewards.narrowing import call_narrowed
from hybrid_rl.rewards.pool import ProcessCaller
from hybrid_rl.rewards.results import ALL_FUNCTIONS, THE_AGENT, Part, RewardFailure, RewardResult, assemble

ScoreBy = Literal["sample", "group"]


class RewardRunner:
    """Calls reward functions on finished samples and joins their values to one reward per sample.

    A function that raises, hangs, dies or returns anything but finite numbers (or None: "does not apply") fails on
    that sample; the sample's reward is then nan (masked), and the failure is listed with the user's traceback.

    If a call over several samples raises, it is repeated one sample at a time, so that only the offending samples
    are masked: functions may be called more than once for a sample, and what a failed call logged is dropped. Which
    samples share a call depends on when they finish (and, with processes, on the split over them): a function must
    not normalise over its call. With score_by="group" it may: every call holds one whole group and is never repeated or
    cut; if it fails, the whole group is masked.

    Reward models and judges only have a name, a weight and a place (`late`) here: their values are computed elsewhere
    and added by `merge_late` (rollout/deferred_scores.py). Until then rewards are nan.

    Args:
        reward_funcs: a function or a list of them, plain or `async def`; see `functions.py` for their arguments;
            also reward models and judges.
        weights: one finite number per function; None: all 1.
        available_columns: the dataset's columns, to refuse a parameter that nothing can fill; None: unknown.
        num_processes: 0 = in this process: plain functions one after another in a thread, coroutines together on an
            event loop. More = so many processes, started when first needed, which get the functions as they are now.
        timeout_seconds: limit of one call. A process past it is killed and replaced, a coroutine is cancelled. A
            thread cannot be killed: it is left behind, and all samples of its call fail.
        score_by: "sample", or "group": the samples of a group must be submitted together.
        has_environments: whether samples have environments, which functions get as `environments`. They cannot be sent
            to processes: there, functions that take any keyword do without, and one that names it is refused.

    Raises:
        ConfigError: an unusable function or weight; a function that compares the samples of a group without
            score_by="group".
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
        has_environments: bool = False,
    ) -> None:
        self.entries = RewardList.of(reward_funcs, available_columns, has_environments=has_environments)
        self.names = self.entries.names
        self.functions = list(self.entries.functions.values())
        self.score_by = score_by
        self.weights = [1.0] * len(self.names) if weights is None else list(weights)
        for weight, name in zip(self.weights, self.names, strict=True):
            if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
                raise ConfigError(f"the weight of reward function {name!r} is {weight!r}; use a finite number")
        for spec in self.functions:
            if spec.needs_group and score_by != "group":
                raise ConfigError(
                    f"reward function {spec.name!r} compares the completions of a prompt; set rewards.score_by=group"
                )
            if has_environments and num_processes and spec.parameters is not None and spec.accepts(ENVIRONMENTS):
                raise ConfigError(
                    f"reward function {spec.name!r} takes `environments`, objects of the trainer's process, so it "
                    f"cannot run in another one: set reward_processes=0 (it is {num_processes}), or give the "
                    "environment a method get_reward()"
                )
        self._passes_environments = has_environments and not num_processes
        # Those that take any keyword may look at them, too.
        self.reads_environments = self._passes_environments and any(
            function.accepts(ENVIRONMENTS) for function in self.functions
        )
        self.available_columns = tuple(available_columns or ())
        self._num_processes = num_processes
        self._caller = (
            ProcessCaller(self.functions, num_processes, timeout_seconds)
            if num_processes
            else ThreadCaller(timeout_seconds)
        )
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._open: set[asyncio.Task[Any] | None] = set()
        self._closed = False
        self._pid = os.getpid()

    def submit(self, inputs: Sequence[RewardInput], trainer_state: Any) -> Future[list[tuple[int, Part]]]:
        """Begin scoring and return at once; submissions may overlap.

        `trainer_state` is passed on as it is; with processes it must be picklable. The future gives the outcome of
        every call with the place of its function, for `join`. It raises RewardError if a process cannot load the
        functions, or if the runner is closed first.
        Raises RewardError on a closed runner, DataError for repeated keys.
        """
        _check_keys(inputs)
        with self._lock:
            if self._closed:
                raise RewardError("the reward runner is closed; make a new one")
            if self._loop is None:
                self._loop = LoopThread("reward scoring", on_device)
                atexit.register(self.close)
            return self._loop.start(self._score(inputs, trainer_state))

    def join(
        self,
        inputs: Sequence[RewardInput],
        parts: Iterable[tuple[int, Part]],
        failures: Sequence[RewardFailure] = (),
    ) -> RewardResult:
        """Join the outcomes of all calls over these samples, from one submission or several, to their rewards.
        failures: of samples that failed before they could be scored. Raises DataError for repeated keys."""
        _check_keys(inputs)
        dense, late = self.entries.dense, self.entries.late
        unrewarded = self._silences(inputs)
        return assemble(
            self.names, self.weights, inputs, parts, failures, dense=dense, late=late, unrewarded=unrewarded
        )

    def _silences(self, inputs: Sequence[RewardInput]) -> dict[int, tuple[str, str]]:
        """Return for each trajectory who is to blame if it gets no reward, and how; nothing if all rewards come from
        functions."""
        sources = self.entries.given
        asked: dict[int, set[str]] = {}
        for sample in inputs if sources else ():
            asked.setdefault(sample.key.trajectory, set()).update(sample.given)
        functions = [name for place, name in enumerate(self.names) if place not in sources]
        silences = {}
        for trajectory, names in asked.items():
            said = [f"{', '.join(functions)} returned None for this sample"] if functions else []
            said += [text for source in sources.values() if (text := source.silence(names))]
            detail = "; ".join(said) or "no get_reward() was asked, and there is no reward function"
            silences[trajectory] = ALL_FUNCTIONS if functions else THE_AGENT, detail
        return silences

    async def _score(self, inputs: Sequence[RewardInput], trainer_state: Any) -> list[tuple[int, Part]]:
        """Make all calls over these samples."""
        calls = [(place, chunk) for place in self.entries.functions for chunk in self._chunks(inputs)]
        self._open.add(asyncio.current_task())
        try:
            parts_of_calls = await asyncio.gather(*(self._call(place, chunk, trainer_state) for place, chunk in calls))
        except asyncio.CancelledError:
            if not self._closed:
                raise  # whoever has submitted these samples does not wait for them any more
            raise RewardError("the reward runner was closed before scoring finished") from None
        finally:
            self._open.discard(asyncio.current_task())
        given_parts = [(place, (inputs, source.outcome(inputs))) for place, source in self.entries.given.items()]
        return given_parts + [
            (place, part) for (place, _), parts in zip(calls, parts_of_calls, strict=True) for part in parts
        ]

    async def _call(self, place: int, inputs: Sequence[RewardInput], trainer_state: Any) -> list[Part]:
        spec = self.entries.functions[place]

        async def call(samples: Sequence[RewardInput]) -> CallOutcome:
            arguments = partial(
                spec.arguments,
                samples,
                trainer_state,
                self.available_columns,
                has_environments=self._passes_environments,
            )
            return await self._caller.call(spec, arguments, len(samples))

        return await call_narrowed(call, inputs, self._caller.slot(spec), is_whole=self.score_by == "group")

    def _chunks(self, inputs: Sequence[RewardInput]) -> list[Sequence[RewardInput]]:
        """Split samples into calls: groups, or nearly equal shares of all for the processes."""
        if self.score_by == "group":
            groups: dict[int, list[RewardInput]] = {}
            for sample in inputs:
                groups.setdefault(sample.group, []).append(sample)
            return list(groups.values())
        if not inputs:
            return []
        number = min(self._num_processes or 1, len(inputs))
        bounds = [len(inputs) * chunk // number for chunk in range(number + 1)]
        return [inputs[start:end] for start, end in itertools.pairwise(bounds)]

    @property
    def is_dense(self) -> bool:
        """Whether any function may give a number per token, or an agent one per turn."""
        return bool(self.entries.dense)

    def score(self, inputs: Sequence[RewardInput], trainer_state: Any) -> RewardResult:
        """Score and wait. Raises as `submit` and its future."""
        return self.join(inputs, self.submit(inputs, trainer_state).result())

    def close(self) -> None:
        """Stop scoring: open futures get RewardError, processes are killed and reaped. Idempotent. Does nothing in a
        forked child, which runs its parent's atexit too: processes and threads are the parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed, loop, self._loop = True, self._loop, None
        if loop is not None:
            atexit.unregister(self.close)
            with contextlib.suppress(TimeoutError):
                loop.start(self._stop()).result(2 * END_SECONDS)
            loop.stop()
            loop.thread.join(JOIN_SECONDS)

    async def _stop(self) -> None:
        """Cancel what is open, then end threads and processes."""
        scores = [task for task in self._open if task is not None and task.cancel()]
        await asyncio.gather(*scores, return_exceptions=True)
        self._caller.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_keys(inputs: Sequence[RewardInput]) -> None:
    keys = [sample.key for sample in inputs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []:
        raise DataError(f"the samples to score have repeated keys: {', '.join(map(str, twice))}; give each its own")
