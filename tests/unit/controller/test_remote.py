from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.controller import Counted, InProcessRanks, NoWork, NoWorkGroup, train_step
from hybrid_rl.batch import Batch, BatchRef, Jagged
from hybrid_rl.controller import RankContext, RankMesh, dispatch
from hybrid_rl.controller.exchange import Splitter
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.controller.remote import RemoteBackend
from hybrid_rl.errors import ConfigError, WorkerError
from tests.support.groups import OpenGroup


class Worker:
    def __init__(self, context: RankContext) -> None:
        self.rank = context.rank
        self.leased: list[list[str]] = []

    @contextmanager
    def lease(self, tags: frozenset[str]) -> Iterator[None]:
        self.leased.append(sorted(tags))
        yield

    def close(self) -> None: ...

    @dispatch(split="items", collect="concat")
    def roll(self, ids: list[int], unit: str) -> tuple[Batch, int, str]:
        return rows(ids), len(ids), unit

    @dispatch(split="groups", collect="concat")
    def double(self, batch: Batch) -> Batch:
        return batch.with_columns(returns=batch["old_logprobs"].with_values(batch["old_logprobs"].values * 2))

    @dispatch(split="groups", collect="all")
    def seen(self, batch: Batch) -> list[int]:
        return batch["trajectory"].tolist()

    @dispatch(collect="all")
    def everyone(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @dispatch()
    def leader(self) -> int:
        return self.rank

    @dispatch(collect="all", needs=frozenset({"actor", "kv_cache"}))
    def leasing(self) -> list[list[str]]:
        return self.leased

    @dispatch()
    def lock(self) -> Any:
        return threading.Lock()


def rows(ids: list[int]) -> Batch:
    """Sample i: group i // 3, a jagged row of i % 4 values i."""
    return Batch(
        {
            "group": torch.tensor(ids, dtype=torch.int64) // 3,
            "trajectory": torch.tensor(ids, dtype=torch.int64),
            "completion_ids": Jagged.from_rows([[i] * (i % 4) for i in ids], torch.int64),
            "old_logprobs": Jagged.from_rows([[float(i)] * (i % 4) for i in ids], torch.float32),
            "row": [{"i": i} for i in ids],
        }
    )


def whole_groups(batch: Batch | BatchRef, num_parts: int) -> list[torch.Tensor]:
    found = batch.group_rows()[::-1]
    return [torch.tensor([i for g in found[p::num_parts] for i in g], dtype=torch.int64) for p in range(num_parts)]


def make(
    shape: dict[str, int], splitter: Splitter = whole_groups, make_worker: Any = Worker
) -> tuple[OpenGroup, InProcessRanks]:
    ranks = InProcessRanks()
    backend = RemoteBackend(
        "policy",
        make_worker,
        mesh=RankMesh(**shape),
        splitter=splitter,
        ranks=ranks,
        options=RayOptions(),
        log_folder=Path(),
    )
    return OpenGroup(Worker, backend), ranks


sizes = {axis: st.integers(1, 2) for axis in ("dp_replicate", "cp", "tp", "ep")} | {"dp_shard": st.integers(1, 4)}
shapes = st.fixed_dictionaries({}, optional=sizes)


@settings(deadline=None, max_examples=40)
@given(shapes, st.permutations(range(12)), st.integers(0, 12))
def test_batches_come_back_whole_and_in_order(shape: dict[str, int], ids: list[int], num: int) -> None:
    """Over any mesh, with any order of samples and fewer of them than ranks."""
    group, _ = make(shape)
    ids = ids[: max(1, num)]
    num_parts = RankMesh(**shape).num_data_ranks
    batch, lengths, units = group.roll(ids, "s")
    assert batch["trajectory"].tolist() == [i for part in range(num_parts) for i in ids[part::num_parts]]
    assert units == ["s"] * num_parts and sum(lengths) == len(ids)
    doubled = group.double(batch)
    expected = rows(batch["trajectory"].tolist())
    loaded = doubled.load()
    assert doubled["trajectory"].tolist() == batch["trajectory"].tolist()
    assert torch.equal(loaded["returns"].values, expected["old_logprobs"].values * 2)
    assert torch.equal(loaded["returns"].offsets, expected["old_logprobs"].offsets)
    assert loaded["row"] == expected["row"]


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(1, 12))
def test_every_sample_is_once_among_leaders_and_replicas_are_equal(shape: dict[str, int], num: int) -> None:
    group, _ = make(shape)
    mesh = RankMesh(**shape)
    seen = group.seen(rows(list(range(num))))
    leaders = [seen[rank] for rank in mesh.data_leaders]
    assert sorted(i for part in leaders for i in part) == list(range(num))
    assert all(part == leaders[mesh.data_rank(rank)] for rank, part in enumerate(seen))
    for i in range(num):
        assert sum(any(j // 3 == i // 3 for j in part) for part in leaders) == 1, "a group is cut"


def test_a_plain_batch_comes_back_as_a_reference() -> None:
    group, _ = make({"dp_shard": 3})
    doubled = group.double(rows([5, 4, 0, 1]))
    assert isinstance(doubled, BatchRef) and doubled["trajectory"].tolist() == [5, 4, 0, 1]
    assert doubled.columns == {"group", "trajectory", "completion_ids", "old_logprobs", "row", "returns"}


def test_answers() -> None:
    group, ranks = make({"dp_shard": 2, "tp": 2})
    assert group.everyone("x") == [(rank, "x") for rank in range(4)] and group.leader() == 0
    assert not ranks.blocks
    large = "x" * 200_000
    assert [value == large for _, value in group.everyone(large)] == [True] * 4
    assert [len(block) > 200_000 for block in ranks.blocks.values()] == [True], "what all get is stored once"


def test_methods_lease_what_they_need() -> None:
    group, _ = make({"dp_shard": 2})
    group.leader()
    assert group.leasing() == [[["actor", "kv_cache"]]] * 2


def test_what_cannot_travel_is_named() -> None:
    group, _ = make({"dp_shard": 2})
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"the arguments of everyone\(\)\[0\]\['guard'\]: a lock cannot be sent"):
        group.everyone({"guard": lock, "other": 1})
    with pytest.raises(ConfigError, match=r"the answer of lock\(\): a lock cannot be sent to another process"):
        group.lock()
    with pytest.raises(ConfigError, match=r"make_worker \(function <lambda>\) -> lock: a lock cannot be sent"):
        make({"dp_shard": 2}, make_worker=lambda context: (lock, Worker(context))[1])


def test_the_driver_moves_the_same_bytes_for_any_length() -> None:
    """No token passes through it: a step of completions of 4096 tokens sends what one of 4 tokens does."""
    moved = []
    for length in (4, 4096):
        ranks = Counted(InProcessRanks())
        backend = RemoteBackend(
            "policy",
            partial(NoWork, length=length),
            mesh=RankMesh(dp_shard=4),
            splitter=whole_groups,
            ranks=ranks,
            options=RayOptions(),
            log_folder=Path(),
        )
        ranks.sent_bytes = ranks.received_bytes = 0
        train_step(NoWorkGroup(backend))
        moved.append((ranks.sent_bytes, ranks.received_bytes))
    assert moved[0] == moved[1] and min(moved[0]) > 0


@pytest.mark.parametrize("parts", [[[0, 1, 2], []], [[0, 1, 2], [2, 3]], [[0, 1, 2, 3]]])
def test_a_splitter_that_loses_samples(parts: list[list[int]]) -> None:
    group, _ = make({"dp_shard": 2}, lambda batch, num: [torch.tensor(p, dtype=torch.int64) for p in parts])
    with pytest.raises(ValueError, match="the splitter gave .* samples for 2 parts of 4: every sample must"):
        group.seen(rows([0, 1, 2, 3]))


def test_groups_need_a_batch() -> None:
    group, _ = make({"dp_shard": 2})
    with pytest.raises(TypeError, match=r"seen\(\) is split by groups but was called without a batch"):
        group.seen([1, 2])


def test_after_the_end() -> None:
    group, ranks = make({"dp_shard": 2})
    ranks.is_dead = True
    with pytest.raises(WorkerError, match="the policy workers have ended after: "):
        group.leader()
    group.close()
    with pytest.raises(RuntimeError, match="the policy workers are closed; make a new Trainer"):
        group.leader()
