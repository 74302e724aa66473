"""The attributes of a Trainer: what its parts have is shown, settings can be assigned, and all else is refused."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

from hybrid_rl.config.load import leaf_names
from hybrid_rl.errors import ConfigError
from hybrid_rl.run.missing import ARGUMENTS, PARTS, refusal

Owner = TypeVar("Owner", bound=type)

# The parts of a Trainer, by the attributes that hold them.
SLOTS = (
    "_crew",
    "_evaluator",
    "_familiar",
    "_log",
    "_position",
    "_recovery",
    "_rescue",
    "_saver",
    "_settings",
    "_stopper",
    "_tenancy",
    "_view",
    "__weakref__",
)


class Shown:
    """An attribute that shows what a part has, and cannot be set. path: to it, "" for one that is not there."""

    def __init__(self, path: str, name: str = "") -> None:
        self.path, self.name = path, name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name  # the first of several

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        if not self.path:
            raise AttributeError(self.name)
        return attrgetter(self.path)(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        if self.path and self.name not in ARGUMENTS and self.name not in PARTS:
            raise AttributeError(f"trainer.{self.name} can only be read")
        raise ConfigError(refusal(self.name))


class Setting:
    """A setting that can be assigned between training steps: `trainer.temperature = 0.7` is short for `set`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else trainer._settings.value(self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        trainer.set(**{self.name: value})


def shown(path: str) -> Any:
    """Show an attribute of a part, by the path to it. The type is that of the annotation."""
    return Shown(path)


def setting() -> Any:
    """Show a setting, which can be assigned. The type is that of the annotation."""
    return Setting()


def refusing(owner: Owner) -> Owner:
    """Have a class refuse with advice whatever is fixed when one is made: assigned, it would do nothing."""
    for name in sorted({*leaf_names(), *ARGUMENTS, "dataset_weights"} - {*dir(owner)}):
        setattr(owner, name, Shown("", name))
    return owner
