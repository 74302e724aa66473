"""A worker group on the local backend: what reaches the worker, what comes back, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.controller import LocalBackend, RankContext, dispatch
from tests.support.groups import OpenGroup


class Worker:
    def __init__(self) -> None:
        self.log: list[Any] = []
        self.close_error: Exception | None = None

    @contextmanager
    def lease(self, tags: frozenset[str]) -> Iterator[None]:
        if "missing" in tags:
            raise LookupError("no such resident")
        self.log.append(sorted(tags))
        yield
        self.log.append("returned")

    def close(self) -> None:
        self.log.append("closed")
        if self.close_error is not None:
            raise self.close_error

    @dispatch(needs=frozenset({"actor", "kv_cache"}))
    def leased(self, *args: int) -> tuple[int, ...]:
        self.log.append("ran")
        return args

    @dispatch()
    def free(self) -> str:
        return "answer"

    @dispatch(needs=frozenset())
    def empty(self) -> None: ...

    @dispatch(collect="all")
    def everyone(self) -> str:
        return "answer"

    @dispatch(needs=frozenset({"missing"}))
    def unleasable(self) -> None: ...

    @dispatch(needs=frozenset({"actor"}))
    def failing(self, error: BaseException) -> None:
        raise error

    @dispatch(split="items", collect="concat")
    def joined(self, tasks: list[int]) -> tuple[Batch, int]:
        return Batch({"group": torch.tensor(tasks)}), len(tasks)

    @dispatch(split="groups", collect="concat")
    def same(self, batch: Batch) -> Batch:
        return batch

    @dispatch(split="groups", collect="concat")
    def wrong(self, batch: Batch) -> int:
        return 1

    def undeclared(self) -> None: ...


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def group(worker: Worker) -> OpenGroup:
    return OpenGroup(Worker, LocalBackend("policy", lambda _: worker))


def test_arguments_and_answer_pass_inside_the_lease(group: OpenGroup, worker: Worker) -> None:
    assert group.leased(1, 2) == (1, 2)
    assert worker.log == [["actor", "kv_cache"], "ran", "returned"]


def test_memory_is_left_alone_only_without_needs(group: OpenGroup, worker: Worker) -> None:
    group.free()
    assert worker.log == []
    group.empty()
    assert worker.log == [[], "returned"]


def test_one_rank_collects(group: OpenGroup) -> None:
    assert group.num_ranks == 1
    assert group.free() == "answer" and group.everyone() == ["answer"]


def test_answers_have_the_form_that_many_ranks_give(group: OpenGroup) -> None:
    batch, extras = group.joined([3, 1])
    assert batch["group"].tolist() == [3, 1] and extras == [2]
    assert group.same(batch) is batch, "nothing is copied"
    with pytest.raises(TypeError, match=r"wrong\(\) is collected by concat: it must return a batch.*\['int'\]"):
        group.wrong(batch)


def test_the_worker_learns_that_it_is_alone() -> None:
    seen: list[RankContext] = []
    worker = Worker()
    backend = LocalBackend("critic", lambda context: (seen.append(context), worker)[1])
    (context,) = seen
    assert (context.role, context.rank, context.num_ranks) == ("critic", 0, 1)
    value = object()
    assert context.gather(value) == [value] and context.get(value) is value
    backend.close()


def test_an_exception_comes_as_it_is_with_a_note(group: OpenGroup) -> None:
    """The note says what the driver was doing."""
    error = ValueError("bad batch")
    group.label = "training step 3"
    with pytest.raises(ValueError) as caught:
        group.failing(error)
    assert caught.value is error and str(error) == "bad batch"
    assert error.__notes__ == ["in policy.failing() on rank 0 of 1, training step 3"]
    assert any(entry.name == "failing" for entry in caught.traceback)
    assert group.free() == "answer", "the group works on"


def test_a_lease_that_fails_is_noted_as_well(group: OpenGroup) -> None:
    with pytest.raises(LookupError) as caught:
        group.unleasable()
    assert caught.value.__notes__ == ["in policy.unleasable() on rank 0 of 1"]


def test_close_is_done_once_even_if_it_fails(group: OpenGroup, worker: Worker) -> None:
    worker.close_error = OSError("device lost")
    with pytest.raises(OSError):
        group.close()
    group.close()
    assert worker.log == ["closed"]
    with pytest.raises(RuntimeError, match="the policy workers are closed; make a new Trainer"):
        group.free()
