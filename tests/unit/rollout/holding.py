"""Runs with partial rollouts in this process: the real collector, ranks in threads, real engine clients, and under them
an engine whose completions are known beforehand and that fails, is interrupted or killed when the test says so."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hybrid_rl.batch import Batch
from hybrid_rl.controller import RankMesh
from hybrid_rl.controller.dispatch import dispatch_of
from hybrid_rl.controller.exchange import collect, cut
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines import engine_client
from hybrid_rl.engines.base import EngineState, FinishedSample, Generation, RolloutRequest, SamplingParams
from hybrid_rl.engines.coordinator import Coordinator
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rewards.calling import CallOutcome
from hybrid_rl.rewards.results import RewardResult
from hybrid_rl.rollout import hold_rule, stream
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.collector import Collector, StepPlan
from hybrid_rl.rollout.completion_stream import CompletionStream
from hybrid_rl.rollout.held_files import save_held
from hybrid_rl.rollout.hold_rule import HoldRule
from hybrid_rl.rollout.task_split import TaskList
from hybrid_rl.workers.hybrid import HybridWorker

STOP = 1
MAX_TOKENS = 40
WAIT_SECONDS = 60.0  # for what takes milliseconds: past it, ranks wait for each other for ever


class RankFailedError(RuntimeError):
    """A fault of a rank that the test asked for."""


def length_of(seed: int) -> int:
    """The length of a completion: heavy-tailed, and the same whenever and wherever it is made."""
    return min(MAX_TOKENS, int(2 * random.Random(seed).paretovariate(0.9)))


def token_of(prompt: int, place: int) -> int:
    return 2 + (31 * prompt + 7 * place) % 900


def logprob_of(version: int, place: int) -> float:
    """Tells which weights made a token, exactly in float32."""
    return -(1.0 + version + place / 64)


class Script:
    """The faults of a step, by rank: after so many calls of something. watches: of looks at the agents' event loop,
    between two steps of the engine."""

    def __init__(self) -> None:
        self.engine_steps: dict[int, int] = {}
        self.looks: dict[int, int] = {}
        self.watches: dict[int, int] = {}
        self._rank = threading.local()

    def of_rank(self, rank: int) -> None:
        self._rank.number = rank

    def interrupt_requested(self) -> bool:
        """Whether the rank of this thread is to be interrupted by now; from then on it is."""
        rank = getattr(self._rank, "number", 0)
        if rank in self.looks:
            self.looks[rank] -= 1
        return self.looks.get(rank, 1) <= 0

    def watch(self) -> None:
        """Fail between two steps of the engine, if the rank of this thread is to."""
        rank = getattr(self._rank, "number", 0)
        if rank in self.watches:
            self.watches[rank] -= 1
            if self.watches[rank] <= 0:
                raise RankFailedError(f"rank {rank}, beside its engine")

    def forgive(self) -> None:
        """Nothing fails any more."""
        self.engine_steps, self.looks, self.watches = {}, {}, {}


class KnownEngine(RolloutEngine):
    """Makes completions that are known beforehand. slots: requests that run at a time."""

    kv_cache_tokens = 10**6
    kv_cache_bytes = 0

    def __init__(self, slots: int, max_num_waiting: int) -> None:
        super().__init__(vocab_size=1000, limit=None, max_num_waiting=max_num_waiting, decode=None)
        self.state, self.policy_version = EngineState.READY, 0
        self._slots = slots
        self._waiting: list[Generation] = []
        self._running: list[Generation] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _queue(self, requests: Sequence[RolloutRequest]) -> None:
        self._waiting += [Generation(request) for request in requests]

    def step(self) -> list[FinishedSample]:
        leaving = [one for one in (*self._running, *self._waiting) if one.request.id in self._aborted]
        finished = [self._finish(one, "abort") for one in leaving]
        self._aborted = set()
        self._running = [one for one in self._running if one not in leaving]
        self._waiting = [one for one in self._waiting if one not in leaving]
        while self._waiting and len(self._running) < self._slots:
            self._running.append(self._waiting.pop(0))
        for one in list(self._running):
            place = len(one.tokens)
            is_last = place + 1 == length_of(one.request.params.seed)
            token = STOP if is_last else token_of(one.request.prompt_ids[0], place)
            if reason := self._extend(one, token, logprob_of(self.policy_version, place)):
                self._running.remove(one)
                finished.append(self._finish(one, reason))
        return finished

    def _cache_usage(self) -> tuple[int, float]:
        return 0, 0.0

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        raise NotImplementedError

    def sleep(self, tags: Iterable[str]) -> None:
        raise NotImplementedError

    def wake(self, tags: Iterable[str]) -> None:
        raise NotImplementedError


class Exchange:
    """Gathers the values of ranks in threads. A rank that the others wait for in vain is found out."""

    def __init__(self, num_ranks: int) -> None:
        self._values: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=WAIT_SECONDS)

    def of_rank(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


class Lengths:
    """In the place of reward functions: the length of a completion, the step that a function was told, and which of
    several functions it is."""

    def __init__(self, function: int = 0) -> None:
        self._function = function

    names = ("length",)
    entries: Any = SimpleNamespace(judges=(), models=(), names=names, given={})
    score_by = "group"
    is_dense = False
    reads_environments = True

    def submit(self, inputs: Sequence[Any], state: TrainerState) -> Future[Any]:
        future: Future[Any] = Future()
        beside = state.global_step / 64 + 1000 * self._function
        values: list[float | None] = [len(one.completion_ids) + beside for one in inputs]
        future.set_result([(0, (inputs, CallOutcome(values, {}, None, {}, [], {})))])
        return future

    def join(self, inputs: Sequence[Any], parts: Sequence[tuple[int, Any]], failed: Any = ()) -> RewardResult:
        values = {
            one.key: value for _, (scored, outcome) in parts for one, value in zip(scored, outcome.values, strict=True)
        }
        rewards = np.array([values[one.key] for one in inputs], dtype=np.float64)
        keys = [one.key for one in inputs]
        return RewardResult(keys, rewards.reshape(-1, 1), rewards, [], {}, {}, [np.zeros(0)] * len(keys), {})


class Prompts:
    """In the place of a sampler: prompts numbered from 0. limits: tokens that their completions may have."""

    epoch = 0.0

    def __init__(self, run: Run) -> None:
        self.position, self.limits, self._run = 0, dict[int, int](), run

    def take(self, num_prompts: int) -> list[PromptRow]:
        assert num_prompts >= 1
        numbers = range(self.position, self.position + num_prompts)
        self.position += num_prompts
        self.limits.update(dict.fromkeys(numbers, self._run.setting.max_tokens))
        return [self._run.row(number) for number in numbers]

    def observe(self, rows: Any, rates: Any) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Setting:
    """A configuration that validate allows, and the machine under it. is_shared: all ranks step one engine. is_apart:
    ranks that only generate make what is ahead. max_refills: groups whose samples are equally long are replaced.
    is_in_turn: there is no rule, every step takes what it begins. function: which of several reward functions."""

    num_prompts: int
    num_generations: int
    ahead: int
    oversample: int
    max_staleness: int
    order: str
    check_steps: int
    num_ranks: int
    slots: int
    max_num_waiting: int
    is_shared: bool = False
    drops: bool = False
    is_apart: bool = False
    max_refills: int = 0
    is_in_turn: bool = False
    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    function: int = 0

    @property
    def rule(self) -> HoldRule | None:
        if self.is_in_turn:
            return None
        ahead = 0 if self.is_apart else self.ahead
        return HoldRule(self.num_prompts, self.max_staleness, ahead, self.order, self.check_steps, drops=self.drops)


@dataclass
class Step:
    """What a committed step trained on. samples: by prompt and generation, tokens, versions and reward."""

    version: int
    samples: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)


class Run:
    """A run whose driver, ranks and engines are this process. folder: of its checkpoint. pending: what ranks that
    generate beside training have to begin, by rank, and the call; None = nothing."""

    stop_ids: tuple[int, ...] = (STOP,)
    num_evaluated_tokens = 8

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder, self.script = setting, folder, Script()
        self.step, self.steps = 0, list[Step]()
        self.prompts, self.delivered = Prompts(self), dict[int, list[int]]()
        self.pending: tuple[Sequence[Sequence[RolloutTask]], RolloutCall] | None = None
        self._start(setting.num_ranks)

    def row(self, number: int) -> PromptRow:
        """The prompt of a number."""
        return PromptRow(number, str(number), (number,), {"answer": number})

    def number_of(self, prompt_ids: Sequence[int]) -> int:
        """The number of a prompt."""
        return prompt_ids[0]

    def _start(self, num_ranks: int) -> None:
        setting, self.num_ranks, self.pending = self.setting, num_ranks, None
        outer, inner = Exchange(num_ranks), Exchange(num_ranks)
        self.engines, self.ranks = list[Any](), list[Any]()
        for rank in range(num_ranks):
            together: Any = {
                "gather": inner.of_rank(rank),
                "gather_numbers": inner.of_rank(rank),
                "fingerprint": lambda: 0,
            }
            is_shared = setting.is_shared and num_ranks > 1
            coordinator = Coordinator(rank=rank, num_ranks=num_ranks, **together) if is_shared else None
            self.engines.append(self._engine(rank))
            self.ranks.append(self._rank(EngineClient(self.engines[-1], coordinator=coordinator), outer.of_rank(rank)))
        self.collector = self._collector(setting)

    def _collector(self, setting: Setting) -> Collector:
        sampler: Any = self.prompts
        plan = StepPlan(
            sampler,
            setting.num_prompts,
            setting.num_generations,
            SamplingParams(
                max_tokens=setting.max_tokens, temperature=setting.temperature, stop_token_ids=self.stop_ids
            ),
            max_refills=setting.max_refills,
            hold=setting.rule,
            num_extra=setting.ahead + setting.oversample,
            num_later=setting.ahead if setting.is_apart else 0,
        )
        workers: Any = self
        return Collector(workers, ["length"], plan, max_failure_share=1.0, success=None)

    def _engine(self, rank: int) -> Any:
        return KnownEngine(self.setting.slots, self.setting.max_num_waiting)

    def _rank(self, client: EngineClient, gather: Callable[[Any], list[Any]]) -> Any:
        rewards: Any = Lengths(self.setting.function)
        return CompletionStream(client, rewards, lambda ids: str(len(ids)), seed=7, gather=gather)

    def publish(self) -> None:
        """Give the engines the weights of the last step, unless they have them."""
        for engine in self.engines:
            engine.policy_version = self.step

    def change(self, **settings: Any) -> None:
        """Go on with other settings. Raises ConfigError if what is held cannot be joined with them."""
        setting = replace(self.setting, **settings)
        self.collector, self.setting = self._collector(setting).after(self.collector, self.step), setting
        if "function" in settings:
            for rank in self.ranks:
                rank.score_with(Lengths(setting.function))

    def on_ranks(self, work: Callable[[int], Any]) -> list[Any]:
        """Call all ranks. Raises what a rank raised, the cause before its consequences."""

        def run(rank: int) -> Any:
            self.script.of_rank(rank)
            try:
                return work(rank)
            except BaseException as error:
                return error

        if self.num_ranks == 1:
            answers = [run(0)]
        else:
            with ThreadPoolExecutor(self.num_ranks) as pool:
                answers = list(pool.map(run, range(self.num_ranks)))
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for kind in (KeyboardInterrupt, RankFailedError, BaseException):
            for failure in failures:
                if isinstance(failure, kind):
                    raise failure
        return answers

    def rollout(self, *args: Any) -> Any:
        """Call the ranks as the worker group does."""
        record = dispatch_of(HybridWorker.rollout)
        parts = cut("rollout", record, args, self.num_ranks, lambda *_: [])
        answers = self.on_ranks(lambda rank: self.ranks[rank].run(*parts.arguments[rank]))
        mesh = RankMesh(dp_shard=self.num_ranks)
        batch, reports = collect("rollout", record, parts, mesh, dict(enumerate(answers)))
        _, call = args
        if call.is_scored:
            earlier = self.delivered.get(call.state.global_step, []) if call.is_refill else []
            prompts = {self.number_of(row.tolist()) for row in batch["prompt_ids"]}
            self.delivered[call.state.global_step] = [*earlier, *prompts]
        return batch, reports

    def begin(self, tasks: TaskList, call: RolloutCall) -> None:
        """Have the ranks begin these prompts beside training."""
        self.pending = tasks.dealt(self.num_ranks), call

    def go_ahead(self, looks: int | None = None) -> bool:
        """Let the ranks generate the next batch. looks: of each rank, after which newer weights are there for it; None
        = they come when it is done. Returns whether it was broken off, and goes on with newer weights."""
        assert self.pending is not None
        tasks, call = self.pending
        learner, left = call.state.global_step, [looks] * self.num_ranks

        def run(rank: int) -> bool:
            def is_outdated() -> bool:
                number = left[rank]
                if number is None or call.version == learner:
                    return False
                left[rank] = number - 1
                return number <= rank % 2  # some see them sooner

            goes_on: bool = self.ranks[rank].go_ahead(tasks[rank], call, learner, is_outdated)[0]
            return goes_on

        (goes_on,) = {*self.on_ranks(run)}
        self.pending = ([[]] * self.num_ranks, replace(call, version=learner)) if goes_on else None
        return goes_on

    def one_step(self, *, scores: bool = True) -> None:
        """Collect and train: or, if that is interrupted or fails, take the step back and raise. scores: False = it is
        interrupted when it has collected."""
        position, step = self.prompts.position, self.step + 1
        self.publish()
        try:
            batch = self.collector.take(self.step, TrainerState(step, 100, 0.0)).batch
            if not scores:
                raise KeyboardInterrupt
        except BaseException:
            self.prompts.position = position
            assert not any(engine.num_unfinished for engine in self.engines)
            raise
        assert isinstance(batch, Batch)
        self.steps.append(self._checked(batch))
        self.step = step

    def evaluate(self) -> None:
        """Generate something else between two steps."""
        rows = [replace(self.row(900 + place), index=place) for place in range(3)]
        self.publish()
        params = SamplingParams(max_tokens=self.num_evaluated_tokens)
        self.collector.rollout(
            rows, 1, params, self.step, TrainerState(self.step, 100, 0.0), purpose="eval", is_scored=False
        )

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.iterdir():
            old.unlink()
        for rank, rollout in enumerate(self.ranks):
            save_held(self.folder, rank, rollout.held(self.step))
        self.saved = self.step, self.prompts.position, self.collector.state_dict(self.step), self.setting

    def kill(self, num_ranks: int | None = None, **settings: Any) -> None:
        """Lose everything but the checkpoint, and go on from there. settings: that are others then. Raises ConfigError
        if what is held cannot go on under them."""
        self.step, self.prompts.position, state, setting = self.saved
        self.setting = replace(setting, **settings)
        del self.steps[self.step :]
        self.script.forgive()
        self._start(num_ranks or self.num_ranks)
        for rank, rollout in enumerate(self.ranks):
            rollout.load(self.step, self.folder, rank, self.num_ranks)
        held = {
            group.group: group.prompt(rank)
            for rank, rollout in enumerate(self.ranks)
            for group in rollout.held(self.step)
        }
        self.collector.load_state_dict(state, held, self.step)

    def _checked(self, batch: Batch) -> Step:
        """The samples of a batch, all of which are to be there."""
        taken, numbers = Step(self.step), dict[int, int]()
        columns = [[tuple(row.tolist()) for row in batch[name]] for name in ("completion_ids", "policy_version")]
        prompts = [self.number_of(row.tolist()) for row in batch["prompt_ids"]]
        for prompt, *sample in zip(prompts, *columns, batch["rewards"].tolist(), strict=True):
            numbers[prompt] = numbers.get(prompt, -1) + 1
            taken.samples[prompt, numbers[prompt]] = tuple(sample)
        assert {*numbers.values()} == {self.setting.num_generations - 1} and len(numbers) == self.setting.num_prompts
        return taken

    def check_prompts(self) -> None:
        """Nothing is lost and nothing used twice: what was trained on and what is held is what was begun."""
        used = [prompt for step in self.steps for prompt in {prompt for prompt, _ in step.samples}]
        held = [group.row.index for rollout in self.ranks for group in rollout.held(self.step)]
        if self.setting.max_refills:  # what a step was given and did not train on taught nothing, or was not wanted
            given = [prompt for step in range(1, self.step + 1) for prompt in self.delivered[step]]
            assert {*used} <= {*given} and len({*used}) == len(used)
            used = given
        if self.setting.drops and self.setting.max_refills:
            assert len({*used}) == len(used) and not held
            return
        if self.setting.drops:
            size = self.setting.num_prompts + self.setting.oversample
            assert len({*used}) == len(used) and not held and self.prompts.position == size * len(self.steps)
            assert all(prompt // size == step for step, one in enumerate(self.steps) for prompt, _ in one.samples)
            return
        assert sorted(used + held) == list(range(self.prompts.position))
        assert not self.step or len(held) == self.setting.ahead + self.setting.oversample


def listen(monkeypatch: Any, runs: Callable[[], Script]) -> None:
    """Let ranks ask the script of the present run whether they are interrupted."""
    for module in (engine_client, hold_rule, stream):
        monkeypatch.setattr(module, "interrupt_requested", lambda: runs().interrupt_requested())
