"""Answers to what people who know TRL or transformers look for on a Trainer, and what this one calls otherwise."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from hybrid_rl.config.load import leaf_names
from hybrid_rl.process.hooks import extra
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.changed import ANOTHER, SAMPLED

P = ParamSpec("P")
R = TypeVar("R")

# What may be set on a Trainer between two steps, and what that does. All else is built into models, engines, memory or
# the order of the data.
LIVE: Mapping[str, str] = {
    "learning_rate": "the new peak; the schedule goes on from where it is",
    "critic_learning_rate": "the same for the critic",
    "weight_decay": "from the next update",
    "max_grad_norm": "from the next update; None = never clip",
    "beta": "weight of the KL penalty, above 0 and only in a run that began with one; an adaptive one restarts from it",
    "epsilon": "lower clipping bound, of a policy loss that has one",
    "epsilon_high": "upper clipping bound, of a policy loss that has one",
    "entropy_coef": "weight of the entropy bonus; an adaptive one restarts from it",
    "temperature": "of the rollouts, and of training on them; generate() uses it too",
    "num_generations": "completions per prompt",
    "max_completion_length": "up to the one that the run began with, for which engine and memory were planned",
    "max_refills": "rollouts that may replace groups without a signal",
    "reward_funcs": "functions or judges; they are checked like those of the start",
    "reward_weights": "one weight per function; with another number of functions set both by trainer.set(...)",
    "max_reward_failure_share": "share of samples that may have no reward",
    "eval_steps": "evaluate every n steps",
    "eval_temperature": "of evaluation; 0 = greedy, and the next four are forgotten",
    "eval_top_p": "of sampled evaluation",
    "eval_top_k": "of sampled evaluation",
    "eval_min_p": "of sampled evaluation",
    "num_generations_eval": "completions per prompt of sampled evaluation",
    "success_reward": "what counts as a success",
    "save_steps": "save every n steps; None = never",
    "log_completions": "completions on the console after each step",
    "callbacks": "instances of Callback",
    "max_steps": "the length of the run; a linear or cosine schedule stretches with it",
}
# What Trainer is made from and works with, besides the keys of its configuration: none of it can be replaced.
ARGUMENTS = frozenset({"model", "reward_funcs", "train_dataset", "eval_dataset", "config", "tokenizer", "callbacks"})
PARTS = ("policy", "collector", "module", "run_folder")


def attribute_advice(name: str, known: Iterable[str]) -> str:
    """Return what to use in place of an attribute that a Trainer lacks, "" if nothing is known. known: those it has."""
    elsewhere = extra("foreign_table")("trainer")["attributes"]
    if name in elsewhere:
        return str(elsewhere[name])
    if name in LIVE:
        where = ", it exists with eval_temperature above 0" if name in SAMPLED else ""
        return f"this run has no such setting{where} (trainer.config shows all)"
    near = difflib.get_close_matches(
        name, [attribute for attribute in known if not attribute.startswith("_")], n=1, cutoff=0.8
    )
    if near:
        return f"did you mean trainer.{near[0]}?"
    if name in leaf_names():
        return "it is a key of the configuration: see trainer.config"
    habit = extra("habit_of")(name)
    return f"here it is called {habit.here}" if habit is not None and habit.here else ""


def refusal(name: str) -> str:
    """Return why an attribute of a Trainer cannot be set, and what to do instead."""
    reason = f"trainer.{name} would do nothing"
    if name == "dataset_weights":
        return f"{reason}: set trainer.train_dataset.weights, which holds from the next draw on"
    if name in PARTS:
        return f"trainer.{name} is what the Trainer works with, and cannot be replaced. {ANOTHER}"
    if name in ARGUMENTS or name in leaf_names():
        return f"{reason}: it is fixed when a Trainer is made. {ANOTHER}"
    near = difflib.get_close_matches(name, LIVE, n=1)
    habit = extra("habit_of")(name)
    advice = habit.advice if habit else f"did you mean trainer.{near[0]}?" if near else ""
    return f"{reason}: a Trainer has no such attribute" + (f"; {advice}" if advice else "")


def explained(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method answer an argument that it doesn't have with the name that it has for it (TypeError)."""
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        for name, value in keywords.items():
            if name not in names and (name not in extra("foreign_table")("trainer")["arguments"] or value is not None):
                raise TypeError(f"{method.__name__}() has no argument {name}{_argument_advice(name, names)}")
        theirs = {name: value for name, value in keywords.items() if name in names}
        return method(*arguments, **theirs)  # type: ignore[arg-type]

    return call


def _argument_advice(name: str, names: list[str]) -> str:
    habit = extra("habit_of")(name)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    if name in (arguments := extra("foreign_table")("trainer")["arguments"]):
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
    mapped = ", ".join(f"{theirs} is {ours}" for theirs, ours in extra("foreign_table")("trainer")["hooks"].items())
    return (
        f"that is a callback of transformers; {advice} instead (from hybrid_rl import Callback): {mapped}, and "
        "control.should_training_stop = True is trainer.stop(). See docs/from_trl.md"
    )
