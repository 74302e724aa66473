"""The harness itself: results by rank, and no test that hangs or hides what went wrong."""

import time
from multiprocessing.forkserver import ensure_running

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError, run_ranks
from tests.support.libraries.python_names import end_at_once

pytestmark = pytest.mark.slow


def misbehave(rank: int, num_ranks: int, how: str) -> list[float]:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if how == "results":
        return [*total.tolist(), float(num_ranks)]
    if rank == 1 and how == "raises":
        raise ValueError("the second rank is unwell")
    if rank == 1 and how == "dies":
        end_at_once(3)
    if how == "hangs":
        time.sleep(600)
    dist.all_reduce(total)  # which no other rank joins
    return total.tolist()


def test_results_come_by_rank() -> None:
    assert run_ranks(misbehave, 2, "results") == [[1.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "ValueError: the second rank is unwell"),
        ("dies", "rank 1:\nit died without a word"),
        ("hangs", r"(?s)\[0, 1\] were not done.*rank 0 was at:.* in misbehave\n.*rank 1 was at:.* in misbehave\n"),
    ],
)
def test_failures_are_told_and_leave_no_process(how: str, message: str) -> None:
    ensure_running()
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RankError, match=message):
        run_ranks(misbehave, 2, how, deadline_seconds=10 if how == "hangs" else 180)
    assert not set(psutil.Process().children(recursive=True)) - before
