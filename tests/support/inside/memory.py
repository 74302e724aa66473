"""Where memory is, and what became of it: of regions, arenas, leases and the residents of a worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid_rl.memory.arena import HostArena
    from hybrid_rl.memory.leases import Leases


def mapping_of(region: Any) -> Any:
    """The bytes of a region."""
    return region._mapping


def release_with(region: Any, release: Callable[[], None]) -> None:
    """Have the region give its pages back in this way."""
    region._release_pages = release


def slots_of(arena: HostArena) -> Mapping[str, Any]:
    """The host memory of each resident."""
    return arena._slots


def copies_of(arena: HostArena) -> Any:
    """What copies between host and device."""
    return arena._copies


def slot_tensors(arena: HostArena | None) -> list[Tensor]:
    """The bytes of all slots; none without an arena."""
    return [] if arena is None else [slot.bytes for slot in arena._slots.values()]


def leased_tags(leases: Leases) -> Collection[str] | None:
    """What is leased now; None between leases."""
    return leases._leased


def residents_of(leases: Leases) -> dict[str, Any]:
    """The residents by tag, which may be replaced."""
    residents: dict[str, Any] = leases._residents
    return residents


def give_back_with(leases: Leases, give_back: Callable[[], None]) -> None:
    """Have memory that PyTorch keeps given back in this way."""
    leases._give_back = give_back


def is_released(region: Any) -> bool:
    """Whether the region's pages are the system's."""
    return bool(region._released)


def offloaded(worker: Any) -> dict[str, Any]:
    """The residents of a worker that wait in its arena, by tag."""
    found = {}
    for tag in worker._memory._offload:
        cells = [cell.cell_contents for cell in worker.leases._residents[tag].wake.__closure__]
        found[tag] = next(cell for cell in cells if type(cell).__name__ == "OffloadedTensors")
    return found


def storage_sizes(memory: Any) -> set[int]:
    """Bytes of the storages of a resident that moves, as they are now."""
    return {storage.nbytes() for storage, _ in (memory._asleep or memory._memory())._sized}


def gradient_holders(optimizer: Any) -> Sequence[Any]:
    """What an optimizer accumulates gradients in."""
    return (*optimizer._parameters.values(), *optimizer._targets.values())


def mapped_by(side: Any) -> list[Any]:
    """Memory of other ranks that the sources of an engine with weights of its own have mapped."""
    sources = getattr(side, "_sources", {}).values()
    return [parts for source in sources for parts in getattr(source, "_mapped", {}).values()]


def opened_by(source: Any) -> Sequence[Any]:
    """What a source has opened of the files of a version."""
    return list(source._opened.values())


def watch_sources(look: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Call `look` in the block with every source on disk of which parts are read."""
    from hybrid_rl.resharding.handoff.disk import DiskSource

    parts = DiskSource._parts

    def seen(source: DiskSource, number: int) -> Any:
        look(source)
        return parts(source, number)

    return patch.object(DiskSource, "_parts", seen)


def group_bytes(root: Path, own: Path) -> list[int]:
    """Bytes that control groups have left for this process. root: of the hierarchy. own: the file that says where in it
    the process is."""
    from hybrid_rl.memory import probe

    return list(probe._group_bytes(root, own))
