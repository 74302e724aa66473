"""The programs that run a policy's code in the sandbox, and what they tell of it.

A result leaves the sandbox as plain values, written down by `spell`; the expected one never enters the process of the
code. Assertions run in another process, in which the functions of the code are stand-ins: one that is called with
arguments that have no answer yet ends the process with the question, the code is asked, and the assertions begin again.
So code that would deceive a test (an object that equals everything, an exit at the right moment) cannot.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Sequence
from typing import Any

from hybrid_rl.extras.programs.code_tests import AssertionTest
from hybrid_rl.extras.programs.code_values import spell, unspell

MARK = "\x00hybrid-rl:"

SPELLING = "from typing import Any\n\n" + inspect.getsource(spell) + "\n\n" + inspect.getsource(unspell)

# Reads {"source", "name", "arguments", "keywords"}, the last two spelled. Answers {"value"}, with "arguments" if these
# were changed, or {"error", "text"}.
CALL = (
    SPELLING
    + f"""
def answer(request):
    import json, os, sys, types, typing
    write, leave = os.write, os._exit
    try:
        arguments, keywords = unspell(request["arguments"]), unspell(request["keywords"])
        module = sys.modules["solution"] = types.ModuleType("solution")
        space = vars(module)
        space.update((name, getattr(typing, name)) for name in typing.__all__)  # as contest sites have them
        exec(compile(request["source"], "<solution>", "exec"), space)
        name = request["name"]
        if name not in space and "Solution" in space:
            function = getattr(space["Solution"](), name)
        else:
            function = space[name] if name in space else None
        if function is None:
            raise NameError(name)
        found = {{"value": spell(function(*arguments, **keywords))}}
        changed = spell(list(arguments))
        if changed != request["arguments"]:
            found["arguments"] = changed
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        found = {{"error": kinds[0], "text": str(error)[:1000]}}
    text = ({MARK!r} + json.dumps(found) + "\\n").encode("utf-8", "backslashreplace")
    while text:
        text = text[write(1, text):]
    leave(0)


import json, sys
answer(json.loads(sys.stdin.read()))
"""
)

# Reads "mark", the fields of an AssertionTest, and "known". Answers {"passed"}, {"question"} or {"unusable"}.
ASSERTIONS = (
    SPELLING
    + """
import builtins, importlib, json, os, sys

request = json.loads(sys.stdin.read())
raised = []  # errors of the program
asked = []


def end(found):
    sys.stdout.flush()
    text = (request["mark"] + json.dumps(found) + "\\n").encode("utf-8", "backslashreplace")
    while text:
        text = text[os.write(1, text):]
    os._exit(0)


def stand_in(name):
    def function(*arguments, **keywords):
        try:
            key = json.dumps([name, spell(list(arguments)), spell(keywords)])
        except TypeError as error:
            end({"unusable": f"{name} is called with an argument that cannot be sent to the program: {error}"})
        asked.append(key)
        if key not in request["known"]:
            end({"question": key})
        found = request["known"][key]
        if "error" in found:
            kind = getattr(builtins, found["error"], None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raised.append((kind if is_error else RuntimeError)(found.get("text", "")))
            raise raised[-1]
        for old, new in zip(arguments, unspell(found.get("arguments", []))):
            if type(old) is list:
                old[:] = new
            elif type(old) in (dict, set):
                old.clear()
                old.update(new)
        return unspell(found["value"])

    function.__name__ = name
    return function


class Solution:
    def __getattr__(self, name):
        return stand_in(name)


space = {"__name__": "tests"}
for name in request["modules"]:
    space[name] = importlib.import_module(name)
for name in request["names"]:
    space[name] = Solution if name == "Solution" else stand_in(name)
try:
    exec(compile(request["source"], "<tests>", "exec"), space)
    if request["check"]:
        space[request["check"]](stand_in(request["entry_point"]))
except ImportError as error:
    end({"passed": False} if error in raised else {"unusable": f"a test cannot import what it needs: {error}"})
except BaseException:
    end({"passed": False})
end({"passed": True} if asked else {"unusable": "a test never calls the program"})
"""
)


def whole_program(source: str) -> str:
    """Return a program that runs the source as `__main__`, and prints what that prints to its standard output."""
    return (
        "import io, sys\nsys.stderr = io.StringIO()\ndel io, sys\n"
        f"exec(compile({source!r}, '<program>', 'exec'), globals())\n"
    )


def call_request(source: str, name: str, arguments: Any, keywords: Any) -> str:
    """Return the input of `CALL`; arguments and keywords spelled."""
    return json.dumps({"source": source, "name": name, "arguments": arguments, "keywords": keywords})


def assertions_request(test: AssertionTest, names: Sequence[str], known: dict[str, Any], mark: str) -> str:
    """Return the input of `ASSERTIONS`. names: what stands in for functions of the program. known: its answers by
    question. mark: what no program can know, which begins the answer."""
    parts = {"mark": mark, "source": test.source, "names": names, "modules": test.modules}
    return json.dumps({**parts, "check": test.check, "entry_point": test.entry_point, "known": known})


def read_answer(output: str, mark: str = MARK) -> dict[str, Any]:
    """Return what a program answered; {} if it did not. mark: the beginning of its answer."""
    text = output.rpartition(mark)[2] if mark in output else ""
    try:
        answer = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def defined_names(source: str) -> frozenset[str]:
    """Return the names of functions and classes that a program defines at its top."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))
