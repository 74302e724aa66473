from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hybrid_rl.controller import RankContext, RankMesh, dispatch
from hybrid_rl.controller.exchange import Arguments
from hybrid_rl.controller.server import Call, RankServer, Seat
from hybrid_rl.controller.travel import Driver, pack

TORCH = Path(dist.__file__).parents[1]
ENTERED, LEFT = threading.Event(), threading.Event()


class Waiting:
    def __init__(self, context: RankContext) -> None: ...

    @dispatch()
    def wait(self, file: str) -> None:
        """Wait in a function that stands in this file."""
        names = {"entered": ENTERED, "left": LEFT}
        exec(compile("def wait():\n    entered.set()\n    left.wait(60)\n", file, "exec"), names)
        names["wait"]()  # type: ignore[operator]

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("file", "is_in_collective"),
    [
        (TORCH / "distributed" / "distributed_c10d.py", True),
        (Path("/srv/torch/distributed/train.py"), False),  # a user's own folder
        (TORCH / "distributed_here" / "train.py", False),
    ],
)
def test_health_says_whether_a_call_is_in_a_collective(file: Path, is_in_collective: bool, tmp_path: Path) -> None:
    """By the folder of torch.distributed, not by words in a path."""
    server = RankServer(lambda value: value, lambda value: value, lambda value: False)
    seat = Seat("policy", 0, RankMesh(dp_shard=1), ("", 0), tmp_path / "log", timedelta(seconds=9), Driver.here())
    assert server.start(1, seat, *pack(Waiting, lambda value: False, "make_worker")).failure is None
    ENTERED.clear()
    LEFT.clear()
    arguments = pack(Arguments((str(file),)), lambda value: False, "arguments")
    thread = threading.Thread(target=server.call, args=(Call(2, "wait"), *arguments))
    thread.start()
    assert ENTERED.wait(60)
    health = server.health()
    LEFT.set()
    thread.join()
    assert health.is_in_collective is is_in_collective and str(file) in health.stack
    idle = server.health()
    assert (idle.is_in_collective, idle.stack) == (False, "")
