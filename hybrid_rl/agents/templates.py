"""A tokenizer's chat template: messages to text, in the form that this template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from hybrid_rl.agents.parsing import MARKERS
from hybrid_rl.data.rendering import PROBE, Ending, Message, MessageRenderer, probe_call
from hybrid_rl.errors import MessagesRefusedError, ModelError, shorten


class ChatTemplate:
    """Renders messages in the form of the template (`MessageRenderer`), and knows how it opens and closes answers.

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
                "use the tokenizer of an instruct model, or set data.chat_template_path"
            )
        # Special tokens that carry nothing of an answer: they open and close turns.
        self.specials = tuple(token for token in tokenizer.all_special_tokens if token.strip() not in MARKERS)
        self._renderer = MessageRenderer(tokenizer, self.kwargs)

    def render(self, messages: Sequence[Message], tools: Sequence[Message], ending: Ending) -> str:
        """Return the text of a conversation. Raises MessagesRefusedError if the template does."""
        try:
            text = self._renderer.render(messages, ending, {"tools": [dict(tool) for tool in tools]} if tools else None)
        except MessagesRefusedError:
            raise
        except Exception as error:  # a template may raise anything
            raise MessagesRefusedError(
                f"the chat template of {self.name} refuses the messages {shorten(list(messages), 200)} "
                f"({type(error).__name__}: {error}); correct them, or use another template (data.chat_template_path)"
            ) from error
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def renders(self, messages: Sequence[Message], *wanted: str, tools: Sequence[Message] = ()) -> bool:
        """Return whether the template takes these messages, and all wanted texts are in what it makes of them."""
        try:
            text = self.render(messages, tools, "answer")
        except MessagesRefusedError:
            return False
        return all(part in text for part in wanted)

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
