"""The lines of a plan, added up by hand."""

import pytest

from hybrid_rl.planning.ledger import Budget, Choices, MemoryPlan, PhaseMemory, Share

PHASES = (
    PhaseMemory("publish", (Share("actor", 5, ""),), (Share("arena", 4, ""),)),
    PhaseMemory("update", (Share("actor", 5, ""), Share("gradients", 1, "")), (Share("arena", 4, ""),), "backward"),
    PhaseMemory("update", (Share("actor", 5, ""), Share("gradients", 3, "")), (Share("arena", 4, ""),), "step"),
)


def plan(device_bytes: int | None, host_bytes: int | None) -> MemoryPlan:
    return MemoryPlan(3, "cpu", Budget(device_bytes, host_bytes, 2), Choices((), False, None, 1), PHASES)


def test_plan_finds_peaks_and_residents():
    found = plan(8, 8)
    assert found.peak.name == "update: step" and found.peak.device_bytes == 8 and found.free_bytes == 0
    assert found.of("update").bytes_of("gradients") == 3 and found.of("update", "backward").device_bytes == 6
    assert found.residents == ("actor", "arena", "gradients")
    assert found.resident_bytes("gradients") == 3 and found.resident_bytes("arena") == 4
    with pytest.raises(KeyError, match="no phase 'save'"):
        found.of("save")


def test_plan_fits_on_device_and_host():
    assert plan(8, 8).fits and plan(None, None).fits
    assert not plan(7, None).fits and not plan(None, 7).fits  # 2 ranks of 4 B on a host
