"""How a call on a worker group reaches its ranks: declared beside the method, carried out by the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from hybrid_rl.errors import ConfigError

Split = Literal["replicate", "groups", "items"]
Collect = Literal["concat", "leader", "all"]
Function = TypeVar("Function", bound=Callable[..., Any])

_ATTRIBUTE = "__dispatch__"


@dataclass(frozen=True)
class Dispatch:
    """How one method is called. Ranks that have the same samples get the same part of what is split.

    split: replicate gives every rank all arguments. groups cuts the first batch among the arguments by whole groups;
    items deals out every list among the arguments, one by one. Other arguments go to every rank.
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


def dispatch(
    *,
    split: Split = "replicate",
    collect: Collect = "leader",
    needs: Iterable[str] | None = None,
    objects: bool = False,
) -> Callable[[Function], Function]:
    """Declare a worker method callable on a group; see `Dispatch`."""
    record = Dispatch(split, collect, None if needs is None else frozenset(needs), objects)

    def mark(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, record)
        return function

    return mark


def dispatch_of(method: Callable[..., object]) -> Dispatch:
    """The declaration of a worker method. Raises TypeError if it was not declared with `dispatch`."""
    record: Dispatch | None = getattr(method, _ATTRIBUTE, None)
    if record is None:
        raise TypeError(f"{method.__qualname__} cannot be called on a group: declare it with @dispatch(...)")
    return record


def dispatched_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods of a worker class that can be called on a group, by name."""
    return {name: getattr(cls, name) for name in dir(cls) if hasattr(getattr(cls, name), _ATTRIBUTE)}
