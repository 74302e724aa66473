"""The end of commands and recipes: one message and an exit status instead of a traceback."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from hybrid_rl.errors import ConfigError, HybridRLError
from hybrid_rl.process.stopping import own_process

INTERRUPTED = 130  # the shell's convention for Ctrl-C
WRONG_USAGE = 2


class Commands(TyperGroup):
    """The commands of `hybrid-rl`, in the order in which they were added. The library's own errors are printed as one
    message (status 1); Ctrl-C gives status 130."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        words = list(ctx.args)  # all after the command's name
        try:
            return super().invoke(ctx)
        except HybridRLError as error:
            say_error(error)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as stopped:
            raise typer.Exit(INTERRUPTED) from stopped
        except Exception as error:
            option = getattr(error, "option_name", None)
            if option is not None and ctx.invoked_subcommand in ("train", "quickstart"):
                say_error(option_error(option, words))
                raise typer.Exit(WRONG_USAGE) from error
            _tell_of_keys(error)
            raise


def _tell_of_keys(error: Any) -> None:
    """Add to typer's error about an unknown option, whose class has no name of its own to import, how keys are given,
    if the command takes some."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option and context is not None and any(parameter.nargs == -1 for parameter in context.command.params):
        key = option.lstrip("-").partition("=")[0]
        error.message = f"{error.message}. Keys have no dashes: {key}=VALUE"


def say_error(error: HybridRLError) -> None:
    """Print an error of the library to stderr. Its notes hold additions of other ranks."""
    print("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)


def option_error(option: str, words: Sequence[str]) -> ConfigError:
    """Return the error for settings that were written as options, `--lora_r 16`: how they are written here, and what
    they are called. words: all that followed the command."""
    from hybrid_rl.config import load_config

    settings: list[str] = []
    for word in words:
        if word.startswith("-"):
            settings.append(word.lstrip("-").replace("-", "_") if "=" not in word else word.lstrip("-"))
        elif settings and "=" not in settings[-1]:
            settings[-1] += f"={word}"
        else:
            settings.append(word)
    settings = [setting if "=" in setting else f"{setting}=true" for setting in settings]
    text = f"there is no option {option}: settings are KEY=VALUE, without dashes. Write {shlex.join(settings)}"
    try:
        load_config(None, arguments=[setting for setting in settings if not setting.startswith(("reward=", "config="))])
    except ConfigError as error:
        text = f"{text.partition(' Write')[0]} {error}"
    return ConfigError(text)


def say_lookup(model: str | None) -> None:
    """Say on stderr that a model's name is looked up in the hub, which takes minutes to fail if that cannot be
    reached. Says nothing of a folder."""
    if model is not None and not Path(model).exists():
        print(f"{model} is no folder here: looking it up in the Hugging Face hub ...", file=sys.stderr, flush=True)


def run_recipe(run: Callable[[list[str]], None]) -> None:
    """Run a recipe on the `key=value` arguments of the command line and exit.

    The library's own errors are printed as one message without a traceback (status 1); Ctrl-C gives status 130. A stop
    by a signal or by save_before gives status 75 if there is a checkpoint to go on from (`RunStopped`).
    """
    try:
        with own_process():
            run(sys.argv[1:])
    except HybridRLError as error:
        say_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
