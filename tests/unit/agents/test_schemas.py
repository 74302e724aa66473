"""Tools as the policy sees them: schemas of functions, and templates that leave tools out."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest

from hybrid_rl.agents.chat import Chat
from hybrid_rl.agents.schemas import tool_schema
from hybrid_rl.errors import ConfigError
from tests.support.agents.chat_forms import ENDS, FAMILIES, HERMES, build_chat, build_tokenizer, tool


class Box:
    async def put(self, what: str, where: Literal["in", "on"] = "in", times: int | None = None) -> str:
        """Put something
        somewhere.

        Args:
            what: The thing.
            where: The place.
            times: How often.

        Returns:
            What happened.
        """
        return what


def test_the_schema_of_a_method() -> None:
    function = tool_schema(Box().put)["function"]
    assert (function["name"], function["description"]) == ("put", "Put something\nsomewhere.")
    assert function["parameters"]["properties"] == {
        "what": {"type": "string", "description": "The thing."},
        "where": {"type": "string", "enum": ["in", "on"], "description": "The place."},
        "times": {"type": "integer", "nullable": True, "description": "How often."},
    }
    assert function["parameters"]["required"] == ["what"]


def undescribed(a: int) -> None:
    """Does something."""


def numpy_style(a: int) -> None:
    """Does something.

    Parameters
    ----------
    a : int
        A number.
    """


def bare(a, *b):  # type: ignore[no-untyped-def]
    return a


def foreign(a: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Does something.

    Args:
        a: A chat.
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bare, r"'bare' .*lacks a docstring, a type hint of 'a', a name for what \*b takes"),
        (undescribed, r"'undescribed' .*it lacks a description of 'a' \(Google's format"),
        (numpy_style, r"'numpy_style' .*it lacks a description of 'a' \(Google's format"),
        (foreign, "'foreign' .*NameError: name 'Nowhere'"),
        (lambda a: a, "a tool has the name '<lambda>'"),
        (Box, "is no function; give a function"),
        ("add", "is no function"),
    ],
)
def test_functions_that_cannot_be_described(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        tool_schema(function)


TOOLS = [tool("add", a="integer"), tool("echo", text="string")]


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_that_show_tools_pass(family: str) -> None:
    assert build_chat(family).problem_with_tools(TOOLS) == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{% for tool in tools %}", "{% for tool in tools[:1] %}", r"does not show the tool\(s\) echo;"),
        ("m.tool_calls", "m.no_calls", "its own tool calls"),
        ("+ m.content + '\n</tool_response>'", "+ '\n</tool_response>'", "the result of a tool"),
        ('{"name": "\'', '{"tool": "\'', "is not read as a call with tool_call_format='hermes'; set"),
    ],
)
def test_templates_that_leave_something_out_are_refused(old: str, new: str, message: str) -> None:
    assert old in HERMES
    chat = Chat(build_tokenizer(HERMES.replace(old, new), ENDS["hermes"]))
    assert chat.problem_with_tools([]) == ""
    assert re.search(message, chat.problem_with_tools(TOOLS))


def test_calls_that_nobody_reads_need_not_be_readable() -> None:
    tokenizer = build_tokenizer(FAMILIES["glm"], ENDS["glm"])
    assert "tool_call_format='llama3'" in Chat(tokenizer, tool_call_format="llama3").problem_with_tools(TOOLS)
    assert Chat(tokenizer, tool_call_format="none").problem_with_tools(TOOLS) == ""
