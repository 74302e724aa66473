"""Deviations from a plan of memory: computed by hand, collected over the phases of a step, told once."""

from __future__ import annotations

import logging

import pytest
import torch

from hybrid_rl.memory.comparison import Comparison, DevicePeak, Expected, peak_deviation, resident_deviations

EXPECTED = Expected(
    residents={"publish": {"actor": 1000, "engine_weights": 500}, "generate": {"engine_weights": 500, "kv_cache": 800}},
    peaks={"publish": 2000, "generate": 1500},
)


def test_the_share_is_of_the_larger_of_the_two() -> None:
    found = resident_deviations(EXPECTED, ("publish",), {"actor": 1250, "engine_weights": 400, "kv_cache": 0})
    assert [(one.what, one.share) for one in found] == [("actor", 0.2), ("engine_weights", 0.2), ("kv_cache", 0.0)]
    assert found[0].text == (
        "actor takes 1,250 bytes in the phase 'publish', 20% more than the 1,000 that the plan of memory says"
    )
    assert "20% less than the 500" in found[1].text


def test_a_resident_that_should_sleep_is_all_too_much() -> None:
    [found] = resident_deviations(EXPECTED, ("generate",), {"actor": 1000})
    assert (found.predicted, found.share) == (0, 1.0)


def test_phases_that_share_a_lease_need_what_any_of_them_needs() -> None:
    measured = {"actor": 1000, "engine_weights": 500, "kv_cache": 800}
    assert all(one.share == 0 for one in resident_deviations(EXPECTED, ("publish", "generate"), measured))
    found = peak_deviation(EXPECTED, ("publish", "generate"), 2500)
    assert found is not None and (found.phase, found.predicted, found.share) == ("publish and generate", 2000, 0.2)


def test_a_phase_that_is_not_planned_is_not_compared() -> None:
    assert resident_deviations(EXPECTED, ("save",), {"actor": 7}) == []
    assert peak_deviation(EXPECTED, ("save",), 7) is None


class Peaks(DevicePeak):
    """A device that tells these peaks, one per phase."""

    def __init__(self, *peaks: int) -> None:
        self._peaks, self._at = peaks, -1

    def reset(self) -> None:
        self._at += 1

    def num_bytes(self) -> int:
        return self._peaks[self._at]


def test_a_step_is_told_by_its_largest_deviations_and_the_next_begins_afresh() -> None:
    awake = {"actor": 1000, "engine_weights": 475}
    comparison = Comparison(EXPECTED, lambda: awake, Peaks(1900, 1500, 2000))
    with comparison.phase("publish"):
        assert comparison.last_peak is None
    assert comparison.last_peak == 1900
    awake = {"engine_weights": 500, "kv_cache": 799}
    with comparison.phase("generate"):
        pass
    assert comparison.drain() == {"memory/ledger_deviation": 0.05, "memory/peak_deviation": 0.05}
    awake = {"actor": 1000, "engine_weights": 500}
    with comparison.phase("publish"):
        pass
    assert comparison.drain() == {"memory/ledger_deviation": 0.0, "memory/peak_deviation": 0.0}
    assert comparison.drain() == {}


def test_without_a_device_only_residents_are_compared_and_a_phase_that_fails_is_not() -> None:
    comparison = Comparison(EXPECTED, lambda: {"actor": 1000})
    with pytest.raises(RuntimeError, match="no memory"), comparison.phase("publish"):
        raise RuntimeError("no memory")
    assert comparison.drain() == {}
    with comparison.phase("publish"):
        pass
    assert comparison.drain() == {"memory/ledger_deviation": 0.0}


def test_a_deviation_above_ten_percent_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A device that takes less than planned had shorter samples: that is no fault of the plan's."""
    comparison = Comparison(EXPECTED, lambda: {"actor": 899, "engine_weights": 450}, Peaks(1000, 2500, 2500))
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        for _ in range(3):
            with comparison.phase("publish"):
                pass
    assert [record.getMessage() for record in caplog.records] == [
        "memory: actor takes 899 bytes in the phase 'publish', 10% less than the 1,000 that the plan of memory says "
        "(said once)",
        "memory: the whole device takes 2,500 bytes in the phase 'publish', 20% more than the 2,000 that the plan of "
        "memory says (said once)",
    ]


def test_the_peak_of_a_device_has_what_the_allocator_does_not_know_and_not_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 in all, 30 free: 70 taken, of them 8 are free blocks of the allocator (40 of 48), which once had 5 more."""
    counters = {
        "mem_get_info": (30, 100),
        "memory_allocated": 40,
        "memory_reserved": 48,
        "max_memory_allocated": 45,
    }
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert DevicePeak(torch.device("cuda", 0)).num_bytes() == 70 - 8 + 5
