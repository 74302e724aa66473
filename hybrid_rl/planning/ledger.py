"""The memory of a rank over a training step, line by line: the plan that a run is checked and measured against.

What takes memory is named by the tags of memory/cycle.py, or by one of the names below, which belong to a phase or to
the process and never sleep. Bytes are those of one rank; with uneven shards, of the rank that holds most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hybrid_rl.memory.comparison import Expected
from hybrid_rl.memory.cycle import RESIDENTS

GRADIENTS = "gradients"  # of the model that learns, until its optimizer step
ACTIVATIONS = "activations"  # all else that a micro-batch has at its peak: what backward needs, logits, temporaries
GATHERED = "gathered"  # full weights of a block, or of the model, that shards are gathered into
HANDOFF = "handoff"  # buckets and tables of weights on their way to the engine
ENGINE_WORK = "engine_work"  # activations and workspace of a pass of the engine
ENGINE_GRAPHS = "engine_graphs"  # its CUDA graphs and buffers, which stay while it sleeps
PROCESS = "process"  # the CUDA context, its libraries, and buffers of NCCL
ARENA = "arena"  # host memory where residents sleep
VERSIONS = "versions"  # files in shared memory by which ranks that only generate get the weights


@dataclass(frozen=True)
class Share:
    """Bytes of one resident, and how they were computed. formula: such as "494,032,768 parameters x 4 B"."""

    resident: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class PhaseMemory:
    """What is in memory at the fullest moment of a phase. phase: a name of memory/cycle.py; moment: which peak of it,
    such as "backward" or "optimizer step"; empty if the phase has only one."""

    phase: str
    device: tuple[Share, ...]
    host: tuple[Share, ...] = ()
    moment: str = ""

    @property
    def name(self) -> str:
        """The phase, and the moment if it has several."""
        return f"{self.phase}: {self.moment}" if self.moment else self.phase

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of a rank."""
        return sum(share.num_bytes for share in self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of one rank in host memory."""
        return sum(share.num_bytes for share in self.host)

    def bytes_of(self, resident: str) -> int:
        """Return the bytes of a resident on the device; 0 if it has none there."""
        return sum(share.num_bytes for share in self.device if share.resident == resident)

    def host_bytes_of(self, resident: str) -> int:
        """Return the bytes of a resident in host memory; 0 if it has none there."""
        return sum(share.num_bytes for share in self.host if share.resident == resident)


@dataclass(frozen=True)
class Budget:
    """The memory that there is. device_bytes: of the device of one rank; host_bytes: of a host, shared by its
    ranks_per_host ranks; None = unknown. device, host: where the numbers are from, as text. gpus_per_host: the most
    ranks that a host would have if there were more of them."""

    device_bytes: int | None
    host_bytes: int | None
    ranks_per_host: int
    device: str = ""
    host: str = ""
    gpus_per_host: int = 8

    def for_ranks(self, num_ranks: int) -> Budget:
        """Return the same memory with so many ranks, on hosts as full as they can be."""
        return replace(self, ranks_per_host=min(num_ranks, max(self.gpus_per_host, self.ranks_per_host)))


@dataclass(frozen=True)
class Choices:
    """Values in place of `auto`. kv_cache_memory_bytes: None = the engine decides, as without a plan. reasons: why, by
    the key's path, for those that were chosen and not given."""

    offload: tuple[str, ...]
    optimizer_on_host: bool
    kv_cache_memory_bytes: int | None
    tokens_per_micro_batch: int
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of every rank of a run; with rollout_ranks, of those that train. phases: in the order of a step; one
    that has several peaks comes once for each. device: "cuda" or "cpu". notes: what was assumed. generating: the memory
    of the ranks that only generate, if there are any."""

    num_ranks: int
    device: str
    budget: Budget
    choices: Choices
    phases: tuple[PhaseMemory, ...]
    notes: tuple[str, ...] = ()
    generating: MemoryPlan | None = None

    @property
    def peak(self) -> PhaseMemory:
        """The phase that takes most of the device; of equal ones the last, which for engines is the rollout."""
        return max(reversed(self.phases), key=lambda phase: phase.device_bytes)

    @property
    def host_peak(self) -> PhaseMemory:
        """The phase that takes most of the host."""
        return max(self.phases, key=lambda phase: phase.host_bytes)

    @property
    def free_bytes(self) -> int | None:
        """Bytes of the device that the fullest phase leaves; negative if it does not fit, None without a budget."""
        return None if self.budget.device_bytes is None else self.budget.device_bytes - self.peak.device_bytes

    @property
    def ranks_of_host(self) -> int:
        """The ranks of the fullest host."""
        return min(self.budget.ranks_per_host, self.num_ranks)

    @property
    def bytes_of_host(self) -> int:
        """Bytes of all ranks of a host, at its fullest."""
        return self.host_peak.host_bytes * self.ranks_of_host

    @property
    def fits(self) -> bool:
        """Whether every phase of all ranks fits on device and host; what is unknown is taken to suffice."""
        return self.has_room and (self.generating is None or self.generating.has_room)

    @property
    def has_room(self) -> bool:
        """Whether every phase of these ranks alone fits."""
        device, host = self.budget.device_bytes, self.budget.host_bytes
        return (device is None or self.peak.device_bytes <= device) and (host is None or self.bytes_of_host <= host)

    @property
    def residents(self) -> tuple[str, ...]:
        """Names of everything that takes memory in some phase, in the order in which they first come."""
        shares = (share for phase in self.phases for share in (*phase.device, *phase.host))
        return tuple(dict.fromkeys(share.resident for share in shares))

    def of(self, phase: str, moment: str | None = None) -> PhaseMemory:
        """Return a phase by its name, at this moment, or at its fullest. Raises KeyError if the run does not have
        it."""
        memories = [memory for memory in self.phases if memory.phase == phase and moment in (None, memory.moment)]
        if not memories:
            raise KeyError(f"the plan has no phase {phase!r}; it has {[memory.name for memory in self.phases]}")
        return max(memories, key=lambda memory: memory.device_bytes)

    def resident_bytes(self, resident: str) -> int:
        """Return the bytes that a resident takes when it is awake, or of a transient at its largest; on the device, or
        in host memory if it is never on the device."""
        on_device = max(phase.bytes_of(resident) for phase in self.phases)
        return on_device or max(phase.host_bytes_of(resident) for phase in self.phases)

    def expected(self) -> Expected:
        """Return what ranks compare their memory with: residents by phase, and the fullest moment of each phase."""
        residents: dict[str, dict[str, int]] = {}
        peaks: dict[str, int] = {}
        for memory in self.phases:
            tags = [share.resident for share in memory.device if share.resident in RESIDENTS]
            residents.setdefault(memory.phase, {}).update({tag: memory.bytes_of(tag) for tag in tags})
            peaks[memory.phase] = max(peaks.get(memory.phase, 0), memory.device_bytes)
        return Expected(residents, peaks)
