"""Modules that are imported at their first use, for commands that may never use them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class PutOff(ModuleType):
    """A module that is imported if something in it is asked for.

    Not Python's LazyLoader: its modules are loaded by the next import of them, since that looks at their spec.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def put_off(name: str) -> None:
    """Let `import name` do nothing until something in the module is used.

    The configuration knows algorithms by their records, and those stand beside functions that compute with torch:
    listing names needs the records alone.
    """
    sys.modules.setdefault(name, PutOff(name))
