"""Messages as chat templates take them, and what a row of a dataset gives to its template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from hybrid_rl.errors import DataError, MessagesRefusedError, shorten

Message: TypeAlias = Mapping[str, Any]
# How a rendered conversation ends: with the header of the answer to come, after its last message, or within it.
Ending: TypeAlias = Literal["answer", "closed", "open"]

# Columns with what a template is given for one row besides its messages: schemas of tools, and keywords. The names are
# those of TRL and of published datasets.
TOOLS_COLUMN = "tools"
KWARGS_COLUMN = "chat_template_kwargs"
TEMPLATE_COLUMNS = (TOOLS_COLUMN, KWARGS_COLUMN)
# Arguments of apply_chat_template that callers set themselves, or that would change the form of its result.
FIXED_TEMPLATE_KWARGS = frozenset(
    {
        *("conversation", "add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
    }
)
# Keywords that apply_chat_template itself reads, so that they need not occur in the template.
TEMPLATE_CALL_KWARGS = frozenset({"chat_template", "tools", "documents"})

# Why a tool call could not be read. A key of ours, which no template sees.
CALL_ERROR = "tool_call_error"
# Keys of a message with its thinking: templates and servers have several.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
PROBE_ID = "probe0id0"  # nine letters and digits: Mistral's templates refuse others
PROBE = {"role": "user", "content": "probe question"}
_NO_CALL = "000000000"  # what the result of a call names that could not be read


class MessageRenderer:
    """Renders messages with the chat template of a tokenizer, in the form in which this template takes them.

    Forms differ, and the template's is found by trying: contents as texts or as blocks of text; arguments of tool calls
    as objects or as JSON text; of a message that has nothing but calls, the content "" or None, or no content at all.
    So a conversation is rendered alike whichever of these forms it has.
    """

    def __init__(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """chat_template_kwargs: extra keywords for the template."""
        self.tokenizer = tokenizer
        self.kwargs = dict(chat_template_kwargs or {})

    def render(self, messages: Sequence[Message], ending: Ending, settings: Mapping[str, Any] | None = None) -> str:
        """Return the text of a conversation. settings: keywords of this conversation (`row_settings`), which go before
        those of all.

        Raises MessagesRefusedError for contents that are not text, and whatever the template raises.
        """
        shown = [self._shown(message) for message in messages]
        try:
            return self._apply(shown, ending, settings)
        except Exception:  # a template may raise anything
            if shown == (named := _with_names(shown)):
                raise
        return self._apply(named, ending, settings)

    def check_shown(self, messages: Sequence[Message], ending: Ending, settings: Mapping[str, Any]) -> None:
        """Raise DataError if the template leaves out a tool call of this conversation, or never shows the thinking that
        one of its answers has. Many templates leave the thinking of earlier turns out on purpose."""
        probed, names = _with_probes(messages)
        text = self.render(probed, ending, settings) if names else ""
        if lost := next((name for probe, name in names.items() if probe not in text), None):
            raise DataError(
                f"the chat template leaves out the call of {lost!r}; use a template that renders "
                "`message.tool_calls` (data.chat_template_path), or write calls into the content"
            )
        for message in messages:
            thoughts = {
                key: "probe thinking" for key in THOUGHTS if message["role"] == "assistant" and message.get(key)
            }
            if thoughts and "probe thinking" not in self.render([PROBE, {**message, **thoughts}], "closed", settings):
                raise DataError(
                    f"the chat template leaves out the thinking under {', '.join(map(repr, thoughts))}; use the key "
                    "that it renders or another template (data.chat_template_path), write it into the content, or "
                    "remove it"
                )

    def _apply(self, messages: Sequence[Message], ending: Ending, settings: Mapping[str, Any] | None = None) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=ending == "answer",
            continue_final_message=ending == "open",
            **{**self.kwargs, **(settings or {})},
        )
        return text

    def shows_tools(self, names: Sequence[str], settings: Mapping[str, Any]) -> bool:
        """Whether the template shows the tools of these settings, which have these names."""
        return self._shows([self._shown(PROBE)], *names, settings=settings)

    def _shows(self, messages: Sequence[Message], *wanted: str, settings: Mapping[str, Any] | None = None) -> bool:
        try:
            text = self._apply(messages, "answer", settings)
        except Exception:  # a template may raise anything
            return False
        return all(part in text for part in wanted)

    @cached_property
    def takes_text(self) -> bool:
        """Whether contents are texts. Some templates, of models that see images, take lists of blocks only."""
        blocks = {**PROBE, "content": [_block(PROBE["content"])]}
        return self._shows([PROBE], PROBE["content"]) or not self._shows([blocks], PROBE["content"])

    @cached_property
    def takes_blocks(self) -> bool:
        """Whether a content may be a list of blocks: templates for texts raise an error, or print the list."""
        blocks = [_block(PROBE["content"])]
        try:
            text = self._apply([{**PROBE, "content": blocks}], "answer")
        except Exception:  # a template may raise anything
            return False
        return PROBE["content"] in text and str(blocks) not in text and json.dumps(blocks) not in text

    @cached_property
    def _call_form(self) -> tuple[Callable[[Any], Any], dict[str, Any]]:
        """How arguments are written, and what a message with calls has instead of an empty content. Most templates
        render arguments given as an object; some join texts. Some show calls only where the content is None."""
        forms = [
            (write, empty)
            for empty in ({"content": self._content("")}, {"content": None}, {})
            for write in (_as_object, _as_json)
        ]
        probe = probe_call("probe_tool")
        for write, empty in forms:
            message = {"role": "assistant", **empty, "tool_calls": [_call(c, write) for c in probe["tool_calls"]]}
            if self._shows([self._shown(PROBE), message], "probe_tool", "probe_argument"):
                return write, empty
        return forms[0]

    def _shown(self, message: Message) -> dict[str, Any]:
        # Keys with None stand for absent ones: templates test whether a key is defined.
        shown = {key: value for key, value in message.items() if value is not None and key != CALL_ERROR}
        calls = shown.pop("tool_calls", None)
        shown["content"] = self._content(message.get("content"))
        if calls:
            write, empty = self._call_form
            if not text_of(message):
                del shown["content"]
                shown |= empty
            shown["tool_calls"] = [_call(call, write) for call in calls]
        return shown

    def _content(self, content: Any) -> Any:
        if isinstance(content, str) and self.takes_text:
            return content
        if isinstance(content, list) and self.takes_blocks:
            return [_block(text) for text in _texts(content)]
        text = "".join(_texts(content))
        return text if self.takes_text else [_block(text)]


def text_of(message: Message) -> str:
    """Return the content of a message as one text; blocks of text are joined. Raises MessagesRefusedError for more."""
    return "".join(_texts(message.get("content")))


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and all(isinstance(block, Mapping) and "text" in block for block in content):
        return [str(block["text"]) for block in content]
    raise MessagesRefusedError(
        f"the content of a message is {shorten(content)}; content is a text, or a list of text blocks "
        '[{"type": "text", "text": "..."}]. Turn results of tools into text first'
    )


def _block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def calls_of(message: Message) -> Iterator[tuple[str, Any]]:
    """Yield name and arguments of each tool call of a message. Arguments that are an object as JSON text come as the
    object; none as an empty one."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield str(function.get("name")), _arguments(function.get("arguments"))


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str) and arguments.strip():
        try:
            decoded = json.loads(arguments)
        except ValueError:  # a client may pass on what its policy wrote
            return arguments
        return decoded if isinstance(decoded, dict) else arguments
    return arguments or {}


def _call(call: Message, write_arguments: Callable[[Any], Any]) -> dict[str, Any]:
    """A tool call as templates take it, with its own other keys."""
    if "function" not in call:  # without the wrapping of OpenAI's form
        call = {"id": call.get("id"), "function": {k: v for k, v in call.items() if k not in ("id", "type")}}
    kept = {key: value for key, value in call.items() if value is not None and value != ""}
    function = {key: value for key, value in call["function"].items() if value is not None}
    arguments = write_arguments(_arguments(function.get("arguments")))
    return {**kept, "type": "function", "function": {**function, "arguments": arguments}}


def probe_call(name: str, count: int = 1) -> dict[str, Any]:
    """Return an assistant message with tool calls, to try what a template does with it."""
    function = {"name": name, "arguments": {"probe_argument": "probe"}}
    calls = [{"id": PROBE_ID, "type": "function", "function": function}] * count
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_probes(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """The messages with another name in each tool call, which no text has, and the calls' own names by these."""
    names: dict[str, str] = {}
    probed: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            names[probe := f"probecall{len(names)}x"] = str(function.get("name"))
            renamed = {**function, "name": probe}
            calls.append({**call, "function": renamed} if "function" in call else renamed)
        probed.append({**message, "tool_calls": calls} if calls else message)
    return probed, names


def row_settings(columns: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the keywords that a row gives to the chat template: `tools` from the column of that name, and those in the
    column `chat_template_kwargs`, without those that are None. Both may be JSON text.

    Raises DataError, naming `row`, for values that cannot be used.
    """
    settings = _decoded(columns.get(KWARGS_COLUMN), KWARGS_COLUMN, row) or {}
    if not isinstance(settings, Mapping) or (fixed := {*settings} & {*FIXED_TEMPLATE_KWARGS, "chat_template"}):
        why = f"the library sets {', '.join(sorted(fixed))} itself" if isinstance(settings, Mapping) else "no mapping"
        raise _unusable(KWARGS_COLUMN, settings, row, why, "a mapping of the template's variables to values")
    settings = {name: value for name, value in settings.items() if value is not None}
    tools = _decoded(columns.get(TOOLS_COLUMN), TOOLS_COLUMN, row)
    if tools is None or tools == "" or (isinstance(tools, list | tuple) and not tools):
        return settings
    if isinstance(tools, list | tuple):
        tools = [_decoded(tool, TOOLS_COLUMN, row) for tool in tools]
    if not isinstance(tools, list) or not all(tool_names(tools)):
        raise _unusable(TOOLS_COLUMN, tools, row, "no list of schemas", "a list of JSON schemas of functions")
    return {**settings, "tools": tools}


def tool_names(tools: Sequence[Any]) -> list[str]:
    """Return the names in the schemas of tools; "" for what is no schema of a function."""
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else None for tool in tools]
    return [str(function.get("name") or "") if isinstance(function, Mapping) else "" for function in functions]


def _decoded(value: Any, column: str, row: int) -> Any:
    if hasattr(value, "dtype"):  # as in the records of a DataFrame
        wanted = "the DataFrame or the file itself as the dataset, or lists and dicts"
        raise _unusable(column, value, row, "an array of numpy", wanted)
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _unusable(column, value, row, f"no JSON: {error}", "JSON text") from None


def _unusable(column: str, value: Any, row: int, why: str, wanted: str) -> DataError:
    return DataError(
        f"row {row}: the column {column!r} is for the chat template, but {shorten(value)} cannot be used ({why}); give "
        f"{wanted}, or rename the column if only the rewards need it"
    )


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the name of the tool and the id of the call in every result of a tool. Some templates ask for
    them, while clients leave the name out, and a call that could not be read has neither."""
    names: dict[Any, str] = {}
    named: list[Message] = []
    for message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        if message.get("role") == "tool":
            called = message.get("tool_call_id")
            message = {"name": names.get(called, "tool"), "tool_call_id": _NO_CALL, **message}
        named.append(message)
    return named


def _as_object(arguments: Any) -> Any:
    return arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
