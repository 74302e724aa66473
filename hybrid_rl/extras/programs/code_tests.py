"""Tests of programs as datasets hold them: inputs with outputs, calls with results, and assertions."""

from __future__ import annotations

import ast
import builtins
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.errors import DataError

FORMS = (
    'give {"inputs": [...], "outputs": [...]}, with "fn_name" for calls, a list of {"input", "output"}, or assertions '
    "as text or as a list of texts"
)


@dataclass(frozen=True)
class InputTest:
    """A program that reads `stdin` must print `output`."""

    stdin: str
    output: str


@dataclass(frozen=True)
class CallTest:
    """The function `name` (or that method of a class Solution) must return `result` for `arguments`."""

    name: str
    arguments: tuple[Any, ...]
    result: Any


@dataclass(frozen=True)
class AssertionTest:
    """Python that must run without an error. names: what it takes from the program. check: a function of its own that
    is called with the program's function `entry_point`; "" = none. modules: that it uses without importing them.
    builtins: names of Python's own that it uses, which the program may define anew."""

    source: str
    names: tuple[str, ...]
    modules: tuple[str, ...] = ()
    check: str = ""
    entry_point: str = ""
    builtins: tuple[str, ...] = ()


Test = InputTest | CallTest | AssertionTest


def read_tests(given: Any, entry_point: str | None = None, setup: str = "") -> list[Test]:
    """Read the tests of a row.

    given: see FORMS; text that is JSON is read as that. entry_point: the function that HumanEval's `check` gets. setup:
    Python before each of the assertions, as MBPP's `test_setup_code`.

    Raises DataError if they are of no known form, or if there are none.
    """
    tests = _read(_from_json(given), entry_point, setup)
    if not tests:
        raise DataError(f"the tests {given!r:.200} hold no test; {FORMS}")
    return tests


def _read(given: Any, entry_point: str | None, setup: str) -> list[Test]:
    if isinstance(given, str):
        return [_assertions(given, entry_point, setup)] if given.strip() else []
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= given.keys():
        inputs, outputs = given["inputs"], given["outputs"]
        if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
            raise DataError(f"the tests {given!r:.200} need as many outputs as inputs, both as lists")
        return [
            _pair(test_input, test_output, given.get("fn_name"))
            for test_input, test_output in zip(inputs, outputs, strict=True)
        ]
    if isinstance(given, Mapping) and {"input", "output"} <= given.keys():
        name = given.get("fn_name") or given.get("func_name")
        if not name and given.get("testtype", given.get("type")) in ("functional", "function_call"):
            name = entry_point
            if not name:
                raise DataError(f"the test {given!r:.200} is a call of a function; name it as fn_name or entry_point")
        return [_pair(given["input"], given["output"], name)]
    if _is_list(given):
        return [test for item in given for test in _read(item, entry_point, setup)]
    raise DataError(f"the tests {given!r:.200} are of no known form; {FORMS}")


def _pair(given: Any, wanted: Any, name: str | None) -> Test:
    if not name:
        return InputTest(_lines(given), _lines(wanted))
    if isinstance(given, str):  # one argument on each line, as JSON
        given = [_parsed(line) for line in given.splitlines() if line.strip()]
    if not _is_list(given):
        raise DataError(f"the test of {name} has the input {given!r:.200}; give the list of its arguments")
    arguments = [_plain(argument) for argument in given]
    return CallTest(name, tuple(arguments), _parsed(wanted) if isinstance(wanted, str) else _plain(wanted))


def _plain(value: Any) -> Any:
    """Return arrays and numbers of numpy as lists and numbers of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _lines(value: Any) -> str:
    """Return an input or output as text: of a list each item is a line."""
    return "\n".join(map(str, value)) if _is_list(value) else str(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _from_json(given: Any) -> Any:
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        return _parsed(given)
    return given


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) or type(value).__name__ == "ndarray"


def _assertions(text: str, entry_point: str | None, setup: str) -> AssertionTest:
    source = f"{setup}\n{text}" if setup else text
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the test {text!r:.200} is not Python: {error!r:.200}") from None
    used: set[str] = set()
    defined: set[str] = set()
    with_attributes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            with_attributes.add(node.value.id)
    own = used & set(vars(builtins)) - defined
    free = used - defined - own
    modules = {name for name in free & with_attributes if name in sys.stdlib_module_names}
    check = "check" if entry_point and any(getattr(node, "name", "") == "check" for node in tree.body) else ""
    names, needed, anew = (tuple(sorted(group)) for group in (free - modules, modules, own))
    return AssertionTest(source, names, needed, check, entry_point or "", anew)
