"""A run's memory against its plan: after every phase, what residents and the device took of what was predicted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

WARN_ABOVE = 0.1
PEAK = "the whole device"

logger = logging.getLogger("hybrid_rl")


@dataclass(frozen=True)
class Expected:
    """Bytes of one rank on its device, as planned. residents: by phase, then by tag, of those that are awake in it;
    peaks: of everything at the fullest moment, by phase. Phases are those of cycle.py; those that a run does not have
    may be missing."""

    residents: Mapping[str, Mapping[str, int]]
    peaks: Mapping[str, int]


@dataclass(frozen=True)
class Deviation:
    """The bytes of something in a phase. what: the tag of a resident, or PEAK."""

    phase: str
    what: str
    predicted: int
    measured: int

    @property
    def share(self) -> float:
        """How far the two are apart, as a share of the larger: from 0, equal, to 1, one of them is nothing."""
        return abs(self.measured - self.predicted) / max(self.measured, self.predicted, 1)

    @property
    def text(self) -> str:
        """The deviation as a sentence, with its cause if it can be told."""
        more = "more" if self.measured > self.predicted else "less"
        return (
            f"{self.what} takes {self.measured:,} bytes in the phase {self.phase!r}, {self.share:.0%} {more} than the "
            f"{self.predicted:,} that the plan of memory says"
        )


def resident_deviations(expected: Expected, phases: Sequence[str], measured: Mapping[str, int]) -> list[Deviation]:
    """Compare residents while these phases share a lease. measured: bytes by tag, 0 for those that sleep. A resident
    that the plan has asleep in all of them is predicted to take nothing."""
    planned = [expected.residents[phase] for phase in phases if phase in expected.residents]
    if not planned:
        return []
    name = " and ".join(phases)
    return [
        Deviation(name, tag, max(phase.get(tag, 0) for phase in planned), num_bytes)
        for tag, num_bytes in measured.items()
    ]


def peak_deviation(expected: Expected, phases: Sequence[str], measured: int) -> Deviation | None:
    """Compare the fullest moment of phases that share a lease; None if the plan has none of them."""
    planned = [expected.peaks[phase] for phase in phases if phase in expected.peaks]
    return Deviation(" and ".join(phases), PEAK, max(planned), measured) if planned else None


class DevicePeak:
    """The most memory that a process had on a CUDA device since `reset`.

    Made of what the device says is taken now, which includes what no allocator of PyTorch knows (the context,
    libraries, regions, an engine's memory, unless it sleeps), without the free blocks that PyTorch's allocator keeps,
    and with the most that it had handed out beyond what it has now. Other processes on the device count too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Begin a phase."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def num_bytes(self) -> int:
        """Return the bytes of the fullest moment."""
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        kept = torch.cuda.memory_reserved(self._device) - allocated
        return total - free - kept + torch.cuda.max_memory_allocated(self._device) - allocated


class Comparison:
    """Compares phase by phase, and keeps the largest deviations until they are asked for.

    resident_bytes: bytes by tag now, 0 for those that sleep. peak: of the device; None on a CPU, whose memory has no
    counter of its own. latest: the last comparison by phase and by what was compared. last_peak: bytes of the fullest
    moment of the last phase, None if they were not measured.
    """

    last_peak: int | None = None

    def __init__(
        self,
        expected: Expected,
        resident_bytes: Callable[[], Mapping[str, int]],
        peak: DevicePeak | None = None,
    ) -> None:
        self._expected, self._resident_bytes, self._peak = expected, resident_bytes, peak
        self.latest: dict[tuple[str, str], Deviation] = {}
        self._largest: dict[bool, Deviation] = {}  # by whether it is of the peak
        self._told: set[tuple[str, str]] = set()

    @contextmanager
    def phase(self, *phases: str) -> Iterator[None]:
        """Compare the block, in which exactly what these phases need is awake. A block that fails is not compared."""
        self.last_peak = None
        if self._peak is not None:
            self._peak.reset()
        yield
        deviations = resident_deviations(self._expected, phases, self._resident_bytes())
        if self._peak is not None:
            self.last_peak = self._peak.num_bytes()
            peak = peak_deviation(self._expected, phases, self.last_peak)
            deviations += [] if peak is None else [peak]
        for deviation in deviations:
            self._see(deviation)

    def _see(self, deviation: Deviation) -> None:
        is_peak = deviation.what == PEAK
        largest = self._largest.get(is_peak)
        if largest is None or deviation.share > largest.share:
            self._largest[is_peak] = deviation
        key = (deviation.phase, deviation.what)
        self.latest[key] = deviation
        # A peak is planned for the longest samples; most are shorter.
        is_wrong = deviation.measured > deviation.predicted if is_peak else True
        if is_wrong and deviation.share > WARN_ABOVE and key not in self._told:
            self._told.add(key)
            logger.warning("memory: %s (said once)", deviation.text)

    def drain(self) -> dict[str, float]:
        """Return the largest deviations since the last call, as shares: `memory/ledger_deviation` over residents and
        phases, `memory/peak_deviation` over the peaks of phases; what was not compared is missing."""
        names = {False: "memory/ledger_deviation", True: "memory/peak_deviation"}
        shares = {names[is_peak]: deviation.share for is_peak, deviation in self._largest.items()}
        self._largest.clear()
        return shares
