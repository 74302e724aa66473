"""Tool calls in the text of answers, well written and not, in every format."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.agents.parsing import MalformedCallError, ToolCall, argument_types, find_calls, format_of
from tests.support.agents.chat_forms import FAMILIES, tool

ADD = ToolCall("add", {"a": 1, "b": 2})
TYPES = argument_types([tool("add", a="integer", b="integer"), tool("echo", text="string", on="boolean")])


@pytest.mark.parametrize(
    ("call_format", "text", "said", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "", [ADD]),
        ("hermes", '<tool_call>{"arguments":{"b":2,"a":1},"name":"add"}</tool_call>', "", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1, "b": 2}}</tool_call>', "", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
        ("hermes", 'So:\n<tool_call>{"name": "now", "arguments": {}}</tool_call> ok', "So:\nok", [ToolCall("now")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' * 2, "", [ADD, ADD]),
        # The end tag within a text, a line break within a text, letters beyond ASCII.
        (
            "hermes",
            '<tool_call>{"name": "echo", "arguments": {"text": "</tool_call>\n\\u00e9 ✓"}}</tool_call>',
            "",
            [ToolCall("echo", {"text": "</tool_call>\né ✓"})],
        ),
        (
            "hermes",
            "<tool_call>\n<function=echo>\n<parameter=text>\n12\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n"
            "</function>\n</tool_call>",
            "",
            [ToolCall("echo", {"text": "12", "on": True})],
        ),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        ("llama3", ' <|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        ("llama3", '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        ("llama3", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [ToolCall("now")] * 2),
        ("mistral", 'Ok [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "x"}]', "Ok", [ADD]),
        (
            "mistral",
            '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[CALL_ID]xy[ARGS]{}',
            "",
            [ADD, ToolCall("now")],
        ),
        # The id that the policy wrote is kept: it expects the result under it. Templates take nine letters and digits.
        ("mistral", "[TOOL_CALLS]now[CALL_ID]Ab3456789[ARGS]{}", "", [ToolCall("now", id="Ab3456789")]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "Ab3456789"}]',
            "",
            [ToolCall("now", id="Ab3456789")],
        ),
        (
            "glm",
            "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            "",
            [ADD],
        ),
        ("glm", "<tool_call>now\n</tool_call>", "", [ToolCall("now")]),
        # A declared text stays a text; without a declaration, what is JSON is read as JSON.
        (
            "glm",
            "<tool_call>echo<arg_key>text</arg_key><arg_value>12</arg_value><arg_key>x</arg_key><arg_value>[1]</arg_value>"
            "</tool_call>",
            "",
            [ToolCall("echo", {"text": "12", "x": [1]})],
        ),
    ],
)
def test_calls_that_can_be_read(call_format: Any, text: str, said: str, calls: list[ToolCall]) -> None:
    assert find_calls(text, call_format, TYPES) == (said, calls)


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        ("hermes", "just text, even {} and </tool_call>\n"),
        ("llama3", '{"name": "Ada", "age": 36}'),
        ("llama3", 'I call {"name": "add", "parameters": {}}'),
        ("mistral", "no calls [1] "),
        ("glm", "add(1, 2)"),
        ("none", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    ],
)
def test_text_without_a_call_comes_back_unchanged(call_format: Any, text: str) -> None:
    assert find_calls(text, call_format, TYPES) == (text, [])


@pytest.mark.parametrize(
    ("call_format", "text", "reason"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1', "not closed by </tool_call>"),
        ("hermes", '<tool_call>{"name": "add" "arguments": {}}</tool_call>', "Expecting ',' delimiter at character 15"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {}} now</tool_call>',
            "something follows its arguments: 'now",
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are an array instead of a JSON object"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'no "arguments"'),
        ("hermes", "<tool_call>[]</tool_call>", "an array instead of a JSON object with a name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a JSON value"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1e400]}}</tool_call>', "a number .* is too large"),
        ("llama3", '{"name": "add", "parameters": {"a": -1e400}}', "a number .* is too large"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": {"b": 1e999}}', "a number .* is too large"),
        ("glm", "<tool_call>add\n<arg_key>z</arg_key>\n<arg_value>1e400</arg_value></tool_call>", "is too large"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "not valid Unicode"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "</tool_call>", "recursion"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>", "digits"),
        ("hermes", "<tool_call><function=add><parameter=a>1</parameter></tool_call>", "not closed by </function>"),
        # The first call is fine, the second is not: none is made.
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>now</tool_call>',
            "JSON is broken",
        ),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "JSON is broken"),
        ("llama3", '{"name": "add", "parameters": {}} and more', "something follows its JSON: 'and more'"),
        ("llama3", "<|python_tag|>print(1)", "JSON is broken"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}', "JSON is broken"),
        ("mistral", "[TOOL_CALLS] []", "empty"),
        ("mistral", "[TOOL_CALLS] add", "neither a JSON list nor a name"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{} x", "something follows"),
        ("glm", "<tool_call></tool_call>", "does not begin with the name"),
        ("glm", '<tool_call>{"name": "add"}</tool_call>', "does not begin with the name"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>", "something follows its arguments"),
    ],
)
def test_calls_that_cannot_be_read_say_why(call_format: Any, text: str, reason: str) -> None:
    with pytest.raises(MalformedCallError, match="(?i)" + reason.replace("(", r"\(").replace("[", r"\[")):
        find_calls(text, call_format, TYPES)


def test_types_of_arguments() -> None:
    properties = {
        "a": {"type": ["integer", "null"]},
        "b": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "c": {"type": "number", "nullable": True},
        "d": {},
    }
    schema = {"function": {"name": "f", "parameters": {"properties": properties}}}
    assert argument_types([schema]) == {
        "f": {
            "a": {"integer", "null"},
            "b": {"string", "array"},
            "c": {"number", "null"},
            "d": frozenset(),
        }
    }
    values = {"a": "null", "b": "[1]", "c": "1e3", "d": "true"}
    written = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in values.items())
    _, [call] = find_calls(f"<tool_call>f{written}</tool_call>", "glm", argument_types([schema]))
    assert call.arguments == {"a": None, "b": [1], "c": 1000.0, "d": True}


def test_the_format_is_told_by_the_template() -> None:
    formats = {family: format_of(template) for family, template in FAMILIES.items()}
    assert formats == {"hermes": "hermes", "thinking": "hermes", "llama": "llama3", "mistral": "mistral", "glm": "glm"}
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}") == "none"
