"""A tokenizer's chat template: messages to text, in the form that this template takes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from hybrid_rl.agents.parsing import MARKERS
from hybrid_rl.data.prompts import shorten
from hybrid_rl.errors import MessagesRefusedError, ModelError

Message: TypeAlias = Mapping[str, Any]
# How a rendered conversation ends: with the header of the answer to come, after its last message, or within it.
Ending: TypeAlias = Literal["answer", "closed", "open"]

# Why a tool call could not be read. A key of ours, which no template sees.
CALL_ERROR = "tool_call_error"
PROBE_ID = "probe0id0"  # nine letters and digits: Mistral's templates refuse others
_NO_CALL = "000000000"  # what the result of a call names that could not be read
PROBE = {"role": "user", "content": "probe question"}


class ChatTemplate:
    """Renders messages. What differs between templates (how arguments and contents are given) is found by trying.

    text: the template's source; name: of the tokenizer, for messages.
    """

    def __init__(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises ModelError if the tokenizer has no chat template, and none is among the keywords."""
        self.tokenizer = tokenizer
        self.kwargs = dict(chat_template_kwargs or {})
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        try:
            self.text: str = tokenizer.get_chat_template(self.kwargs.get("chat_template"), tools=[{}])
        except (ValueError, AttributeError):
            self.text = ""
        if not self.text:
            raise ModelError(
                f"the tokenizer {self.name} has no chat template, which agents need to show messages to the policy; "
                "use the tokenizer of an instruct model, or set tokenizer.chat_template"
            )
        # Special tokens that carry nothing of an answer: they open and close turns.
        self.specials = tuple(token for token in tokenizer.all_special_tokens if token.strip() not in MARKERS)
        # In this order: how contents are given decides whether a message with tool calls can be shown at all.
        self._takes_text = True
        self._write_arguments: Callable[[Any], Any] = _as_dict
        self._takes_text = self._try_contents()
        self._write_arguments = self._try_arguments()

    def render(self, messages: Sequence[Message], tools: Sequence[Message], ending: Ending) -> str:
        """Return the text of a conversation. Raises MessagesRefusedError if the template does."""
        shown = [self._for_template(message) for message in messages]
        try:
            try:
                text = self._apply(shown, tools, ending)
            except Exception:  # a template may raise anything
                if shown == (named := _with_names(shown)):
                    raise
                text = self._apply(named, tools, ending)
        except Exception as error:
            raise MessagesRefusedError(
                f"the chat template of {self.name} refuses the messages {shorten(list(messages), 200)} "
                f"({type(error).__name__}: {error}); correct them, or use another template "
                '(chat_template_kwargs={"chat_template": ...})'
            ) from error
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _apply(self, messages: Sequence[Message], tools: Sequence[Message], ending: Ending) -> str:
        settings = dict(self.kwargs)
        if tools:
            settings["tools"] = [dict(tool) for tool in tools]
        text: str = self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=ending == "answer",
            continue_final_message=ending == "open",
            **settings,
        )
        return text

    def renders(self, messages: Sequence[Message], *wanted: str, tools: Sequence[Message] = ()) -> bool:
        """Return whether the template takes these messages, and all wanted texts are in what it makes of them."""
        try:
            text = self.render(messages, tools, "answer")
        except MessagesRefusedError:
            return False
        return all(one in text for one in wanted)

    @cached_property
    def header(self) -> str:
        """The text that opens an answer, up to a thinking block that it may open; "" if the template adds none."""
        closed, asked = (self.render([PROBE], (), ending) for ending in ("closed", "answer"))
        return asked.removeprefix(closed).partition("<think>")[0] if asked.startswith(closed) else ""

    @cached_property
    def close(self) -> str:
        """The text that the template puts after an answer; "" if it does not close answers."""
        return (
            self.after_mark("endofanswer", [PROBE, {"role": "assistant", "content": "endofanswer"}], (), "closed") or ""
        )

    def up_to_answer(self, text: str) -> str:
        """Return the text up to the header that opens the answer at its end, the header included; else all of it."""
        start, header, opening = text.rpartition(self.header) if self.header else ("", "", "")
        return start + header if header and not any(token in opening for token in self.specials) else text

    def after_mark(
        self, mark: str, messages: Sequence[Message], tools: Sequence[Message], ending: Ending
    ) -> str | None:
        """Return what follows a mark in the rendering; None if the template refuses the messages or alters the mark."""
        try:
            text = self.render(messages, tools, ending)
        except MessagesRefusedError:
            return None
        return text.partition(mark)[2] if mark in text else None

    @cached_property
    def knows_reasoning(self) -> bool:
        """Whether the thinking of a message goes to its key `reasoning_content`."""
        return "reasoning_content" in self.text

    @cached_property
    def takes_many_calls(self) -> bool:
        """Whether an answer may hold more than one tool call; also true of a template that renders none at all."""
        one, two = ([PROBE, probe_call("probe_tool", count)] for count in (1, 2))
        return not self.renders(one) or self.renders(two)

    @cached_property
    def error_role(self) -> Literal["tool", "user"]:
        """The role of a message that tells the policy about a call that could not be read. "tool", unless the template
        takes tool messages only after a tool call that it understood."""
        answer = {"role": "assistant", "content": "probe answer"}
        error = {"role": "tool", "content": "probe error"}
        shown = self.renders([PROBE, answer, error, answer, error], "probe error")
        return "tool" if shown else "user"

    def _try_contents(self) -> bool:
        """Whether contents are texts. Some templates, of models that see images, take lists of blocks only."""
        if self.renders([PROBE], PROBE["content"]):
            return True
        self._takes_text = False
        return not self.renders([PROBE], PROBE["content"])

    def _try_arguments(self) -> Callable[[Any], Any]:
        """Most templates render arguments given as a dict; some join texts, so that they take JSON text only."""
        for self._write_arguments in (_as_dict, _as_json):
            if self.renders([PROBE, probe_call("probe_tool")], "probe_tool", "probe_argument"):
                return self._write_arguments
        return _as_dict

    def _for_template(self, message: Message) -> dict[str, Any]:
        # Keys with None stand for absent ones: templates test whether a key is defined.
        shown = {key: value for key, value in message.items() if value is not None and key != CALL_ERROR}
        content = text_of(message)
        shown["content"] = content if self._takes_text else [{"type": "text", "text": content}]
        calls = [
            {
                **{key: call[key] for key in ("id",) if call.get(key)},
                "type": "function",
                "function": {"name": name, "arguments": self._write_arguments(arguments)},
            }
            for call, (name, arguments) in zip(shown.pop("tool_calls", ()), calls_of(message), strict=True)
        ]
        return {**shown, "tool_calls": calls} if calls else shown


def text_of(message: Message) -> str:
    """Return the content of a message as one text; blocks of text are joined. Raises MessagesRefusedError for more."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(block, Mapping) and "text" in block for block in content):
        return "".join(str(block["text"]) for block in content)
    raise MessagesRefusedError(
        f"the content of a message is {shorten(content)}; content is a text, or a list of text blocks "
        '[{"type": "text", "text": "..."}]. Turn results of tools into text first'
    )


def calls_of(message: Message) -> Iterator[tuple[str, Any]]:
    """Yield name and arguments of each tool call of a message. Arguments that are JSON text come as the value."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # a client may pass on what its policy wrote
                arguments = json.loads(arguments)
        yield str(function.get("name")), arguments


def probe_call(name: str, count: int = 1) -> dict[str, Any]:
    """Return an assistant message with tool calls, to try what a template does with it."""
    function = {"name": name, "arguments": {"probe_argument": "probe"}}
    calls = [{"id": PROBE_ID, "type": "function", "function": function}] * count
    return {"role": "assistant", "content": "", "tool_calls": calls}


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


def _as_dict(arguments: Any) -> Any:
    return arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
