"""The hooks that the trainer calls are the hooks that a callback has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import hybrid_rl
from hybrid_rl import Callback

HOOKS = {name: hook for name, hook in vars(Callback).items() if name.startswith("on_")}


def notified() -> dict[str, int]:
    """Hook to number of arguments, as `_notify("on_...", ...)` calls in the trainer have them; + the trainer."""
    tree = ast.parse((Path(hybrid_rl.__file__).parent / "trainer.py").read_text())
    return {
        node.args[0].value: len(node.args)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_notify"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_every_hook_is_called_with_its_arguments() -> None:
    assert notified() == {name: len(inspect.signature(hook).parameters) - 1 for name, hook in HOOKS.items()}


def test_hooks_may_be_left_out() -> None:
    for name, hook in HOOKS.items():
        arguments = [None] * (len(inspect.signature(hook).parameters) - 1)
        assert getattr(Callback(), name)(*arguments) is None
