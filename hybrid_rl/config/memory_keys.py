"""The configuration keys of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rl.algos.options import key

Movable = Literal["actor", "optimizer", "reference", "teacher", "critic", "critic_optimizer", "reward_models"]


@dataclass(frozen=True)
class MemoryConfig:
    """The memory of a rank over the phases of a step: what leaves it, and how much of it there is."""

    offload: list[Movable] | None = key(
        None,
        "residents that go to host memory while a phase does not need them; [] = none; None = those without which the "
        "run would not fit (on CPUs none)",
    )
    optimizer_on_host: bool | None = key(
        None,
        "keep masters and Adam moments of the policy in host memory and update them there, with one rank on a GPU; "
        "None = if the run would not fit otherwise",
    )
    device_memory: str | None = key(
        None, "memory of a rank's device that the run may take, such as 80GB or 64GiB; None = all of a GPU's"
    )
    host_memory: str | None = key(
        None, "memory of a host that residents of its ranks may be moved to, such as 500GB; None = what is available"
    )
