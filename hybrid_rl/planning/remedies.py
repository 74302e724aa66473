"""The refusal of a run that cannot fit: the arithmetic, and the keys with which it would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from hybrid_rl.config import TrainerConfig, load_config
from hybrid_rl.config.algorithm import rollout_ranks
from hybrid_rl.config.engine_keys import CopyHandoff, VLLMArgs
from hybrid_rl.config.schema import RolloutConfig, VLLMRolloutConfig
from hybrid_rl.config.sizes import memory_bytes
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.planning.auto import FEWEST_TOKENS, can_fit, smallest_plan
from hybrid_rl.planning.ledger import Budget, MemoryPlan, Share
from hybrid_rl.planning.passes import Passes, RunShape, tokens_per_micro_batch
from hybrid_rl.planning.size_text import size_text

MOST_NAMED = 3  # remedies in a message
MOST_RANKS = 64
HOST_MEMORY = "memory.host_memory"
ON_HOST = "memory.on_host"
ADAPTER_RANK = 16  # of adapters where all weights do not fit
CANNOT_PLAN = (ConfigError, ModelError)  # keys that do not go together, or a model that cannot be counted with them
FEWER = {"rollout.engine_args.max_num_batched_tokens": (2048, 256), "rollout.max_num_seqs": (32, 8, 1)}


NO_REMEDY = (
    "no keys of memory, micro-batches, the engine, checkpointing or sharding make it fit, not even all together at "
    f"their smallest on up to {MOST_RANKS} ranks, with adapters (lora.r) or without; take a smaller model, shorter "
    "completions, or larger devices"
)


@dataclass(frozen=True)
class Remedy:
    """Keys and the values with which a run would fit. note: what they need elsewhere; may be empty."""

    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def words(self) -> str:
        """The keys as a user writes them, and the note."""
        keys = " and ".join(f"{path}={_written(value)}" for path, value in self.values.items())
        return f"{keys} ({self.note})" if self.note else keys

    @property
    def num_ranks(self) -> int | None:
        """The ranks that it asks for, if it does."""
        return self.values.get("num_ranks")

    def apply(self, config: TrainerConfig) -> TrainerConfig:
        """Return the configuration with them."""
        values = dict(self.values)
        num_ranks = values.pop("num_ranks", None)  # what else several ranks need is not a matter of memory
        config = _on_vllm(config) if values.pop("rollout.engine", None) else config
        config = load_config(config, values)[0] if values else config
        return config if num_ranks is None else dataclasses.replace(config, num_ranks=num_ranks)

    def budget(self, budget: Budget) -> Budget:
        """Return the memory that there is with them: hosts have as many of the ranks as they can, and what is asked
        for of a host."""
        host = self.values.get(HOST_MEMORY)
        if host is not None:
            budget = dataclasses.replace(budget, host_bytes=memory_bytes(host, HOST_MEMORY))
        return budget if self.num_ranks is None else budget.for_ranks(self.num_ranks)


def check_fits(plan: MemoryPlan, passes: Passes, config: TrainerConfig) -> None:
    """Raise ConfigError for a plan that does not fit, with its arithmetic line by line, and what was found to help."""
    if plan.fits:
        return
    short = plan.generating if plan.has_room and plan.generating is not None else plan
    words = [remedy.words for remedy in find_remedies(passes, config, plan.budget)]
    help_ = "it fits with " + ", or with ".join(words) if words else NO_REMEDY
    raise ConfigError(f"this run does not fit into memory: {too_much(short)}\n{help_}")


def too_much(plan: MemoryPlan) -> str:
    """Return what does not fit and why, a line for each resident."""
    budget, peak = plan.budget, plan.peak
    if budget.device_bytes is not None and peak.device_bytes > budget.device_bytes:
        where, there, total, shares = "the device of a rank", budget.device_bytes, peak.device_bytes, peak.device
        source = budget.device
    else:
        peak, there = plan.host_peak, budget.host_bytes or 0
        count = min(budget.ranks_per_host, plan.num_ranks)
        total, shares, source = peak.host_bytes * count, peak.host, budget.host
        where = f"a host ({count} x the following)" if count > 1 else "the host"
    lines = [
        f'phase "{peak.name}" takes {size_text(total)} of {where}, which has {size_text(there)} ({source}), '
        f"{size_text(total - there)} too much:"
    ]
    return "\n".join([*lines, *table(shares)])


def table(shares: Sequence[Share]) -> list[str]:
    """Return shares as lines: name, bytes, arithmetic."""
    name = max((len(share.resident) for share in shares), default=0)
    return [f"  {share.resident:<{name}}  {size_text(share.num_bytes):>9}  {share.formula}" for share in shares]


def find_remedies(passes: Passes, config: TrainerConfig, budget: Budget) -> list[Remedy]:
    """Return remedies that make a run fit, each of which was planned: single keys, or more memory of the host, and
    adapters; if none is enough, the fewest of all together, on these ranks or on more."""

    def fits(remedies: Sequence[Remedy]) -> bool:
        return _fits(sum_of(remedies), passes, config, budget)

    def told(remedy: Remedy) -> Remedy:
        """Return a remedy with what it needs of the host, if shards go there."""
        if "shards" not in remedy.values.get(ON_HOST, ()) or HOST_MEMORY in remedy.values:
            return remedy
        plan = smallest_plan(passes, remedy.apply(config), remedy.budget(budget))
        return dataclasses.replace(remedy, note=f"needs {size_text(plan.bytes_of_host)} per host")

    shape = passes.shape
    singles = [*_singles(config, shape), *_vllm(config, shape)]
    more_ranks = list(_more_ranks(config, budget))
    suggestions: list[Remedy] = []
    for single in singles:
        is_new = ON_HOST in single.values or not any(
            single.values.keys() & other.values.keys() for other in suggestions
        )
        if len(suggestions) < MOST_NAMED and is_new and fits([single]):
            suggestions.append(single)
    # If most ranks are not enough, fewer are not.
    if len(suggestions) < MOST_NAMED and more_ranks and fits([more_ranks[-1]]):
        suggestions.append(next(remedy for remedy in more_ranks if fits([remedy])))
    if budget.host_bytes is not None and len(suggestions) < MOST_NAMED:
        more = (_more_of_the_host(remedy, passes, config, budget) for remedy in (Remedy(), *_to_the_host(config)))
        suggestions += [remedy for remedy in more if remedy is not None][:1]
    adapters = _adapters(config)
    suggestions += [remedy for remedy in adapters if fits([remedy])]
    if suggestions:
        return [told(remedy) for remedy in suggestions]

    def together(given: Remedy) -> Remedy | None:
        """Return the fewest of all keys that suffice with these ranks, or adapters, on vLLM if they do not
        otherwise."""
        for engine in (Remedy(), *_vllm(given.apply(config), shape)):
            keys = list(_singles(sum_of([given, engine]).apply(config), shape))
            if fits([given, engine, *keys]):
                for key in reversed(list(keys)):  # those that cost most time first
                    fewer = [other for other in keys if other is not key]
                    keys = fewer if fits([given, engine, *fewer]) else keys
                return dataclasses.replace(sum_of([engine, *keys, given]), note=given.note)
        return None

    most = together(more_ranks[-1]) if more_ranks else None
    several = next(filter(None, map(together, more_ranks)), None) if most else None
    suggestions = [remedy for remedy in (together(Remedy()), several, *map(together, adapters)) if remedy is not None]
    return [told(remedy) for remedy in suggestions]


def _adapters(config: TrainerConfig) -> list[Remedy]:
    """Return adapters in place of all weights: what is trained is another thing then, so they are no key among
    others."""
    is_fixed = config.rollout.handoff.adopt_weights or getattr(config.kl, "moves_reference", False)
    if config.lora.is_on or config.mode == "rollout" or is_fixed:
        return []
    return [Remedy({"lora.r": ADAPTER_RANK}, "which trains adapters instead of all weights")]


def _to_the_host(config: TrainerConfig) -> list[Remedy]:
    """Return the keys that take from the device what a host may not have room for."""
    if config.model.device != "cuda" or config.num_ranks == 1 or config.memory.keeps_on_host("shards"):
        return []
    return [Remedy({ON_HOST: [*(config.memory.on_host or []), "shards"]})]


def _more_of_the_host(remedy: Remedy, passes: Passes, config: TrainerConfig, budget: Budget) -> Remedy | None:
    """Return the remedy with the memory that a host needs for it; None if the device would still be too small."""
    unlimited = dataclasses.replace(budget, host_bytes=None)
    try:
        plan = smallest_plan(passes, remedy.apply(config), unlimited)
    except CANNOT_PLAN:
        return None
    if not plan.fits:
        return None
    return Remedy({**remedy.values, HOST_MEMORY: f"{-(-plan.bytes_of_host // 10**9)}GB"}, "if a host has so much")


def sum_of(remedies: Sequence[Remedy]) -> Remedy:
    """Return remedies together; of two values of a key the last, of two lists of what is on the host all."""
    values: dict[str, Any] = {}
    for remedy in remedies:
        values |= {path: _with(values.get(path), value) for path, value in remedy.values.items()}
    return Remedy(values)


def _with(before: Any, value: Any) -> Any:
    return [*dict.fromkeys([*before, *value])] if isinstance(before, list) and isinstance(value, list) else value


def _fits(remedy: Remedy, passes: Passes, config: TrainerConfig, budget: Budget) -> bool:
    try:
        return can_fit(passes, remedy.apply(config), remedy.budget(budget))
    except CANNOT_PLAN:
        return False


def _singles(config: TrainerConfig, shape: RunShape) -> Iterator[Remedy]:
    """Yield keys that need less memory, those that cost least time first."""
    several, is_cuda, model = config.num_ranks != 1, config.model.device == "cuda", config.model
    on_host: list[Any] = [part for part in config.memory.on_host or [] if part != "optimizer" or not several]

    def one(path: str, value: Any) -> Remedy:
        return Remedy({path: value})

    if config.rollout.kv_cache_memory_bytes is not None:
        yield one("rollout.kv_cache_memory_bytes", None)
    if config.memory.offload is not None:
        yield one("memory.offload", None)
    if several and config.fsdp.dp_replicate > 1:
        yield one("fsdp.dp_replicate", 1)
    if (
        several
        and config.fsdp.sync_every_micro_batch is not True
        and not (is_cuda and config.fsdp.sync_every_micro_batch is None)
    ):
        yield one("fsdp.sync_every_micro_batch", True)
    if several and not config.fsdp.reshard_after_forward:
        yield one("fsdp.reshard_after_forward", True)
    if not model.gradient_checkpointing:
        yield one("model.gradient_checkpointing", True)
    size = tokens_per_micro_batch(config, shape.max_length)
    if config.optimizer.tokens_per_micro_batch is None:  # less than what was tried for auto
        size = min(size, max(FEWEST_TOKENS, shape.max_length))
    for number in (size // 2, size // 4, shape.max_length):
        if shape.max_length <= number < size:
            yield one("optimizer.tokens_per_micro_batch", number)
    for path, numbers in FEWER.items():
        for number in numbers:
            if attrgetter(path)(config) > number:
                yield one(path, number)
    if is_cuda and "activations" not in on_host:
        yield one(ON_HOST, [*on_host, "activations"])
        if not several and config.memory.on_host is None:  # a list leaves nothing of it to the plan
            yield one(ON_HOST, ["optimizer", "activations"])
    if isinstance(config.rollout, VLLMRolloutConfig):
        for number in _replica_sizes(config, shape):
            if number > config.rollout.tensor_parallel_size:
                yield one("rollout.tensor_parallel_size", number)
    if is_cuda and model.dtype == "float32":
        yield one("model.dtype", "bfloat16")
    if is_cuda and not several and config.memory.on_host is not None and "optimizer" not in on_host:
        yield one(ON_HOST, [*on_host, "optimizer"])
    if is_cuda and several and "shards" not in on_host:
        yield one(ON_HOST, [*on_host, "shards"])


def _replica_sizes(config: TrainerConfig, shape: RunShape) -> list[int]:
    """Return the numbers of ranks over which vLLM can cut the model."""
    heads = getattr(shape.models.policy.config.get_text_config(), "num_attention_heads", None) or 1
    assert config.num_ranks != "auto"
    count = rollout_ranks(config) or config.num_ranks
    return [number for number in (2, 4, 8, 16) if count % number == 0 and heads % number == 0]


def _vllm(config: TrainerConfig, shape: RunShape) -> list[Remedy]:
    """Return another engine where an embedded one has the whole model on every rank."""
    sizes = [] if isinstance(config.rollout, VLLMRolloutConfig) else _replica_sizes(config, shape)
    if config.model.device != "cuda" or not sizes:
        return []
    return [Remedy({"rollout.engine": "vllm", "rollout.tensor_parallel_size": sizes[-1]})]


def _on_vllm(config: TrainerConfig) -> TrainerConfig:
    """Return a run with vLLM in place of its engine, with all that is common to both, and of the engine's own keys
    those that were given."""
    rollout, own = config.rollout, config.rollout.engine_args
    names = {item.name for item in dataclasses.fields(VLLMArgs)} & {item.name for item in dataclasses.fields(own)}
    engine_args = {name: getattr(own, name) for name in names if getattr(own, name) != getattr(type(own)(), name)}
    common: dict[str, Any] = {item.name: getattr(rollout, item.name) for item in dataclasses.fields(RolloutConfig)}
    common |= {
        "engine": "vllm",
        "engine_args": VLLMArgs(**engine_args),
        "handoff": CopyHandoff(**vars(rollout.handoff)),
    }
    return dataclasses.replace(config, rollout=VLLMRolloutConfig(**common))


def _more_ranks(config: TrainerConfig, budget: Budget) -> Iterator[Remedy]:
    """Yield more ranks: twice as many, and so on; above one host only whole hosts."""
    assert config.num_ranks != "auto"
    host = max(budget.gpus_per_host, 1)
    numbers = {first << power for first in (config.num_ranks, host) for power in range(7)}
    divisors = (1 if rollout_ranks(config) else config.rollout.ranks_per_engine, config.fsdp.dp_replicate)
    for number in sorted(numbers):
        is_whole = (number <= host or number % host == 0) and not any(number % divisor for divisor in divisors)
        if config.num_ranks < number <= MOST_RANKS and is_whole:
            others = [part for part in config.memory.on_host or [] if part != "optimizer"]
            kept = {ON_HOST: others} if config.memory.keeps_on_host("optimizer") else {}
            yield Remedy({"num_ranks": number, **kept})


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
