"""The simulation of training steps, against schedules on paper and against the engine's own passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate_time import Setting, markdown, simulate
from hybrid_rl import Trainer
from hybrid_rl.engines.base import FinishReason, Generation, derive_seed
from hybrid_rl.engines.guards import Generator
from tests.support.inside.engines import wrap_extend
from tests.support.inside.rollouts import plan_of, set_plan
from tests.support.inside.workers import engine_of, stream_of, worker_of
from tests.support.tiny import build_model, build_tokenizer, sums

# A decode step takes a second, and nothing else takes any time.
PAPER: dict[str, Any] = {"step_seconds": 1.0, "token_seconds": 0.0, "train_seconds": 0.0, "handoff_seconds": 0.0}
PAPER |= {"gpus": 1, "prompts": 2, "generations": 1, "slots": 8}


@dataclass(frozen=True)
class Written(Setting):
    """A setting whose lengths are given, in the order in which prompts begin."""

    given: Iterator[int] = field(default_factory=lambda: iter(()))

    def lengths(self, rng: np.random.Generator, count: int) -> list[int]:
        return [next(self.given) for _ in range(count)]


def steps_of(lengths: list[int], steps: int, **changes: Any) -> list[float]:
    return simulate(Written(**{**PAPER, **changes}, given=iter(lengths)), steps, 0).seconds


def test_a_synchronous_step_takes_its_longest() -> None:
    assert steps_of([3, 5, 9, 2], 2) == [5, 9]


def test_a_partial_step_ends_with_enough_groups_and_goes_on_with_the_rest() -> None:
    # 3, 5 and 9 begin; 9 has 4 left after 5 seconds. With it begin 2 and 6: 2 and 9 are whole after 4 more, and 6 has 2
    # left. Then 7 and 8 begin: 6 is whole after 2, 7 after 7.
    assert steps_of([3, 5, 9, 2, 6, 7, 8], 3, oversample=1, max_staleness=2) == [5, 4, 7]


def test_what_would_be_too_old_is_finished_first() -> None:
    # 30 begins in the first step, and must be whole in the second if tokens may be one version old.
    assert steps_of([3, 5, 30, 2, 2, 2, 2], 2, oversample=1, max_staleness=1) == [5, 25]
    assert steps_of([3, 5, 30, 2, 2, 2, 2], 2, oversample=1, max_staleness=2) == [5, 2]


def test_one_step_off_hides_rewards_behind_the_next_generation() -> None:
    wait = {"reward_seconds": 6.0, "reward_sigma": 0.0}
    assert steps_of([4, 4, 4, 4], 2, **wait) == [10, 10]
    # The first step waits for its own rewards; what is ahead gets them while 5 and 5 are generated.
    assert steps_of([4, 4, 4, 4, 5, 5], 2, ahead=2, max_staleness=1, **wait) == [10, 5]


def test_fewer_slots_than_sequences_take_turns() -> None:
    assert steps_of([3, 5], 1, slots=1) == [8]


@pytest.mark.slow
def test_the_engine_needs_as_many_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    limit, prompts, generations, extra, steps = 24, 3, 2, 2, 5

    def length_of(seed: int) -> int:
        return 1 + derive_seed("length", seed) % limit

    def scheduled(
        extend: Any, self: Generator, generation: Generation, token: int, logprob: float
    ) -> FinishReason | None:
        extend(self, generation, token, logprob)
        return "stop" if len(generation.tokens) >= length_of(generation.request.params.seed) else None

    wrap_extend(monkeypatch, Generator, scheduled)
    trainer = Trainer(
        build_model(),
        lambda completions, **_: [float(len(text)) for text in completions],
        sums(16),
        tokenizer=build_tokenizer(),
        prompts_per_step=prompts,
        num_generations=generations,
        max_completion_length=limit,
        partial=True,
        oversample=extra,
        max_staleness=2,
        max_steps=steps,
        log_level="quiet",
        output_dir=str(tmp_path),
    )
    plan = plan_of(trainer.collector)
    set_plan(trainer.collector, replace(plan, hold=replace(plan.hold, check_steps=1)))
    worker: Any = worker_of(trainer)
    run, counted = stream_of(worker).run, []

    def counting(*arguments: Any) -> Any:
        before = engine_of(worker).stats().num_steps
        found = run(*arguments)
        counted.append(engine_of(worker).stats().num_steps - before)
        return found

    monkeypatch.setattr(stream_of(worker), "run", counting)
    with trainer:
        list(trainer.steps())
    seeds = (
        derive_seed(trainer.config.seed, 0, f"train/{step + 1}", place, generation)
        for step in range(steps)
        for place in range(prompts + (extra if step == 0 else 0))
        for generation in range(generations)
    )
    setting = {**PAPER, "prompts": prompts, "generations": generations, "slots": 64}
    simulated = simulate(Written(**setting, oversample=extra, max_staleness=2, given=map(length_of, seeds)), steps, 0)
    assert counted == simulated.decode_steps
    assert simulated.seconds == simulated.decode_steps


def test_sizes_with_the_same_values_share_a_row_of_the_table() -> None:
    row = {"work": "sums", "synchronous_seconds": 11.8, "partial": 1.45, "separate pools": 1.21}
    rows = [row | {"gpus": gpus, "generating": {"separate pools": gpus // 4}} for gpus in (8, 1024)]
    assert markdown(rows).splitlines() == [
        "| work | GPUs | synchronous, s | partial | separate pools |",
        "| --- | --- | --- | --- | --- |",
        "| sums | 8 to 1,024 | 12 | 1.4 | 1.2 (25%) |",
    ]
