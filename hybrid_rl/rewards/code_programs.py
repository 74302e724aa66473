"""The programs that run a policy's code in the sandbox, and what they tell of it.

A result leaves the sandbox as plain values, written down by `spell`; the expected one never enters the process of the
code. Assertions run in another process, in which the functions of the code are stand-ins: one that is called with
arguments that have no answer yet ends the process with the question, the code is asked, and the assertions begin again.
So code that would deceive a test (an object that equals everything, an exit at the right moment) cannot.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from hybrid_rl.rewards.code_tests import AssertionTest
from hybrid_rl.rewards.code_values import spell, unspell

MARK = "\x00hybrid-rl:"

SPELLING = "from typing import Any\n\n" + inspect.getsource(spell) + "\n\n" + inspect.getsource(unspell)

# Reads {"source", "name", "arguments", "keywords"}, the last two spelled. Answers {"value", "arguments"} or {"error"}.
CALL = (
    SPELLING
    + f"""
def answer(request):
    import json, os, sys
    write, leave = os.write, os._exit
    try:
        arguments, keywords = unspell(request["arguments"]), unspell(request["keywords"])
        space = {{"__name__": "solution"}}
        exec(compile(request["source"], "<solution>", "exec"), space)
        name = request["name"]
        if name not in space and "Solution" in space:
            function = getattr(space["Solution"](), name)
        else:
            function = space[name] if name in space else None
        if function is None:
            raise NameError(name)
        value = function(*arguments, **keywords)
        found = {{"value": spell(value), "arguments": spell(list(arguments))}}
    except BaseException as error:
        found = {{"error": [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"][0]}}
    text = ({MARK!r} + json.dumps(found) + "\\n").encode("utf-8", "backslashreplace")
    while text:
        text = text[write(1, text):]
    leave(0)


import json, sys
answer(json.loads(sys.stdin.read()))
"""
)

# Reads the fields of an AssertionTest, and "known". Answers {"passed"}, {"question"} or {"unusable"}.
ASSERTIONS = (
    SPELLING
    + f"""
import builtins, importlib, json, os, sys


def end(found):
    sys.stdout.flush()
    text = ({MARK!r} + json.dumps(found) + "\\n").encode("utf-8", "backslashreplace")
    while text:
        text = text[os.write(1, text):]
    os._exit(0)


def stand_in(name, known):
    def function(*arguments, **keywords):
        try:
            key = json.dumps([name, spell(list(arguments)), spell(keywords)])
        except TypeError as error:
            end({{"unusable": f"{{name}} is called with an argument that cannot be sent to the program: {{error}}"}})
        if key not in known:
            end({{"question": key}})
        found = known[key]
        if "error" in found:
            kind = getattr(builtins, found["error"], None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error else RuntimeError)("raised by the program")
        for old, new in zip(arguments, unspell(found["arguments"])):
            if type(old) is list:
                old[:] = new
            elif type(old) in (dict, set):
                old.clear()
                old.update(new)
        return unspell(found["value"])

    function.__name__ = name
    return function


request = json.loads(sys.stdin.read())
space = {{"__name__": "tests"}}
for name in request["modules"]:
    space[name] = importlib.import_module(name)
for name in request["names"]:
    space[name] = stand_in(name, request["known"])
try:
    exec(compile(request["source"], "<tests>", "exec"), space)
    if request["check"]:
        space[request["check"]](stand_in(request["entry_point"], request["known"]))
except Exception:
    end({{"passed": False}})
end({{"passed": True}})
"""
)


def whole_program(source: str) -> str:
    """Return a program that runs the source as `__main__`, and prints what that prints to its standard output."""
    return (
        "import io, sys\nsys.stderr = io.StringIO()\n"
        f"exec(compile({source!r}, '<program>', 'exec'), {{'__name__': '__main__'}})\n"
    )


def call_request(source: str, name: str, arguments: Any, keywords: Any) -> str:
    """Return the input of `CALL`; arguments and keywords spelled."""
    return json.dumps({"source": source, "name": name, "arguments": arguments, "keywords": keywords})


def assertions_request(test: AssertionTest, known: dict[str, Any]) -> str:
    """Return the input of `ASSERTIONS`. known: answers of the program by question."""
    parts = {"source": test.source, "names": test.names, "modules": test.modules}
    return json.dumps({**parts, "check": test.check, "entry_point": test.entry_point, "known": known})


def read_answer(output: str) -> dict[str, Any]:
    """Return what a program answered; {} if it did not."""
    text = output.rpartition(MARK)[2] if MARK in output else ""
    try:
        found = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
