"""Tool calls in the text of an answer: one parser per format that models were trained to write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

CallFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "glm", "none"]
# The declared JSON types of each argument of each tool: {tool: {argument: {"string"}}}.
ArgumentTypes: TypeAlias = Mapping[str, Mapping[str, frozenset[str]]]

# Tokens that carry the structure of an answer. Many tokenizers count them as special; the parsers need their text.
MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
)


class MalformedCallError(ValueError):
    """An answer holds a tool call that cannot be read; the message says why, in words for the policy."""


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it: the name of a tool and its arguments, both as yet unchecked. id: as the policy
    wrote it, which the result has to name; "" if it wrote none, or one that templates do not take."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


def find_calls(text: str, call_format: CallFormat, types: ArgumentTypes) -> tuple[str, list[ToolCall]]:
    """Return what an answer says besides its tool calls, and the calls in their order.

    text: the answer without its thinking and without the token that ends it. types: see `argument_types`. Without any
    call the text comes back unchanged. Raises MalformedCallError if any call in it cannot be read: then none is made.
    """
    rest, calls = _FORMATS[call_format](text, types)
    if not calls:
        return text, []
    return "\n".join(part for part in map(str.strip, rest) if part), calls


def argument_types(tools: Sequence[Mapping[str, Any]]) -> ArgumentTypes:
    """Return the types that tool schemas declare. Formats without quotes need them: is `7` a number or a text?"""
    types: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas = properties.items() if isinstance(properties, Mapping) else ()
        types[str(function.get("name"))] = {key: _declared(schema) for key, schema in schemas}
    return types


def format_of(template: str) -> CallFormat:
    """Return the format of the tool calls that a chat template renders, by the markers in it; "none" if it has none."""
    if "<tool_call>" in template:
        return "glm" if "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ('"parameters": ' in template and "tool_calls" in template):
        return "llama3"
    return "none"


def checked_call(value: Any, keys: Sequence[str] = ("arguments", "parameters")) -> ToolCall:
    """Return the call that a JSON value describes: {"name": text, "arguments": object, or the JSON text of one}.

    Raises MalformedCallError for any other shape.
    """
    if not isinstance(value, Mapping):
        raise MalformedCallError(f"it is {_kind(value)} instead of a JSON object with a name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCallError('it has no "name" (a text)')
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise MalformedCallError(f'it has no "{keys[0]}" (a JSON object)')
    arguments = value[key]
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, Mapping):
        raise MalformedCallError(f'its "{key}" are {_kind(arguments)} instead of a JSON object')
    return ToolCall(name, _encodable(arguments))


def as_declared(call: ToolCall, types: ArgumentTypes) -> ToolCall:
    """Return a call with the JSON text of each argument that is declared as a text, and is of no type declared."""
    declared = types.get(call.name, {})
    arguments = {
        key: json.dumps(value, ensure_ascii=False)
        if "string" in (allowed := declared.get(key, frozenset()))
        and value is not None
        and not allowed & types_of(value)
        else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=arguments)


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises MalformedCallError if it is none, or something follows it."""
    value, end = _json_at(text, 0)
    if text[end:].strip():
        raise MalformedCallError(f"something follows its JSON: {_quoted(text[end:].strip())}")
    return value


def _hermes(text: str, types: ArgumentTypes) -> tuple[list[str], list[ToolCall]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, or the XML that Qwen3-Coder puts between the tags."""
    return _tagged(text, types, _hermes_body)


def _hermes_body(text: str, start: int, types: ArgumentTypes) -> tuple[ToolCall, int]:
    function = _XML_FUNCTION.match(text, start)
    if function is None:
        value, end = _json_at(text, start)
        return checked_call(value), end
    name, end = function[1].strip(), function.end()
    arguments = {}
    while pair := _XML_PARAMETER.match(text, end):
        arguments[pair[1].strip()] = _typed(pair[2], types.get(name, {}).get(pair[1].strip()))
        end = pair.end()
    close = _XML_END.match(text, end)
    if close is None:
        raise MalformedCallError(f"<function={name}> is not closed by </function>: {_quoted(text[end:])}")
    return ToolCall(name, _encodable(arguments)), close.end()


def _glm(text: str, types: ArgumentTypes) -> tuple[list[str], list[ToolCall]]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>; texts stand without quotes."""
    return _tagged(text, types, _glm_body)


def _glm_body(text: str, start: int, types: ArgumentTypes) -> tuple[ToolCall, int]:
    head = _GLM_NAME.match(text, start)
    name = head[0].strip() if head else ""
    if head is None or not name or re.search(r"[\s{}]", name):
        raise MalformedCallError(f"it does not begin with the name of a tool: {_quoted(text[start:])}")
    end, arguments = head.end(), {}
    while pair := _GLM_PAIR.match(text, end):
        arguments[pair[1].strip()] = _typed(pair[2], types.get(name, {}).get(pair[1].strip()))
        end = pair.end()
    return ToolCall(name, _encodable(arguments)), end


def _tagged(
    text: str, types: ArgumentTypes, body: Callable[[str, int, ArgumentTypes], tuple[ToolCall, int]]
) -> tuple[list[str], list[ToolCall]]:
    """All calls between <tool_call> and </tool_call>. The body is read first: a text in it may contain the end tag."""
    rest, calls, place = [], [], 0
    while (start := text.find(_OPEN, place)) >= 0:
        rest.append(text[place:start])
        if _CLOSE not in text[start:]:
            raise MalformedCallError("it is not closed by </tool_call>")
        call, end = body(text, _skip_space(text, start + len(_OPEN)), types)
        end = _skip_space(text, end)
        if not text.startswith(_CLOSE, end):
            raise MalformedCallError(f"something follows its arguments: {_quoted(text[end:])}")
        calls.append(call)
        place = end + len(_CLOSE)
    return [*rest, text[place:]], calls


def _llama3(text: str, types: ArgumentTypes) -> tuple[list[str], list[ToolCall]]:
    """{"name": ..., "parameters": {...}} as the whole answer, perhaps after <|python_tag|>; more of them after ";"."""
    body = text.strip()
    tagged = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not tagged and not _LLAMA_CALL.match(body):
        return [text], []
    calls, place = [], 0
    while True:
        value, end = _json_at(body, place)
        calls.append(checked_call(value, ("parameters", "arguments")))
        end = _skip_space(body, end)
        if end == len(body):
            return [], calls
        if body[end] != ";":
            raise MalformedCallError(f"something follows its JSON: {_quoted(body[end:])}")
        place = _skip_space(body, end + 1)


def _mistral(text: str, types: ArgumentTypes) -> tuple[list[str], list[ToolCall]]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} once per call."""
    head, marker, body = text.partition(_TOOL_CALLS)
    if not marker:
        return [text], []
    if body.lstrip().startswith(("[{", "[ ", "[\n", "[]")):
        values = read_json(body.strip())
        if not values:
            raise MalformedCallError("the list of calls is empty")
        calls = [checked_call(value) for value in values]
        written = [str(value.get("id")) for value in values]
        return [head], [replace(call, id=_usable_id(call_id)) for call, call_id in zip(calls, written, strict=True)]
    calls, place = [], 0
    while True:
        name = _MISTRAL_NAME.match(body, place)
        if name is None:
            raise MalformedCallError(f"neither a JSON list nor a name and [ARGS] follow: {_quoted(body[place:])}")
        value, end = _json_at(body, name.end())
        calls.append(replace(checked_call({"name": name[1], "arguments": value}), id=_usable_id(name[2])))
        end = _skip_space(body, end)
        if end == len(body):
            return [head], calls
        if not body.startswith(_TOOL_CALLS, end):
            raise MalformedCallError(f"something follows its arguments: {_quoted(body[end:])}")
        place = end + len(_TOOL_CALLS)


def _usable_id(text: str | None) -> str:
    return text if text and re.fullmatch("[a-zA-Z0-9]{9}", text) else ""


def _no_calls(text: str, types: ArgumentTypes) -> tuple[list[str], list[ToolCall]]:
    return [text], []


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a place of a text and where it ends. Line breaks within texts pass: models write them."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_space(text, start))
    except json.JSONDecodeError as error:
        raise MalformedCallError(
            f"its JSON is broken: {error.msg} at character {max(error.pos - start, 0)} of {_quoted(text[start:])}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"its JSON cannot be used: {str(error).splitlines()[0][:120]}") from None
    return value, end


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _encodable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    r"""The arguments, unless a text in them is no Unicode (half of a pair, as in "\ud83d"): no file takes that. And
    unless a number is not finite: JSON has no such numbers, but 1e400 is read as one."""
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise MalformedCallError("a text in its arguments is not valid Unicode") from None
    except ValueError:
        raise MalformedCallError("a number in its arguments is too large, or not a number") from None
    return dict(arguments)


def types_of(value: Any) -> frozenset[str]:
    """Return JSON schema's names of the types that a parsed value has."""
    return _JSON_TYPES[type(value)]


def _typed(text: str, declared: frozenset[str] | None) -> Any:
    """An argument that stands without quotes: a JSON value if the declared type allows it, else the text itself."""
    try:
        value = _PYTHON_WORDS[text] if declared and text in _PYTHON_WORDS else read_json(text)
    except MalformedCallError:
        return text
    if isinstance(value, str) or (declared and not declared & types_of(value)):
        return text
    return value


def _declared(schema: Any) -> frozenset[str]:
    """All JSON types that a schema allows; empty if it does not say, or is not a schema."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kinds = {kind for kind in _listed(schema.get("type")) if isinstance(kind, str)}
    for choice in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        kinds |= _declared(choice)
    return frozenset(kinds | ({"null"} if schema.get("nullable") and kinds else set()))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _kind(value: Any) -> str:
    return f"{'an' if (name := min(types_of(value)))[0] in 'aio' else 'a'} {name}"


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _quoted(text: str, max_chars: int = 60) -> str:
    return repr(text if len(text) <= max_chars else text[: max_chars - 3] + "...")


_OPEN, _CLOSE, _TOOL_CALLS, _PYTHON_TAG = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
_XML_FUNCTION = re.compile(r"<function=([^\n>]+)>\s*")
_XML_PARAMETER = re.compile(r"\s*<parameter=([^\n>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_XML_END = re.compile(r"\s*</function>")
_GLM_NAME = re.compile(r"(?:(?!<arg_key>|</tool_call>).)*", re.DOTALL)
_GLM_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
# A JSON object that means to be a call. An answer that merely begins with "{" may be JSON that the user asked for.
_LLAMA_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"'
)
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?\[ARGS\]")
# Some templates render these values as Python does.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
_FORMATS: Mapping[CallFormat, Callable[[str, ArgumentTypes], tuple[list[str], list[ToolCall]]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "glm": _glm,
    "none": _no_calls,
}
