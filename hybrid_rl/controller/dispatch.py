"""How a call on a worker group reaches its ranks: declared beside the method, carried out by the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from hybrid_rl.errors import ConfigError

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")

Split = Literal["replicate", "samples", "groups"]
Collect = Literal["concat", "leader", "all"]
Function = TypeVar("Function", bound=Callable[..., Any])

_ATTRIBUTE = "__dispatch__"


@dataclass(frozen=True)
class Dispatch:
    """How one method is called.

    split: what each rank gets of a batch argument: all of it (replicate), some samples, or some whole groups, cut over
    `axes` and replicated over the other axes. collect: what comes back: the ranks' batches joined (concat), the
    leader's answer, or a list of all. needs: tags of the residents that the method leases, None to leave memory as it
    is; the controller only passes them on.
    """

    split: Split = "replicate"
    collect: Collect = "leader"
    axes: tuple[str, ...] = ("dp_replicate", "dp_shard")
    needs: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.split not in get_args(Split) or self.collect not in get_args(Collect):
            raise ConfigError(
                f"split={self.split!r}, collect={self.collect!r}: use {get_args(Split)}, {get_args(Collect)}"
            )
        unknown = sorted(set(self.axes) - set(AXES))
        if unknown:
            raise ConfigError(f"mesh axes {unknown} do not exist; there are {', '.join(AXES)}")


def dispatch(
    *,
    split: Split = "replicate",
    collect: Collect = "leader",
    axes: tuple[str, ...] = ("dp_replicate", "dp_shard"),
    needs: Iterable[str] | None = None,
) -> Callable[[Function], Function]:
    """Declare a worker method callable on a group; see `Dispatch`."""
    record = Dispatch(split, collect, axes, None if needs is None else frozenset(needs))

    def mark(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, record)
        return function

    return mark


def dispatch_of(cls: type, name: str) -> Dispatch:
    """The declaration of a worker method. Raises AttributeError where it is missing."""
    record = getattr(getattr(cls, name, None), _ATTRIBUTE, None)
    if record is None:
        known = sorted(n for n in dir(cls) if hasattr(getattr(cls, n), _ATTRIBUTE))
        raise AttributeError(f"{cls.__name__} has no dispatched method {name!r}; it has {known}")
    return record
