"""Pre-flight: ranks that differ in software, device or speed are named; healthy ones pass."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rl.controller import LocalBackend, RankContext
from hybrid_rl.errors import HybridRLError
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.groups import RankGroup
from hybrid_rl.workers.preflight import (
    ALL_REDUCE,
    COPY,
    PRODUCT,
    RankProbe,
    check,
    preflight,
    probe_rank,
    slow_ranks,
)

VERSIONS = {"python": "3.11.7", "torch": "2.13.0"}
SECONDS = {PRODUCT: 0.01, COPY: 0.02, ALL_REDUCE: 0.001}


def ranks(count: int, **changes: Any) -> list[RankProbe]:
    """Healthy ranks on hosts of two."""
    probe = RankProbe(0, "", "cpu", "", 1, VERSIONS, SECONDS)
    return [replace(probe, rank=rank, host=f"node{rank // 2}", **changes) for rank in range(count)]


def with_odd(probes: list[RankProbe], which: int, **changes: Any) -> list[RankProbe]:
    return [replace(probe, **changes) if probe.rank == which else probe for probe in probes]


def problems(probes: list[RankProbe]) -> list[str]:
    return check(probes)[0]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_healthy_ranks_have_no_problems(count: int) -> None:
    assert check(ranks(count)) == ([], [])


@pytest.mark.parametrize(
    ("count", "odd", "told"),
    [
        (
            4,
            {3: {"python": "3.12.1", "torch": "2.13.0", "ray": "2.60.0"}},
            [
                "python is 3.12.1 on rank 3 (node1) and 3.11.7 on the others; install the same versions everywhere",
                "ray is 2.60.0 on rank 3 (node1) and missing on the others; install the same versions everywhere",
            ],
        ),
        (
            2,
            {0: {"torch": "2.12.0"}},
            ["torch is 2.13.0 on rank 1 (node0) and 2.12.0 on the others"],
        ),  # the first counts
        (
            5,
            {1: {"torch": "2.11.0"}, 4: {"torch": "2.12.0"}},
            ["torch is 2.11.0 on rank 1 (node0)", "torch is 2.12.0 on rank 4 (node2)"],
        ),
    ],
)
def test_another_version_names_rank_host_and_both_values(
    count: int, odd: dict[int, dict[str, str]], told: list[str]
) -> None:
    probes = ranks(count)
    for rank, versions in odd.items():
        probes = with_odd(probes, rank, versions={**VERSIONS, **versions})
    for problem, words in zip(problems(probes), told, strict=True):
        assert problem.startswith(words)


def test_kinds_of_devices_do_not_mix() -> None:
    probes = with_odd(ranks(3, device="cuda H100", device_id="a"), 1, device="cpu", device_id="")
    assert "rank 1 (node0) runs on cpu, the others on cuda; give all ranks the same kind" in problems(probes)


def test_a_gpu_belongs_to_one_rank() -> None:
    """The same id on two hosts is not a clash."""
    probes = ranks(4, device="cuda H100", device_id="GPU-7")
    assert [problem[:43] for problem in problems(probes)] == [
        "ranks 0, 1 (node0) share the GPU GPU-7; eac",
        "ranks 2, 3 (node1) share the GPU GPU-7; eac",
    ]
    assert problems([replace(probe, device_id=f"GPU-{probe.rank % 2}") for probe in probes]) == []


def test_a_slow_rank_is_measured_against_the_median_of_the_others() -> None:
    """Others: 1, 2, 100 ms; median 2. The one of 100 ms is compared with 1, 2, 11 and found slow as well."""
    times = [0.001, 0.011, 0.1, 0.002]
    gpus = ranks(4, device="cuda H100")
    probes = [replace(probe, seconds={COPY: seconds}) for probe, seconds in zip(gpus, times, strict=True)]
    slow, slower = slow_ranks(probes)
    assert slow == (
        "rank 1 (node0) takes 0.011 s for a copy, 6 times the 0.002 s of the others (up to 5 times is usual); all "
        "ranks wait for it: look for other programs on that device, and for throttling"
    )
    assert slower.startswith("rank 2 (node1) takes 0.1 s for a copy, 50 times the 0.002 s")


@pytest.mark.parametrize(("device", "limit"), [("cpu", 20), ("cuda H100", 5)])
def test_cpus_may_differ_more_than_gpus(device: str, limit: int) -> None:
    probes = ranks(2, device=device)
    assert slow_ranks(with_odd(probes, 1, seconds={**SECONDS, PRODUCT: 0.01 * (limit - 0.01)})) == []
    slow = with_odd(probes, 1, seconds={**SECONDS, PRODUCT: 0.01 * (limit + 0.01)})
    assert len(slow_ranks(slow)) == 1
    # A slow GPU ends a run before it begins, a slow CPU is warned of.
    assert check(slow) == (([], slow_ranks(slow)) if device == "cpu" else (slow_ranks(slow), []))


def test_a_time_that_is_no_number_is_a_problem() -> None:
    assert len(slow_ranks(with_odd(ranks(3), 1, seconds={**SECONDS, COPY: float("nan")}))) >= 1


def test_a_rank_knows_its_versions_and_times() -> None:
    probe = probe_rank(RankContext())
    assert probe.versions["python"] == platform.python_version()
    assert probe.versions["torch"] == str(torch.__version__)
    assert (probe.rank, probe.num_threads) == (0, torch.get_num_threads())
    assert set(probe.seconds) == {PRODUCT, COPY}
    assert all(0 < seconds < 60 for seconds in probe.seconds.values())


def test_a_group_passes_or_tells_everything_at_once() -> None:
    group = RankGroup(LocalBackend("policy", WorkerBase))
    preflight(group.probe_rank)
    group.close()
    odd = with_odd(ranks(2), 1, versions={"python": "3.12.1", "torch": "2.12.0"})
    with pytest.raises(HybridRLError, match=r"do not fit together:\n - python is 3.12.1 .*\n - torch is 2.12.0"):
        preflight(lambda: odd)


class Measured:
    """A group whose second rank takes so many times as long, measurement by measurement."""

    def __init__(self, device: str, *slower: float) -> None:
        self._device, self.left = device, list(slower)

    def probe_rank(self) -> list[RankProbe]:
        probes = ranks(2, device=self._device)
        return with_odd(probes, 1, seconds={**SECONDS, COPY: 0.02 * self.left.pop(0)})


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_rl.workers.preflight.time.sleep", lambda _: None)


@pytest.mark.usefixtures("no_pauses")
def test_what_was_slow_once_is_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    """39 times as long, then 7 times on a GPU, which is let off at 2 times: nothing is reported."""
    for device, slower in (("cpu", (39.0, 1.0, 99.0)), ("cuda H100", (39.0, 7.0, 2.0, 99.0))):
        group = Measured(device, *slower)
        preflight(group.probe_rank)
        assert group.left == [99.0]
    assert caplog.text == ""


@pytest.mark.usefixtures("no_pauses")
def test_what_stays_slow_is_an_error_on_gpus_and_a_warning_on_cpus(caplog: pytest.LogCaptureFixture) -> None:
    """The best of four measurements is told of."""
    slower = (39.0, 25.0, 30.0, 99.0)
    with pytest.raises(HybridRLError, match="takes 0.5 s for a copy, 25 times the 0.02 s"):
        preflight(Measured("cuda H100", *slower).probe_rank)
    assert caplog.text == ""
    preflight(Measured("cpu", *slower).probe_rank)
    assert "rank 1 (node0) takes 0.5 s for a copy, 25 times the 0.02 s" in caplog.text
