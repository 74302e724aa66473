"""The typed groups against the workers that they call, and a reference that scores beside the policy."""

from __future__ import annotations

import inspect
import threading
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_rl.batch import AnyBatch, Batch, BatchRef, store
from hybrid_rl.controller.dispatch import dispatch_of
from hybrid_rl.workers.apart import RolloutGroup, RolloutWorker
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.groups import HybridGroup, PolicyGroup, RankGroup, ReferenceGroup
from hybrid_rl.workers.hybrid import HybridWorker
from hybrid_rl.workers.reference import ReferenceWorker
from tests.support.groups import dispatched_methods

PAIRS = [
    pytest.param(group, worker, name, id=f"{group.__name__}.{name}")
    for group, worker in (
        (HybridGroup, HybridWorker),
        (ReferenceGroup, ReferenceWorker),
        (RolloutGroup, RolloutWorker),
    )
    for name in dispatched_methods(worker)
    if group is not RolloutGroup or name not in ("go_ahead", "reconfigure", "take_weights", "update_weights")  # joined
]
# Of these the group's method does more than to pass on a call.
RENAMED = {"flush_samples": "lost_samples", "held_prompts": "held_prompts"}
JOINED = {"records"}  # lists of the ranks, as one list


@pytest.mark.parametrize(("group", "worker", "name"), PAIRS)
def test_every_call_has_a_method_of_the_same_form(group: type, worker: type, name: str) -> None:
    """Its parameters with a batch or a reference to one, and its answer as the declaration collects it."""
    remote = getattr(worker, name)
    local = getattr(group, RENAMED.get(name, name))
    theirs, ours = (list(inspect.signature(method).parameters) for method in (remote, local))
    assert [parameter for parameter in ours if parameter != "must"] == theirs
    if name in RENAMED:
        return
    types, answers = typing.get_type_hints(remote), typing.get_type_hints(local)
    assert all(answers[key] == (AnyBatch if types[key] is Batch else types[key]) for key in theirs if key != "self")
    answer = types["return"]
    if dispatch_of(remote).collect == "all":
        assert answers["return"] in (list[answer], answer if name in JOINED else None)
    elif dispatch_of(remote).collect == "concat" and typing.get_origin(answer) is tuple:
        assert answers["return"] == tuple[AnyBatch, list[typing.get_args(answer)[1]]]
    else:
        assert answers["return"] == (AnyBatch if answer is Batch else answer)


class Ranks:
    """A backend that answers `score` with one more column, after it has met the other one."""

    num_ranks, label, has_ended = 1, "", False

    def __init__(self, role: str, column: str, blocks: list[Batch], meet: Callable[[], Any] = lambda: None) -> None:
        self.role, self._column, self._blocks, self._meet = role, column, blocks, meet
        self.scored: list[frozenset[str]] = []

    def call(self, method: Callable[..., object], *args: Any) -> Any:
        batch = args[0]
        self.scored.append(frozenset(batch.columns if isinstance(batch, BatchRef) else batch))
        self._meet()
        values = torch.arange(batch.num_samples, dtype=torch.float64)
        if isinstance(batch, Batch):
            return batch.with_columns(**{self._column: values})
        return batch.merge(self.stored(Batch({self._column: values})))

    def stored(self, batch: Batch) -> BatchRef:
        def put(block: Batch) -> int:
            self._blocks.append(block)
            return len(self._blocks) - 1

        return store(batch, put).with_get(self._blocks.__getitem__)

    def close(self) -> None: ...


def test_the_reference_scores_while_the_policy_does() -> None:
    """Neither could end without the other being under way."""
    blocks: list[Batch] = []
    barrier = threading.Barrier(2, timeout=20)
    reference = Ranks("reference", "rewards", blocks, barrier.wait)
    policy = Ranks("policy", "baseline_rewards", blocks, barrier.wait)
    batch = policy.stored(Batch({"group": torch.tensor([0, 0, 1]), "completion": ["a", "b", "c"]}))
    scored = PolicyGroup(policy, ReferenceGroup(reference)).score(batch, 1)
    assert scored.columns == {"group", "completion", "rewards", "baseline_rewards"}
    loaded = scored.load()
    assert loaded["completion"] == ["a", "b", "c"] and loaded["rewards"].tolist() == [0.0, 1.0, 2.0]
    assert policy.scored == reference.scored == [frozenset({"group", "completion"})]


def test_a_batch_of_the_driver_is_scored_by_one_after_the_other() -> None:
    policy, reference = Ranks("policy", "baseline_rewards", []), Ranks("reference", "rewards", [])
    batch = Batch({"group": torch.tensor([0, 0, 1])})
    assert set(PolicyGroup(policy, ReferenceGroup(reference)).score(batch, 1)) == {
        *("group", "baseline_rewards", "rewards")
    }
    assert reference.scored == [frozenset({"group", "baseline_rewards"})]
    assert PolicyGroup(policy, has_scores=False).score(batch, 1) is batch and len(policy.scored) == 1


@pytest.mark.parametrize("also_the_reference", [False, True])
def test_an_error_of_the_policy_comes_when_the_reference_has_ended(also_the_reference: bool) -> None:
    blocks: list[Batch] = []
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("policy")

    def end() -> None:
        ended.set()
        if also_the_reference:
            raise ValueError("reference")

    policy, reference = Ranks("policy", "rewards", blocks, fail), Ranks("reference", "rewards", blocks, end)
    batch = policy.stored(Batch({"group": torch.tensor([0]), "completion": ["a"]}))
    with pytest.raises(ValueError, match="policy"):
        PolicyGroup(policy, ReferenceGroup(reference)).score(batch, 1)
    assert ended.is_set()


def test_ranks_of_every_role_answer_what_the_base_declares() -> None:
    assert set(dispatched_methods(WorkerBase)) <= {*vars(RankGroup)}


def test_ranks_that_only_generate_do_not_offer_to_train() -> None:
    """So that mypy refuses such calls; nor do ranks that only train offer to generate."""
    for name in ("update", "score", "advantages", "save", "load", "write_weights"):
        assert hasattr(PolicyGroup, name) and not hasattr(RolloutGroup, name)
    for name in ("rollout", "begin", "update_weights", "held_prompts"):
        assert hasattr(RolloutGroup, name) and not hasattr(PolicyGroup, name)
