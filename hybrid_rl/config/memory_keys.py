"""The configuration keys of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hybrid_rl.algos.options import key
from hybrid_rl.config.sizes import memory_bytes
from hybrid_rl.errors import ConfigError

Movable = Literal["actor", "optimizer", "reference", "teacher", "critic", "critic_optimizer", "reward_models"]
OnHost = Literal["optimizer", "shards", "activations"]


@dataclass(frozen=True)
class MemoryConfig:
    """The memory of a rank over the phases of a step: what leaves it, and how much of it there is."""

    offload: list[Movable] | None = key(
        None,
        "residents that go to host memory while a phase does not need them; [] = none; None = those without which the "
        "run would not fit (on CPUs none)",
    )
    on_host: list[OnHost] | None = key(
        None,
        "parts of training that live in host memory: optimizer = masters and Adam moments of the policy, updated "
        "there (one rank); shards = FSDP2's shards, gradients and optimizers (several ranks); activations = those that "
        "wait for the backward pass (on CPUs only a copy); a list names all of them; None = the optimizer, if the run "
        "would not fit otherwise",
    )
    device_memory: str | None = key(
        None, "memory of a rank's device that the run may take, such as 80GB or 64GiB; None = all of a GPU's"
    )
    host_memory: str | None = key(
        None, "memory of a host that residents of its ranks may be moved to, such as 500GB; None = what is available"
    )

    def keeps_on_host(self, part: OnHost) -> bool:
        """Whether a part of training lives in host memory."""
        return part in (self.on_host or ())

    def with_optimizer(self, is_on_host: bool) -> MemoryConfig:
        """Return these settings with the optimizer in host memory, or not there."""
        others: list[OnHost] = [part for part in self.on_host or () if part != "optimizer"]
        return replace(self, on_host=["optimizer", *others] if is_on_host else others)

    def check(self, num_ranks: int, device: str) -> None:
        """Raise ConfigError for settings that do not go together, or with these ranks. What a run holds at all is
        checked with its reward functions."""
        offload, on_host = self.offload or [], self.on_host or []
        for name in ("device_memory", "host_memory"):
            if (text := getattr(self, name)) is not None:
                memory_bytes(text, f"memory.{name}")
        for name, named in (("offload", offload), ("on_host", on_host)):
            if len(set(named)) < len(named):
                raise ConfigError(f"memory.{name}={named} names something twice; name each once")
        several = num_ranks > 1
        for part in ("optimizer", "shards"):
            if part not in on_host:
                continue
            if device == "cpu":
                raise ConfigError(
                    f"memory.on_host={on_host}: {part} does nothing on a CPU, where everything is in host memory "
                    "anyway; leave it out"
                )
            if several != (part == "shards"):
                advice = "take shards for several ranks" if several else "one rank shards nothing: take optimizer"
                raise ConfigError(f"memory.on_host={on_host} cannot name {part} with num_ranks={num_ranks}; {advice}")
        if offload and "shards" in on_host:
            raise ConfigError(
                f"memory.offload={offload} would move nothing: with memory.on_host={on_host} shards and optimizers are "
                "in host memory all the time; leave one of them out"
            )
        if "optimizer" in offload and "optimizer" in on_host:
            raise ConfigError(
                f"memory.offload names optimizer, but with memory.on_host={on_host} it never leaves host memory; leave "
                "one of them out"
            )
