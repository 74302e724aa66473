"""Costs of the controller: seconds per call and per training step with workers that do nothing, bytes through the
driver by length of completions, and an extrapolation to 64 to 1024 ranks.

Prints a table, and one line of JSON per measurement into benchmarks/results.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.batch import Batch, BatchRef, Jagged  # noqa: E402
from hybrid_rl.controller import RankContext, RankMesh, WorkerGroup, dispatch  # noqa: E402
from hybrid_rl.controller.placement import RayOptions  # noqa: E402
from hybrid_rl.controller.remote import RemoteBackend  # noqa: E402
from hybrid_rl.controller.server import Health, Outcome, RankServer  # noqa: E402
from hybrid_rl.controller.travel import pack, unpack  # noqa: E402
from hybrid_rl.training.balance import split_over_ranks  # noqa: E402

GROUP_SIZE = 8
GROUPS_PER_RANK = 2
HANDLE_BYTES = 28  # an object id of Ray
PARTS = ("split, pack and join", "send", "receive")
SIMULATED_RANKS = (64, 128, 256, 512, 1024)


class NoWork:
    """A worker whose methods have the library's signatures, and do nothing. length: of completions, in tokens."""

    def __init__(self, context: RankContext, length: int = 16) -> None:
        self.length = length

    @contextmanager
    def lease(self, tags: frozenset[str]) -> Iterator[None]:
        yield

    def close(self) -> None: ...

    @dispatch()
    def nothing(self) -> None: ...

    @dispatch(split="items", collect="concat")
    def rollout(self, prompts: list[int]) -> tuple[Batch, float]:
        groups = torch.tensor(prompts, dtype=torch.int64).repeat_interleave(GROUP_SIZE)
        num = len(groups)
        offsets = torch.arange(num + 1) * self.length
        tokens = Jagged(torch.ones(num * self.length, dtype=torch.int64), offsets)
        lengths = torch.full((num,), self.length, dtype=torch.int64)
        batch = Batch(
            {
                "prompt_ids": tokens,
                "completion_ids": tokens,
                "rollout_logprobs": tokens.with_values(tokens.values.float()),
                "group": groups,
                "trajectory": torch.arange(num),
                "prompt_length": lengths,
                "completion_length": lengths,
                "rewards": torch.zeros(num, dtype=torch.float64),
            }
        )
        return batch, 0.0

    @dispatch(split="groups", collect="concat")
    def score(self, batch: Batch) -> Batch:
        return batch.with_columns(old_logprobs=batch["rollout_logprobs"])

    @dispatch(split="groups", collect="concat")
    def advantages(self, batch: Batch) -> Batch:
        return batch.with_columns(advantages=batch["rollout_logprobs"])

    @dispatch(split="groups")
    def update(self, batch: Batch) -> dict[str, float]:
        return {f"metric/{i}": 0.0 for i in range(30)}

    @dispatch()
    def publish(self, version: int) -> dict[str, float]:
        return {}


class NoWorkGroup(WorkerGroup):
    """The calls of `NoWork`."""

    def rollout(self, prompts: list[int]) -> tuple[Batch | BatchRef, list[float]]:
        return self._ranks.call(NoWork.rollout, prompts)

    def score(self, batch: Batch | BatchRef) -> Batch | BatchRef:
        return self._ranks.call(NoWork.score, batch)

    def advantages(self, batch: Batch | BatchRef) -> Batch | BatchRef:
        return self._ranks.call(NoWork.advantages, batch)

    def update(self, batch: Batch | BatchRef) -> dict[str, float]:
        return self._ranks.call(NoWork.update, batch)

    def publish(self, version: int) -> dict[str, float]:
        return self._ranks.call(NoWork.publish, version)

    def nothing(self) -> None:
        self._ranks.call(NoWork.nothing)


def train_step(group: NoWorkGroup) -> None:
    """Make the calls of a training step."""
    batch, _ = group.rollout(list(range(GROUPS_PER_RANK * group.num_ranks)))
    batch = group.advantages(group.score(batch))
    group.update(batch)
    group.publish(1)
    group.nothing()


CALLS_PER_STEP = 6


@dataclass(frozen=True)
class Handle:
    """A stand-in for a handle of Ray's object store."""

    id: int


@dataclass
class InProcessRanks:
    """Ranks in this process, one after the other: all of the controller's work, without a transport."""

    is_dead: bool = False
    seconds_on_ranks: float = 0.0
    servers: list[RankServer] = field(default_factory=list)
    blocks: dict[int, Any] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def open(self, role: str, num_ranks: int, options: RayOptions) -> tuple[str, int]:
        return "", 0

    def send(self, method: str, messages: Sequence[tuple[Any, ...]]) -> None:
        start = time.perf_counter()
        if method == "start":
            for _, seat, data, handles in messages:
                context = RankContext(seat.role, seat.rank, seat.mesh, torch.device("cpu"))
                worker = unpack(data, handles)(context)
                self.servers.append(RankServer(self.put, self.get, self.is_handle, _worker=worker))
            self.outcomes = {rank: Outcome() for rank in range(len(messages))}
        elif method == "call":
            self.outcomes = {
                rank: server.call(*(self.get(part) if self.is_handle(part) else part for part in message))
                for rank, (server, message) in enumerate(zip(self.servers, messages, strict=True))
            }
        self.seconds_on_ranks += time.perf_counter() - start

    def wait(self, ranks: Collection[int], timeout: float) -> Mapping[int, Outcome]:
        done, self.outcomes = self.outcomes, {}
        return done

    def health(self, ranks: Collection[int]) -> Mapping[int, Health]:
        return {}

    def interrupt(self, ranks: Collection[int], call_id: int) -> None: ...

    def describe(self, rank: int) -> str:
        return "in this process"

    def put(self, value: Any) -> Handle:
        self.blocks[len(self.blocks)] = value
        return Handle(len(self.blocks) - 1)

    def get(self, handle: Handle) -> Any:
        return self.blocks[handle.id]

    def is_handle(self, value: Any) -> bool:
        return isinstance(value, Handle)

    def close(self, call_id: int) -> None: ...

    def kill(self) -> None: ...


class Counted:
    """Ranks whose sent and received bytes and seconds are counted, serialised."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks
        self.sent_bytes = self.received_bytes = 0
        self.send_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def send(self, method: str, messages: Sequence[tuple[Any, ...]]) -> None:
        self.sent_bytes += sum(self._size(message) for message in messages)
        start = time.perf_counter()
        self._ranks.send(method, messages)
        self.send_seconds += time.perf_counter() - start

    def wait(self, ranks: Collection[int], timeout: float) -> Mapping[int, Outcome]:
        outcomes = self._ranks.wait(ranks, timeout)
        self.received_bytes += sum(self._size(outcome) for outcome in outcomes.values())
        return outcomes

    def _size(self, value: Any) -> int:
        data, handles = pack(value, self._ranks.is_handle, "a message")
        return len(data) + HANDLE_BYTES * len(handles)


def splitter(batch: Batch | BatchRef, num_parts: int) -> Sequence[torch.Tensor]:
    """Split as the library does."""
    return split_over_ranks(batch, num_parts, pair_cost=1e-6)


def measure(num_ranks: int, cluster: Any, given: Namespace) -> list[dict[str, Any]]:
    """Measure calls and steps on real ranks, and the bytes of a step for every completion length."""
    from hybrid_rl.controller.ray_backend import RayActors

    lines = []
    for length in given.lengths:
        with tempfile.TemporaryDirectory() as logs:
            backend = RemoteBackend(
                "nobody",
                _Maker(length),
                mesh=RankMesh(dp_shard=num_ranks),
                splitter=splitter,
                ranks=RayActors(cluster),
                options=RayOptions(),
                log_folder=Path(logs),
            )
            group = NoWorkGroup(backend)
            train_step(group)
            line: dict[str, Any] = {"part": "measured", "ranks": num_ranks, "length": length}
            if length == given.lengths[0]:
                line["call_seconds"] = report.spread([_timed(group.nothing) for _ in range(given.calls)])
                line["step_seconds"] = report.spread([_timed(partial(train_step, group)) for _ in range(given.steps)])
                line |= _transport_seconds(group, given.calls)
            counted = Counted(backend._ranks)
            backend._ranks = counted
            train_step(group)
            line |= {"sent_bytes": counted.sent_bytes, "received_bytes": counted.received_bytes}
            backend._ranks = counted._ranks
            group.close()
        lines.append(line)
    return lines


@dataclass(frozen=True)
class _Maker:
    length: int

    def __call__(self, context: RankContext) -> NoWork:
        return NoWork(context, self.length)


def _timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _transport_seconds(group: NoWorkGroup, num_calls: int) -> dict[str, float]:
    """Return the driver's seconds per rank and call to send a small message, and to receive an answer that is ready.

    Answers are given time to arrive, so neither includes work of the ranks, which share the cores with the driver.
    """
    backend: Any = group._backend
    sends, receives = [], []
    for _ in range(num_calls):
        counted = _Paused(backend._ranks)
        backend._ranks = counted
        try:
            group.nothing()
        finally:
            backend._ranks = counted.ranks
        sends.append(counted.send_seconds / group.num_ranks)
        receives.append(counted.receive_seconds / group.num_ranks)
    return {"send_seconds_per_rank": median(sends), "receive_seconds_per_rank": median(receives)}


class _Paused:
    """Ranks that get time to answer before their answers are requested."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks
        self.send_seconds = self.receive_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ranks, name)

    def send(self, method: str, messages: Sequence[tuple[Any, ...]]) -> None:
        self.send_seconds = _timed(lambda: self.ranks.send(method, messages))
        time.sleep(0.05 + 0.01 * len(messages))

    def wait(self, ranks: Collection[int], timeout: float) -> Mapping[int, Outcome]:
        start = time.perf_counter()
        outcomes: Mapping[int, Outcome] = self.ranks.wait(ranks, timeout)
        self.receive_seconds += time.perf_counter() - start
        return outcomes


def simulate(num_ranks: int, send_seconds: float, receive_seconds: float, steps: int) -> dict[str, Any]:
    """Simulate a step of so many ranks: the controller's own code, run for real on ranks in this process, less the time
    on the ranks, which would run in parallel; plus the measured seconds of the transport for each rank and call."""
    ranks = InProcessRanks()
    backend = RemoteBackend(
        "nobody",
        _Maker(16),
        mesh=RankMesh(dp_shard=num_ranks),
        splitter=splitter,
        ranks=ranks,
        options=RayOptions(),
        log_folder=Path(),
    )
    group = NoWorkGroup(backend)
    own = []
    for _ in range(steps):
        ranks.seconds_on_ranks = 0.0
        ranks.blocks.clear()
        own.append(_timed(partial(train_step, group)) - ranks.seconds_on_ranks)
    counted = Counted(ranks)
    backend._ranks = counted
    train_step(group)
    seconds = (median(own), CALLS_PER_STEP * num_ranks * send_seconds, CALLS_PER_STEP * num_ranks * receive_seconds)
    return {
        "part": "simulated",
        "ranks": num_ranks,
        "samples": num_ranks * GROUPS_PER_RANK * GROUP_SIZE,
        "step_seconds": sum(seconds),
        "shares": dict(zip(PARTS, seconds, strict=True)),
        "sent_bytes": counted.sent_bytes,
        "received_bytes": counted.received_bytes,
    }


def show(lines: Sequence[Mapping[str, Any]], step_budget_seconds: float) -> None:
    """Print the tables, and a sentence that names the first bottleneck."""
    console = Console()
    columns = ("ranks", "completion tokens", "call, ms", "step, ms", "sent, bytes", "received, bytes")
    measured = Table(*columns, title="measured")
    columns = ("ranks", "samples", "step, s", *(f"{name}, s" for name in PARTS), "MB per step")
    simulated = Table(*columns, title="simulated")
    for line in lines:
        if line["part"] == "measured":
            keys = ("call_seconds", "step_seconds")
            times = [f"{1e3 * line[key]['median']:.2f}" if key in line else "" for key in keys]
            measured.add_row(
                str(line["ranks"]), str(line["length"]), *times, str(line["sent_bytes"]), str(line["received_bytes"])
            )
        else:
            simulated.add_row(
                str(line["ranks"]),
                str(line["samples"]),
                f"{line['step_seconds']:.2f}",
                *(f"{line['shares'][name]:.2f}" for name in PARTS),
                f"{(line['sent_bytes'] + line['received_bytes']) / 1e6:.1f}",
            )
    console.print(measured, simulated)
    over = [line for line in lines if line["part"] == "simulated" and line["step_seconds"] > step_budget_seconds]
    last = max((line for line in lines if line["part"] == "simulated"), key=lambda line: line["ranks"])
    worst = max(last["shares"], key=last["shares"].get)
    where = f"from {over[0]['ranks']} ranks" if over else f"nowhere up to {last['ranks']} ranks"
    console.print(
        f"The controller takes more than {step_budget_seconds:g} s of a step {where}; the largest part at "
        f"{last['ranks']} ranks is {worst!r} with {last['shares'][worst]:.2f} s."
    )


def main() -> None:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--ranks", type=report.positive, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--lengths", type=report.positive, nargs="+", default=[16, 256, 4096], help="completion tokens")
    parser.add_argument("--calls", type=report.positive, default=100)
    parser.add_argument("--steps", type=report.positive, default=20)
    parser.add_argument("--simulated", type=report.positive, nargs="+", default=list(SIMULATED_RANKS))
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of a step that the controller may take")
    parser.add_argument("--out", type=Path, help="file for the lines; default: by date, in benchmarks/results")
    arguments = parser.parse_args()
    from hybrid_rl.controller.ray_backend import RayCluster

    cluster = RayCluster()
    lines = [line for num_ranks in arguments.ranks for line in measure(num_ranks, cluster, arguments)]
    cluster.close()
    # With the most ranks, because the fixed cost of a call matters least there.
    last = [line for line in lines if "send_seconds_per_rank" in line][-1]
    costs = last["send_seconds_per_rank"], last["receive_seconds_per_rank"]
    lines += [simulate(num_ranks, *costs, steps=max(1, arguments.steps // 10)) for num_ranks in arguments.simulated]
    show(lines, arguments.budget)
    folder = Path(__file__).parent / "results"
    out = arguments.out or folder / f"cpu-{datetime.now(UTC):%Y-%m-%d}-controller.jsonl"
    about = {
        "hardware": report.hardware(1, {"ray": importlib.metadata.version("ray")}),
        "settings": report.settings(arguments, out=None),
    }
    with out.open("w") as file:
        file.writelines(json.dumps(line | about) + "\n" for line in lines)


if __name__ == "__main__":
    main()
