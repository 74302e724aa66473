"""The hooks of the core: by these names, and nowhere else, it reaches an extra, which is imported when it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

# What an extra does for the core: `module:name`.
HOOKS = {
    "split_args": "names.foreign:split_args",
    "foreign_table": "names.records:read_table",
    "as_arguments": "names.translation:pasted",
    "translate_setting": "names.translation:translate",
    "habit_of": "names:habit_of",
    "is_off_anyway": "names:is_off_anyway",
    "foreign_names": "names:names",
    "value_advice": "names:value_advice",
    "http_agent": "endpoint.http_agent:HttpAgent",
    "can_draw": "pictures.curves:can_draw",
    "draw_curves": "pictures.curves:draw",
    "memory_pictures": "pictures.memory_pictures:MemoryPictures",
    "save_memory_trace": "pictures.memory_pictures:save_trace",
    "peak_flops": "plan.rates:peak_flops",
    "plan_prepared": "plan.run_planning:plan_prepared",
    "code_reward": "programs.code:code_reward",
    "write_report": "report:write_report",
    "trackers": "trackers.trackers:Trackers",
    "check_trackers": "trackers.trackers:check_trackers",
    "check_color": "views.batch_view:check_color",
    "view_samples": "views.batch_view:BatchView",
    "config_html": "views.config_view:config_html",
    "metrics_html": "views.results_view:metrics_html",
    "step_html": "views.results_view:step_html",
    "run_view": "views.run_view:View",
}

# Modules and packages that users import by the name that they had when they were no extras.
FORMER_NAMES = {
    "hybrid_rl.agents.adapters": "environments",
    "hybrid_rl.agents.python_tool": "programs.python_tool",
    "hybrid_rl.agents.server": "endpoint",
    "hybrid_rl.report": "report",
    "hybrid_rl.sandbox": "sandbox",
}


def extra(hook: str) -> Any:
    """Return what an extra has for a hook."""
    module, _, name = HOOKS[hook].partition(":")
    return getattr(_module(module), name)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"hybrid_rl.extras.{name}")


def _of_today(name: str) -> str:
    """Return the extra that a module was before, or has around it; "" if it is none."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if (now := FORMER_NAMES.get(".".join(parts[:length]))) is not None:
            return ".".join([now, *parts[length:]])
    return ""


class FormerNames:
    """Imports an extra by its former name: there is one module, under both."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_ours = name.startswith("hybrid_rl.")  # every import of the process comes by
        return ModuleSpec(name, cast(Any, self)) if is_ours and _of_today(name) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python makes a module, in whose place `exec_module` puts the extra."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = _module(_of_today(module.__name__))
