"""Several ranks as threads: what `gather` of AdvantageInputs does, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def on_ranks(num_ranks: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """work(rank, gather) on every rank at once; its results in order."""
    board: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=20)

    def run(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            board[rank] = value
            barrier.wait()
            found = list(board)
            barrier.wait()
            return found

        return work(rank, gather)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
