"""The command line: `hybrid-rl COMMAND`, with one module per command, and `run_recipe`, which recipes end in.

Nothing here imports torch or transformers when it is imported, so that help and completion answer at once: a command
imports what it needs inside its function.
"""

from __future__ import annotations

from hybrid_rl.cli.app import app, main
from hybrid_rl.cli.running import INTERRUPTED, run_recipe

__all__ = ["INTERRUPTED", "app", "main", "run_recipe"]
