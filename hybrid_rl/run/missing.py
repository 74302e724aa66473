"""Answers to what people who know TRL or transformers look for on a Trainer, and what this one calls otherwise."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from hybrid_rl.config.habits import habit_of
from hybrid_rl.config.load import leaf_names
from hybrid_rl.run.callbacks import Callback

P = ParamSpec("P")
R = TypeVar("R")

_METRICS = "metrics are what step(), fit() and evaluate() return, and metrics.jsonl in trainer.run_folder has all"
_CALLBACKS = "assign a list, such as trainer.callbacks = [*trainer.callbacks, mine]"
_OPTIMIZER = "it lives on the ranks; trainer.learning_rate and the like can be set between steps"
_HUB = "nothing is uploaded; upload the folder that trainer.save() returns"
# Attributes and methods of transformers.Trainer and GRPOTrainer.
ELSEWHERE = {
    **dict.fromkeys(("add_callback", "remove_callback", "pop_callback", "callback_handler"), _CALLBACKS),
    "control": "trainer.stop() ends fit() after the step that is running",
    **dict.fromkeys(("model", "model_wrapped"), "it is spread over the ranks: trainer.save(folder) writes it"),
    "predict": "use trainer.generate(prompts), or trainer.evaluate(rows) for rewards",
    **dict.fromkeys(("log", "log_history"), _METRICS),
    **dict.fromkeys(("init_hf_repo", "create_model_card", "hub_model_id"), _HUB),
    **dict.fromkeys(("optimizer", "lr_scheduler", "create_optimizer", "create_scheduler"), _OPTIMIZER),
    "training_step": "trainer.step() runs a step and returns its samples and metrics",
    **dict.fromkeys(("compute_loss", "compute_metrics"), "losses and rewards are functions: see docs/algorithms.md"),
    "get_train_dataloader": "trainer.train_dataset draws the prompts",
    "eval_dataset": "trainer.evaluate() uses it; trainer.evaluate(rows) takes other rows",
    "ref_model": "it lives on the ranks; there is one if beta is above 0",
}
# Names there for what has another one here, if it is there: a model on several ranks is nowhere as a whole.
ALIASES = {"args": "config", "processing_class": "tokenizer", "processor": "tokenizer"}
ALIASES |= {"model": "module", "model_wrapped": "module"}
# Arguments of methods, besides the keys that other libraries call so.
ARGUMENTS = {
    "resume_from_checkpoint": "pass resume= to Trainer: the folder of a checkpoint, or 'auto' for the newest",
    "trial": "leave it out",
    "do_sample": "temperature=0 is greedy",
    "metric_key_prefix": "leave it out: names of metrics begin with eval/",
    "ignore_keys": "leave it out",
    "system_prompt": "begin the prompt, a list of messages, with one of the role system",
}
HOOKS = {
    "on_train_begin": "on_fit_start(trainer)",
    "on_step_end and on_log": "on_step_end(trainer, step, batch, metrics)",
    "on_evaluate": "on_evaluate(trainer, step, metrics)",
    "on_save": "on_save(trainer, step, folder)",
    "on_train_end": "on_fit_end(trainer)",
}


def attribute_advice(name: str, known: Iterable[str]) -> str:
    """Return what to use in place of an attribute that a Trainer lacks, "" if nothing is known. known: those it has."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
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
            if name not in names and (name not in ARGUMENTS or value is not None):
                raise TypeError(f"{method.__name__}() has no argument {name}{_argument_advice(name, names)}")
        theirs = {name: value for name, value in keywords.items() if name in names}
        return method(*arguments, **theirs)  # type: ignore[arg-type]

    return call


def _argument_advice(name: str, names: list[str]) -> str:
    habit = habit_of(name)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    if name in ARGUMENTS:
        return f": {ARGUMENTS[name]}"
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
    mapped = ", ".join(f"{theirs} is {ours}" for theirs, ours in HOOKS.items())
    return (
        f"that is a callback of transformers; {advice} instead (from hybrid_rl import Callback): {mapped}, and "
        "control.should_training_stop = True is trainer.stop(). See docs/from_trl.md"
    )
