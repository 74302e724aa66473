"""Answers to what people who know TRL or transformers look for on a Trainer, and what this one calls otherwise."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from hybrid_rl.config.habits import habit_of
from hybrid_rl.config.habits.records import read_table
from hybrid_rl.config.load import leaf_names
from hybrid_rl.run.callbacks import Callback

P = ParamSpec("P")
R = TypeVar("R")

# Names there for what has another one here, if it is there: a model on several ranks is nowhere as a whole.
ALIASES = {"args": "config", "processing_class": "tokenizer", "processor": "tokenizer"}
ALIASES |= {"model": "module", "model_wrapped": "module"}


def attribute_advice(name: str, known: Iterable[str]) -> str:
    """Return what to use in place of an attribute that a Trainer lacks, "" if nothing is known. known: those it has."""
    elsewhere = read_table("trainer")["attributes"]
    if name in elsewhere:
        return str(elsewhere[name])
    near = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], n=1, cutoff=0.8)
    if near:
        return f"did you mean trainer.{near[0]}?"
    if name in leaf_names():
        return "it is a key of the configuration: see trainer.config"
    habit = habit_of(name)
    return f"here it is called {habit.here}" if habit is not None and habit.here else ""


def explained(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method answer an argument that it doesn't have with the name that it has for it (TypeError)."""
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        for name, value in keywords.items():
            if name not in names and (name not in read_table("trainer")["arguments"] or value is not None):
                raise TypeError(f"{method.__name__}() has no argument {name}{_argument_advice(name, names)}")
        theirs = {name: value for name, value in keywords.items() if name in names}
        return method(*arguments, **theirs)  # type: ignore[arg-type]

    return call


def _argument_advice(name: str, names: list[str]) -> str:
    habit = habit_of(name)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    if name in (arguments := read_table("trainer")["arguments"]):
        return f": {arguments[name]}"
    if habit is not None and habit.here in names:
        return f": it is called {habit.here}"
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(names[1:])}"


def callback_advice(callback: Any) -> str:
    """Return how to turn something that is no callback into one."""
    advice = "write a subclass of hybrid_rl.Callback"
    if isinstance(callback, type) and issubclass(callback, Callback):
        return f"it is a class; pass an instance: {callback.__name__}()"
    if not any(base.__name__ == "TrainerCallback" for base in type(callback).__mro__):
        return f"{advice} and pass an instance"
    mapped = ", ".join(f"{theirs} is {ours}" for theirs, ours in read_table("trainer")["hooks"].items())
    return (
        f"that is a callback of transformers; {advice} instead (from hybrid_rl import Callback): {mapped}, and "
        "control.should_training_stop = True is trainer.stop(). See docs/from_trl.md"
    )
