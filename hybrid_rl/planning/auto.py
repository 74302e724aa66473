"""What is `auto` in memory, decided: the least that makes a run fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import rollout_ranks
from hybrid_rl.config.memory_keys import MemoryConfig, Movable
from hybrid_rl.config.rollout_ranks import rollout_config
from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.cycle import (
    ACTOR,
    CRITIC,
    CRITIC_OPTIMIZER,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    REWARD_MODELS,
    TEACHER,
)
from hybrid_rl.planning.ledger import Budget, Choices, MemoryPlan
from hybrid_rl.planning.passes import Passes, RunShape, tokens_per_micro_batch
from hybrid_rl.planning.phases import NOTES, StepMemory
from hybrid_rl.planning.size_text import size_text
from hybrid_rl.training.run_cycle import memory_phases

# What leaves first: what is needed least often, and costs no more than its way through the bus.
ORDER = (OPTIMIZER, REFERENCE, TEACHER, REWARD_MODELS, CRITIC_OPTIMIZER, CRITIC, ACTOR)
SPARE_SHARE = 0.05  # of the device, that a chosen cache leaves free
RESERVE_SHARE = 0.02  # of the device, that every phase leaves if some choice can, for what is not counted
CACHE_SHARE = 0.5  # of the cache that all sequences want: if there is less, more residents leave while it is awake
FEWEST_TOKENS = 1024  # of a micro-batch that is made smaller: below, passes only get slower


def plan_memory(passes: Passes, config: TrainerConfig, budget: Budget) -> MemoryPlan:
    """Plan the memory of a resolved configuration, with what is `auto` decided. The plan may not fit: see `fits`.

    Raises ModelError for a model that cannot be counted, ConfigError for keys that do not go together.
    """
    plans = [_plan_side(side, budget, passes) for side in _sides(config)]
    return plans[0] if len(plans) == 1 else _of_both(*plans)


@dataclass(frozen=True)
class Side:
    """Ranks of a run that do the same. config: theirs."""

    config: TrainerConfig
    trains: bool = True
    generates: bool = True


def _sides(config: TrainerConfig) -> list[Side]:
    """Return the ranks that do different things: all at once, or those that train and those that only generate."""
    if not rollout_ranks(config):
        return [Side(config)]
    return [Side(config, generates=False), Side(rollout_config(config), trains=False)]


def _of_both(training: MemoryPlan, generating: MemoryPlan) -> MemoryPlan:
    """Return the plan of a run whose ranks train or generate; the cache is that of the ranks that have an engine."""
    name = "kv_cache_memory_bytes"
    chosen, reasons = generating.choices, dict(training.choices.reasons)
    if name in chosen.reasons:
        reasons[name] = chosen.reasons[name]
    choices = dataclasses.replace(training.choices, kv_cache_memory_bytes=chosen.kv_cache_memory_bytes, reasons=reasons)
    return dataclasses.replace(training, choices=choices, generating=generating)


def _plan_side(side: Side, budget: Budget, passes: Passes) -> MemoryPlan:
    attempts = _attempts(side, passes.shape)
    if fitting(attempts, passes, budget) is None:
        return least_demanding(attempts, passes, budget)
    reserve = int(RESERVE_SHARE * (budget.device_bytes or 0))
    candidates: list[tuple[int, bool, MemoryPlan]] = []
    for attempt in attempts:
        plan = attempt.plan(passes, budget)
        if plan.fits:
            left, is_roomy = min(plan.free_bytes or 0, reserve), not _is_cramped(plan, passes, attempt)
            if left == reserve and is_roomy:
                return plan
            candidates.append((left, is_roomy, plan))
    # A small cache is slow, but what is not counted may end a run. Of equal ones the first.
    return max(candidates, key=lambda candidate: candidate[:2])[2]


def can_fit(passes: Passes, config: TrainerConfig, budget: Budget) -> bool:
    """Return whether some choice of what is `auto` makes a run fit."""
    return all(fitting(_attempts(side, passes.shape), passes, budget) is not None for side in _sides(config))


def smallest_plan(passes: Passes, config: TrainerConfig, budget: Budget) -> MemoryPlan:
    """Return the plan of a run that demands least, whether it fits or not."""
    plans = [least_demanding(_attempts(side, passes.shape), passes, budget) for side in _sides(config)]
    return plans[0] if len(plans) == 1 else _of_both(*plans)


def fitting(attempts: Sequence[Attempt], passes: Passes, budget: Budget) -> MemoryPlan | None:
    """Return a plan that fits, made from one of the attempts that need least of the device, or of the host; None if
    they do not fit, as then nothing does."""
    return next((plan for plan in _frugal(attempts, passes, budget) if plan.fits), None)


def least_demanding(attempts: Sequence[Attempt], passes: Passes, budget: Budget) -> MemoryPlan:
    """Return the plan that misses least of the device: of several that fit on it the one that needs least of the host,
    else the one that has least there."""

    def demand(plan: MemoryPlan) -> tuple[int, int]:
        missing = max(0, -(plan.free_bytes or 0))
        return missing, 0 if missing else plan.bytes_of_host

    return min(_frugal(attempts, passes, budget), key=demand)


def _frugal(attempts: Sequence[Attempt], passes: Passes, budget: Budget) -> Iterator[MemoryPlan]:
    """Yield plans with the smallest micro-batches, the one that has least on the device first."""
    smallest = min(attempt.max_tokens for attempt in attempts)
    for attempt in reversed(attempts):
        if attempt.max_tokens == smallest:
            yield attempt.plan(passes, budget)


@dataclass(frozen=True)
class Attempt:
    """A choice that may fit."""

    side: Side
    offload: tuple[str, ...]
    optimizer_on_host: bool
    max_tokens: int

    @property
    def config(self) -> TrainerConfig:
        """The configuration of these ranks."""
        return self.side.config

    @property
    def decided(self) -> TrainerConfig:
        """The configuration with these values."""
        memory = _decided(self.config.memory, self.offload, self.optimizer_on_host)
        optimizer = dataclasses.replace(self.config.optimizer, tokens_per_micro_batch=self.max_tokens)
        return dataclasses.replace(self.config, memory=memory, optimizer=optimizer)

    def step(self, passes: Passes) -> StepMemory:
        """Return the memory of a step."""
        side = self.side
        return StepMemory(passes, self.decided, trains=side.trains, generates=side.generates)

    def plan(self, passes: Passes, budget: Budget) -> MemoryPlan:
        """Plan it, with the largest cache that fits."""
        step = self.step(passes)
        given_bytes = self.config.rollout.kv_cache_memory_bytes if step.generates else 0
        cache_bytes, limit = _cache_bytes(step, budget) if given_bytes is None else (given_bytes, "")
        config = self.config
        assert config.num_ranks != "auto"
        default = tokens_per_micro_batch(config, passes.shape.max_length)
        reasons: dict[str, str] = {}
        if config.memory.offload is None and self.offload:
            reasons["memory.offload"] = "without it the run would not fit, or leave little of the KV cache"
        if config.memory.on_host is None and self.optimizer_on_host:
            reasons["memory.on_host"] = "masters and moments do not fit on the device with the gradients"
        if given_bytes is None:
            reasons["kv_cache_memory_bytes"] = limit
        if self.max_tokens < default:
            reasons["optimizer.tokens_per_micro_batch"] = f"{default} tokens would not fit, or leave no reserve"
        choices = Choices(self.offload, self.optimizer_on_host, cache_bytes, self.max_tokens, reasons)
        device, phases = config.model.device, step.phases(cache_bytes)
        return MemoryPlan(config.num_ranks, device, budget, choices, phases, _notes(step, given_bytes))


def _attempts(side: Side, shape: RunShape) -> list[Attempt]:
    """Return what may be chosen, the cheapest first: nothing; residents that leave, one more at a time; smaller
    micro-batches; the optimizer on the host."""
    config, memory = side.config, side.config.memory
    base = dataclasses.replace(config, memory=_decided(memory, (), False))
    kinds: Any = {"trains": side.trains, "generates": side.generates}
    phases = memory_phases(base, has_reward_models=side.trains and bool(shape.models.rewards), **kinds)
    may_leave = [tag for tag in ORDER if tag in phases.residents]
    if ACTOR in phases.cycle.generate.tags:
        may_leave.remove(ACTOR)
    if config.num_ranks != 1 and memory.keeps_on_host("shards"):
        may_leave = []
    can_step_on_host = config.num_ranks == 1 and config.model.device == "cuda"
    hosts = [memory.keeps_on_host("optimizer") and config.num_ranks == 1]
    if memory.on_host is None and can_step_on_host:
        hosts.append(True)
    most = tokens_per_micro_batch(config, shape.max_length)
    sizes = [most]
    if config.optimizer.tokens_per_micro_batch is None and side.trains:
        fewest = max(shape.max_length, FEWEST_TOKENS)
        while sizes[-1] > fewest:
            sizes.append(max(sizes[-1] // 2, fewest))
    attempts = []
    for on_host in hosts:
        own = [tag for tag in may_leave if tag != OPTIMIZER or not on_host]
        sets = [own[:count] for count in range(len(own) + 1)] if memory.offload is None else [memory.offload]
        for size in sizes:
            attempts += [Attempt(side, tuple(leaving), on_host, size) for leaving in sets]
    return attempts


def _cache_bytes(step: StepMemory, budget: Budget) -> tuple[int, str]:
    """Return the size of the cache, and what limits it: all that is wanted, or what is left in the phases in which it
    is in memory, and at least room for one sequence."""
    cache = step.cache()
    wanted = f"room for all {cache.num_sequences} sequences (max_num_seqs) at full length; more would stay empty"
    if budget.device_bytes is None:
        return cache.wanted_bytes, wanted
    there = [phase for phase in step.phases(0) if _has_cache(step, phase.phase)]
    spare = int(SPARE_SHARE * budget.device_bytes)
    fullest = max(there, key=lambda phase: phase.device_bytes)
    left = budget.device_bytes - spare - fullest.device_bytes
    if left >= cache.wanted_bytes:
        return cache.wanted_bytes, wanted
    if left <= cache.smallest_bytes:
        return cache.smallest_bytes, f"room for one sequence at full length: others leave no more in {fullest.name}"
    all_ = f"all {cache.num_sequences} sequences at full length would take {size_text(cache.wanted_bytes)}"
    return left, f"what others leave in {fullest.name}, but {SPARE_SHARE:.0%} of the device; {all_}"


def _notes(step: StepMemory, given: int | None) -> tuple[str, ...]:
    """Return what a plan says besides its numbers. given: the size of the cache, if it is not auto."""
    notes, smallest = NOTES[step.config.model.device], step.cache().smallest_bytes
    if not step.generates:
        return notes
    if given is None or given >= smallest:
        return notes
    length, completion = step.passes.shape.engine_length, step.config.rollout.max_completion_length
    if given * length < smallest * completion:  # whatever the prompts are
        raise ConfigError(
            f"kv_cache_memory_bytes={given} cannot hold one completion of {completion:,} tokens: a sequence of "
            f"{length:,} takes {smallest:,} B; raise it, leave it out, or lower max_completion_length"
        )
    return (
        *notes,
        f"kv_cache_memory_bytes={given} cannot hold one sequence of {length:,} tokens, which takes {smallest:,} B: "
        f"the run is refused if it may have such sequences",
    )


def _has_cache(step: StepMemory, name: str) -> bool:
    phase = getattr(step.plan.cycle, name)
    return KV_CACHE in phase.tags or KV_CACHE not in step.movable


def _is_cramped(plan: MemoryPlan, passes: Passes, attempt: Attempt) -> bool:
    """Whether the cache got much less than it wants, and more could leave for it."""
    if (
        not attempt.side.generates
        or attempt.config.rollout.kv_cache_memory_bytes is not None
        or attempt.config.memory.offload is not None
    ):
        return False
    wanted = attempt.step(passes).cache().wanted_bytes
    return (plan.choices.kv_cache_memory_bytes or 0) < CACHE_SHARE * wanted


def _decided(memory: MemoryConfig, offload: Sequence[str], optimizer_on_host: bool) -> MemoryConfig:
    memory = memory.with_optimizer(optimizer_on_host)
    return dataclasses.replace(memory, offload=cast(list[Movable], list(offload)))


def with_choices(config: TrainerConfig, choices: Choices) -> TrainerConfig:
    """Return the configuration with the values that were chosen; keys that were given stay."""
    config = dataclasses.replace(config, memory=_decided(config.memory, choices.offload, choices.optimizer_on_host))
    if "optimizer.tokens_per_micro_batch" in choices.reasons:
        smaller = dataclasses.replace(config.optimizer, tokens_per_micro_batch=choices.tokens_per_micro_batch)
        config = dataclasses.replace(config, optimizer=smaller)
    if "kv_cache_memory_bytes" in choices.reasons:
        rollout = dataclasses.replace(config.rollout, kv_cache_memory_bytes=choices.kv_cache_memory_bytes)
        config = dataclasses.replace(config, rollout=rollout)
    return config
