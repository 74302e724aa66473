"""The commands of `hybrid-rl` and their order in its help."""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence

import typer
from rich.markup import escape

from hybrid_rl.cli.algorithms import print_algorithms
from hybrid_rl.cli.data import show_data
from hybrid_rl.cli.doctor import run_doctor
from hybrid_rl.cli.eval import evaluate
from hybrid_rl.cli.generate import generate
from hybrid_rl.cli.keys import print_keys
from hybrid_rl.cli.plan import show_plan
from hybrid_rl.cli.quickstart import run_quickstart
from hybrid_rl.cli.replay import replay_step
from hybrid_rl.cli.report import write_report
from hybrid_rl.cli.running import Commands
from hybrid_rl.cli.train import train
from hybrid_rl.cli.upload import upload_run
from hybrid_rl.cli.version import print_version

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # disk, quota, ulimit -f, a broken device
RUN, BEFORE, LOOK_UP = "Train, and see what came of it", "Before a run", "Look up"


def help_of(command: Callable[..., None]) -> str:
    """Return a docstring as help: paragraphs take the width of the terminal, examples keep their lines."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(escape(p if p.startswith("Examples:") else " ".join(p.split())) for p in paragraphs)


app = typer.Typer(
    name="hybrid-rl",
    cls=Commands,
    help="Reinforcement learning for language models: training and generation with the same weights.",
    epilog="New here? Try [bold]hybrid-rl quickstart[/bold]. Each command has examples: hybrid-rl train --help",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    RUN: {
        "quickstart": run_quickstart,
        "train": train,
        "eval": evaluate,
        "generate": generate,
        "report": write_report,
        "replay": replay_step,
        "upload": upload_run,
    },
    BEFORE: {"data": show_data, "plan": show_plan, "doctor": run_doctor},
    LOOK_UP: {"keys": print_keys, "algorithms": print_algorithms, "version": print_version},
}
for _panel, _commands in PANELS.items():
    for _name, _function in _commands.items():
        app.command(_name, help=help_of(_function), rich_help_panel=_panel)(_function)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `hybrid-rl`; returns the exit status."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale such as C cannot show every character of a prompt
            stream.reconfigure(errors="backslashreplace")
    status = 0
    try:
        app(list(sys.argv[1:] if arguments is None else arguments), prog_name="hybrid-rl")
    except SystemExit as ended:
        status = int(ended.code or 0)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return _say_full(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        return _say_full(error)
    return status


def _open_what_is_closed() -> None:
    """Send what would go to a closed stream (`hybrid-rl version >&-`) nowhere, as if it were /dev/null."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the program ends


def _say_full(error: OSError) -> int:
    """Say that the output cannot be written, unless its reader wants no more, and return the exit status. What is left
    of it is dropped, or Python would complain about it at its end."""
    if error.errno != errno.EPIPE:
        print(f"cannot write the output: {error.strerror}", file=sys.stderr)
    with open(os.devnull, "w") as nothing, contextlib.suppress(OSError, io.UnsupportedOperation):
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    return 1
