"""Functions that run in the place of others, and may call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


Wrapper = Callable[..., Any]


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Wrapper) -> None:
    """Have `wrapper(own, *arguments)` called in the place of `own(*arguments)`, where arguments may begin with self."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **options: wrapper(own, *arguments, **options))
