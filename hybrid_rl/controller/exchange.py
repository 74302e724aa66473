"""Arguments of one call cut into parts for the ranks, and the answers of the ranks joined to one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid_rl.batch import AnyBatch, Batch, BatchRef
from hybrid_rl.controller.dispatch import Dispatch
from hybrid_rl.controller.mesh import RankMesh

T = TypeVar("T")
Get = Callable[[Any], Batch]
Splitter = Callable[[AnyBatch, int], Sequence[Tensor]]
"""(batch, number of parts) -> the samples of each part, int64 [n_i], whole groups, every sample once. The same batch
must always be split the same way."""


Arguments = tuple[Any, ...]  # of one call


class DealtList(list[T]):
    """A list that says by itself which part of a call gets which of its items."""

    def dealt(self, num_parts: int) -> list[list[T]]:
        """Return the items of each part: every item in exactly one. Here they are dealt out one by one."""
        return [list(self[part::num_parts]) for part in range(num_parts)]


@dataclass(frozen=True)
class Parts:
    """A call cut into parts: the arguments of each, and for a batch that was cut the samples of each, int64 [n_i]."""

    arguments: Sequence[Arguments]
    batch: AnyBatch | None = None
    samples: Sequence[Tensor] = ()


def cut(method: str, record: Dispatch, arguments: Arguments, num_parts: int, splitter: Splitter) -> Parts:
    """Cut a call into parts; `method` names it in errors.

    Raises TypeError if there is no batch to split by groups, ValueError if the splitter does not give every sample
    once.
    """
    if record.split == "replicate" or num_parts == 1 and record.split == "items":
        return Parts([arguments] * num_parts)
    if record.split == "items":
        columns = [_dealt(v, num_parts) if isinstance(v, list) else [v] * num_parts for v in arguments]
        return Parts([tuple(column[part] for column in columns) for part in range(num_parts)])
    batch = next((value for value in arguments if isinstance(value, Batch | BatchRef)), None)
    if batch is None:
        raise TypeError(f"{method}() is split by groups but was called without a batch")
    samples = splitter(batch, num_parts) if num_parts > 1 else [torch.arange(batch.num_samples)]
    if len(samples) != num_parts or not torch.equal(
        torch.cat(list(samples)).sort().values, torch.arange(batch.num_samples)
    ):
        raise ValueError(
            f"the splitter gave {[len(part) for part in samples]} samples for {num_parts} parts of "
            f"{batch.num_samples}: every sample must be in exactly one part"
        )
    chosen = [tuple(v.select(index) if v is batch else v for v in arguments) for index in samples]
    return Parts(chosen, batch, samples)


def _dealt(items: list[Any], num_parts: int) -> list[list[Any]]:
    """Return the items of each part."""
    return (items if isinstance(items, DealtList) else DealtList(items)).dealt(num_parts)


def collect(
    method: str, record: Dispatch, parts: Parts, mesh: RankMesh, answers: Mapping[int, Any], get: Get | None = None
) -> Any:
    """Join the answers of the ranks (by rank; only those of `answering` ranks are needed) to one.

    get: how references among them are loaded here.
    """
    results = [answers[rank] for rank in answering(record, mesh)]
    if record.collect != "concat":
        return results if record.collect == "all" else results[0]
    tuples = [answer if isinstance(answer, tuple) else (answer,) for answer in results]
    if not all(isinstance(answer[0], Batch | BatchRef) for answer in tuples if answer) or not all(tuples):
        kinds = sorted({type(answer).__name__ for answer in results})
        raise TypeError(
            f"{method}() is collected by concat: it must return a batch, or a tuple that begins with one, not {kinds}"
        )
    batches = [answer[0] for answer in tuples]
    batch = batches[0] if len(batches) == 1 else type(batches[0]).concat(batches)
    if parts.batch is not None:
        order = torch.cat(list(parts.samples)).argsort()
        if not torch.equal(order, torch.arange(len(order))):
            batch = batch.select(order)
        if isinstance(batch, BatchRef) and isinstance(parts.batch, BatchRef):
            batch = parts.batch.merge(batch)
    if isinstance(batch, BatchRef):
        batch = batch.with_get(get)
    if not isinstance(results[0], tuple):
        return batch
    return (batch, *(list(column) for column in zip(*(answer[1:] for answer in tuples), strict=True)))


def answering(record: Dispatch, mesh: RankMesh) -> Collection[int]:
    """Return the ranks whose answers are collected; the others need not send theirs."""
    if record.collect == "all":
        return range(mesh.num_ranks)
    if record.collect == "leader" or record.split == "replicate":
        return (0,)
    return mesh.data_leaders
