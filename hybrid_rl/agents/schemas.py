"""Tools as the policy sees them: JSON schemas made from Python functions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from transformers.utils import DocstringParsingException, get_json_schema

from hybrid_rl.errors import ConfigError

# What transformers says of an argument that it finds no text for.
NO_DESCRIPTION = re.compile(r"no description for the argument ('\w+')")
# A parameter that the policy does not see: what names a call, so that a tool can refuse to act twice.
CALL_KEY = "call_key"
_EXAMPLE = '''
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """'''


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function or bound method, as chat templates show it to the policy.

    Name, type hints and docstring (Google's format) give {"type": "function", "function": {"name", "description",
    "parameters"}}. A parameter `call_key` is left out: it gets the key of the call. Raises ConfigError if any of them
    is missing, naming what to add.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None or not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise ConfigError(f"the tool {function!r} is no function; give a function, or a method of {_owner(function)}")
    if not name.isidentifier():
        raise ConfigError(f"a tool has the name {name!r}, which the policy cannot call; define it with `def`")
    shown = _without_key(function)
    missing = _missing(shown)
    if not missing:
        try:
            schema: dict[str, Any] = get_json_schema(shown)
        except DocstringParsingException as error:
            of = NO_DESCRIPTION.search(str(error))
            lack = f"a description of {of.group(1)}" if of else "a docstring that transformers can read"
            missing = [f"{lack} (Google's format: below `Args:`, NAME: TEXT)" + ("" if of else f": {error}")]
        except Exception as error:  # type hints are evaluated, which may raise anything
            missing = [f"something else ({type(error).__name__}: {error})"]
        else:
            return schema
    raise ConfigError(f"the tool {name!r} cannot be described to the policy: it lacks {', '.join(missing)}{_ASKED}")


def takes_call_key(function: Callable[..., Any]) -> bool:
    """Whether a tool has a parameter for the key of its call."""
    return CALL_KEY in inspect.signature(function).parameters


def _without_key(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature that the policy sees."""
    if not takes_call_key(function):
        return function

    @functools.wraps(function)
    def shown(**arguments: Any) -> Any:
        return function(**arguments)

    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name != CALL_KEY]
    shown.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    shown.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name != CALL_KEY}
    return shown


def _missing(function: Callable[..., Any]) -> list[str]:
    """What a function lacks to be described, in words."""
    lacks = []
    described = inspect.getdoc(function) or ""
    if not described.strip():
        lacks.append("a docstring")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            lacks.append(f"a name for what {parameter} takes (tools are called by keyword)")
        elif parameter.annotation is parameter.empty:
            lacks.append(f"a type hint of {parameter.name!r}")
    return lacks


_ASKED = f". Tools need type hints and a docstring that describes every argument, such as{_EXAMPLE}"


def _owner(given: Any) -> str:
    """Name what methods could be tools of."""
    if inspect.isclass(given):
        return f"an object of the class {given.__name__}"
    kind = type(given)
    methods = [name for name in vars(kind) if not name.startswith("_") and inspect.isfunction(getattr(kind, name))]
    names = ", ".join(f"`.{name}`" for name in methods)
    return f"this object: it has {names}" if names else "an object"
