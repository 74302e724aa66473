"""How a call on a worker group reaches its ranks: declared with the method, carried out by the backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

from hybrid_rl.errors import ConfigError

Split = Literal["replicate", "groups", "items"]
Collect = Literal["concat", "leader", "all"]
Function = TypeVar("Function", bound=Callable[..., Any])

_ATTRIBUTE = "__dispatch__"


class Worker(Protocol):
    """What a backend needs of a worker object."""

    def lease(self, tags: frozenset[str]) -> AbstractContextManager[None]:
        """Have these residents in memory inside the block."""

    def close(self) -> None:
        """Release everything; called once."""


@dataclass(frozen=True)
class Dispatch:
    """How one method of a worker is called; as a decorator, it declares the method callable on a group. Ranks that have
    the same samples get the same part of what is split.

    split: replicate gives every rank all arguments. groups cuts the first batch among the arguments by whole groups;
    items deals out every list among the arguments, one by one or as a DealtList says. Other arguments go to every
    rank.
    collect: concat joins what came back from the parts: a batch, or a tuple that begins with one and whose other
    entries become lists over the parts. After groups the samples are in the order of the argument, after items in the
    order of the parts. leader is the answer of rank 0, all a list of every rank's.
    needs: tags of the residents that the method leases, None to leave memory as it is; the controller only passes them
    on. objects: fetch the columns of Python objects too if a batch is on the workers.
    """

    split: Split = "replicate"
    collect: Collect = "leader"
    needs: frozenset[str] | None = None
    objects: bool = False

    def __post_init__(self) -> None:
        if self.split not in get_args(Split) or self.collect not in get_args(Collect):
            raise ConfigError(
                f"split={self.split!r}, collect={self.collect!r}: use {get_args(Split)}, {get_args(Collect)}"
            )

    def __call__(self, function: Function) -> Function:
        setattr(function, _ATTRIBUTE, self)
        return function

    def leased(self, worker: Worker) -> AbstractContextManager[None]:
        """Have the residents that the method needs in memory inside the block."""
        return nullcontext() if self.needs is None else worker.lease(self.needs)


dispatch = Dispatch  # as a decorator: @dispatch(split="groups")


def dispatch_of(method: Callable[..., object]) -> Dispatch:
    """Return the declaration of a worker method. Raises TypeError if it was not declared with `dispatch`."""
    record: Dispatch | None = getattr(method, _ATTRIBUTE, None)
    if record is None:
        raise TypeError(f"{method.__qualname__} cannot be called on a group: declare it with @dispatch(...)")
    return record
