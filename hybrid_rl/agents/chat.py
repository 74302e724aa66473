"""Chat messages to token ids and back, so that what the policy wrote is never tokenised again."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

from hybrid_rl.agents.parsing import (
    CallFormat,
    MalformedCallError,
    ToolCall,
    argument_types,
    as_declared,
    checked_call,
    find_calls,
    format_of,
)
from hybrid_rl.agents.templates import ChatTemplate
from hybrid_rl.agents.trajectory import Conversation
from hybrid_rl.data.rendering import CALL_ERROR, PROBE, PROBE_ID, Ending, Message, calls_of, probe_call, text_of
from hybrid_rl.data.text import text_ids
from hybrid_rl.errors import HistoryRewrittenError, MessagesRefusedError, shorten

RewrittenHistory = Literal["fork", "keep", "error"]

_logger = logging.getLogger("hybrid_rl")
# The last tokens of a prompt, which are searched first for the start of the answer.
_OPENING_TOKENS = 256
_NOTHING = re.compile(r"(?:\s|<think>\s*</think>)+")

SPARE_TOKENS = 8  # more than are taken off where an answer ends


class Chat:
    """The chat template of a tokenizer, token by token (see `ChatFormat`).

    A prompt that goes on with a known conversation is made of that conversation's tokens and of what the template adds
    after its answer. Three renderings give the second part and the proof that it belongs there:

        before = render(messages before the answer)            ends with the header of the answer
        whole  = render(before + answer + new messages)        must begin with `before`
        other  = render(before + a marker + new messages)      what follows the marker is the tail

    What `whole` has between `before` and the tail is the answer as the template tells it. If it says the same as the
    answer that the policy wrote (spaces and the order of JSON keys aside), the history stands, and the tail is added,
    less a closing token that the answer has itself. Otherwise the template has rewritten its history.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_call_format: CallFormat | Literal["auto"] = "auto",
        rewritten_history: RewrittenHistory = "fork",
    ) -> None:
        """
        Args:
            tokenizer: a `transformers` tokenizer with a chat template.
            chat_template_kwargs: extra keywords for the chat template.
            tool_call_format: how the policy writes tool calls. auto: by the tokenizer's own `response_template` if it
                ships one, else by what its chat template renders.
            rewritten_history: what happens if the template renders earlier turns differently later on. fork: the new
                rendering starts another sample. keep: the tokens stay as they were, as if nothing had been rewritten.
                error: HistoryRewrittenError.

        Raises:
            ModelError: the tokenizer has no chat template.
        """
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, chat_template_kwargs)
        self.rewritten_history = rewritten_history
        self._asked_format = tool_call_format
        self._own_parser = tool_call_format == "auto" and getattr(tokenizer, "response_template", None) is not None
        self.call_format: CallFormat = (
            format_of(self.template.text) if tool_call_format == "auto" else tool_call_format  # type: ignore[assignment]
        )
        self._hidden = frozenset(map(int, tokenizer.convert_tokens_to_ids(list(self.template.specials))))
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._anchor = self._find_anchor()
        self._was_told = False
        self._problems: dict[Any, str] = {}  # by tools and what else was asked for

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls are looked for: not with tool_call_format="none"."""
        return self._asked_format != "none"

    @property
    def error_role(self) -> Literal["tool", "user"]:
        """The role of the message that answers a call which could not be read."""
        return self.template.error_role

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        known: Sequence[Conversation],
        most_tokens: int | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt (see `ChatFormat`). If the last message is the assistant's, it is continued.

        Raises:
            HistoryRewrittenError: the template has rewritten history, and rewritten_history is "error".
            MessagesRefusedError: there are none, the template refuses them, or it does not show tools or calls.
        """
        if not messages:
            raise MessagesRefusedError("a prompt has no messages; give at least one")
        if problem := self.problem_with_tools(tools, messages):
            raise MessagesRefusedError(problem)
        base = self._longest_known(messages, tools, known)
        new = messages[len(base.messages) :] if base else ()
        if base and not new:
            return list(base.token_ids[:-1] if base.token_ids[-1] in self._hidden else base.token_ids)
        ending: Ending = "open" if messages[-1].get("role") == "assistant" else "answer"
        whole = self.template.render((*base.messages, *new) if base else messages, tools, ending)
        if base is None:
            return self._encode(whole, most_tokens)
        seam = self._seam(base, new, whole, ending)
        if seam.difference:
            self._report(seam.difference)
            if self.rewritten_history == "fork" or seam.tail is None:
                return self._encode(whole, most_tokens)
        return [*base.token_ids, *self._missing(base.token_ids[-1], seam.tail or "", most_tokens)]

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Message] = ()
    ) -> dict[str, Any]:
        """Return an answer as an assistant message, what its prompt had begun of it included.

        Thinking goes to `reasoning_content` if the template knows that key; calls within thinking do not count. If a
        tool call cannot be read, no call of the answer is made: its whole text is the content, which renders as the
        policy wrote it, and the reason is in `tool_call_error`. A message of the role `error_role` with that reason
        lets the policy try again; templates do not see the key.
        """
        opening = self._opening_of(prompt_ids)
        digest = hashlib.blake2b(array("q", (*prompt_ids, *token_ids)).tobytes(), digest_size=8).hexdigest()
        if self._own_parser:
            return self._parse_own(self._decode(token_ids), self.template.header + opening, tools, digest)
        return self._parse_text(opening + self._decode(self._shown(token_ids)), tools, digest)

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Return the tokens of a prompt that is text (see `ChatFormat`)."""
        return self._encode_after(text) if goes_on else text_ids(self.tokenizer, [text])[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def problem_with_tools(self, tools: Sequence[Message], messages: Sequence[Message] = ()) -> str:
        """Return why the policy could not use these tools (JSON schemas): the template does not show it the tools, its
        own calls or their results, or what the template makes of a call is not read as one. Without tools, why it does
        not see the calls and results that are among these messages. "" if all is well."""
        has_calls = bool(tools) or any(message.get("tool_calls") for message in messages)
        has_results = bool(tools) or any(message.get("role") == "tool" for message in messages)
        if not has_calls and not has_results:
            return ""
        key = (_plain(tools), has_calls, has_results)
        if key not in self._problems:
            self._problems[key] = self._find_problem(tools, has_calls, has_results)
        return self._problems[key]

    def _find_problem(self, tools: Sequence[Message], has_calls: bool, has_results: bool) -> str:
        template = self.template
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        shown = template.render([PROBE], tools, "answer")
        call = probe_call((*names, "probe_tool")[0])
        result = {"role": "tool", "name": (*names, "probe_tool")[0], "tool_call_id": PROBE_ID}
        asked = template.render([PROBE, call], tools, "closed") if has_calls else ""
        omission = ""
        if missing := [name for name in names if name not in shown]:
            omission = f"the tool(s) {', '.join(missing)}"
        elif has_calls and "probe_argument" not in asked:
            omission = "the policy its own tool calls"
        elif has_results and not template.renders(
            [PROBE, call, {**result, "content": "probe result"}], "probe result", tools=tools
        ):
            omission = "the result of a tool"
        if omission:
            return (
                f"the chat template of {template.name} does not show {omission}; use the tokenizer of a model that was "
                "trained to call tools, or another template (data.chat_template_path) that renders `tools`, "
                "`message.tool_calls` and messages of the role `tool`"
            )
        start = template.up_to_answer(shown)
        written = asked.removeprefix(start).removesuffix(self._close_of(asked))
        if tools and self.reads_calls and list(calls_of(self.read(written, tools))) != list(calls_of(call)):
            return (
                f"the chat template of {template.name} renders a tool call as {written.strip()!r}, which is not read "
                f"as a call with tool_call_format={self.call_format!r}; set tool_call_format to the format of this "
                "model, or to 'none' to train without reading calls"
            )
        return ""

    def _seam(self, base: Conversation, new: Sequence[Message], whole: str, ending: Ending) -> _Seam:
        """Where the known answer ends in a new rendering, and what follows it."""
        *before, answer = base.messages
        # A thinking block that the prompt opens is a part of the answer: templates that drop thinking drop it too.
        start = self.template.up_to_answer(self.template.render(before, base.tools, "answer"))
        tail = self._after_answer(base, new, whole, ending)
        kept = whole[: len(whole) - len(tail or "")]
        if not kept.startswith(start):
            # Blocks with nothing in them come and go with the place of a turn, and mean nothing.
            head = self.template.up_to_answer(kept)
            if _NOTHING.sub(" ", head) == _NOTHING.sub(" ", start):
                start = head
        if not kept.startswith(start):
            return _Seam(tail, _first_difference(start, kept))
        if tail is None:
            return _Seam(None, "the answer is rendered differently as soon as messages follow it")
        rendering = kept[len(start) :]
        if _meaning(self.read(rendering, base.tools)) == _meaning(answer):
            return _Seam(tail, "")
        return _Seam(tail, _first_difference(_answer_text(answer), rendering))

    def _after_answer(self, base: Conversation, new: Sequence[Message], whole: str, ending: Ending) -> str | None:
        """The part of a rendering that follows the known answer's own text; None if it cannot be told."""
        *before, answer = base.messages
        mark = next(mark for i in count() if (mark := f"endofanswer{i}") not in whole)
        messages = [*before, {"role": "assistant", "content": mark}, *new]
        tail = self.template.after_mark(mark, messages, base.tools, ending)
        if tail is not None and whole.endswith(tail):
            return tail
        # Some templates take results of tools only after a call that they know.
        try:
            closed = self.template.render([*before, answer], base.tools, "closed")
        except MessagesRefusedError:
            return None
        if not whole.startswith(closed):
            return None
        return self._close_of(closed) + whole[len(closed) :]

    def _close_of(self, closed: str) -> str:
        """The text that closes a rendering: what closes answers, or the special token that closes calls instead."""
        return self.template.close if closed.endswith(self.template.close) else self._last_special(closed)

    def _last_special(self, text: str) -> str:
        """The last special token of a text and the space after it; "" if anything else follows that token."""
        ends = [token for token in self.template.specials if text.rstrip().endswith(token)]
        return text[len(text.rstrip()) - len(max(ends, key=len)) :] if ends else ""

    def _missing(self, last: int, tail: str, most_tokens: int | None) -> list[int]:
        """The tokens of a tail, less the one that closes the answer if the engine has made it. last: of the answer."""
        ids = self._encode_after(tail, most_tokens)
        if last not in self._hidden or not ids:
            return ids
        # A policy may end its turn by another token than the template's (<|eom_id|> for <|eot_id|>): one is enough. If
        # the template closes no turns (GLM), its first token opens the next one.
        ended_otherwise = ids[0] in self._hidden and self.template.close.strip()
        return ids[1:] if ids[0] == last or ended_otherwise else ids

    def _longest_known(
        self, messages: Sequence[Message], tools: Sequence[Message], known: Sequence[Conversation]
    ) -> Conversation | None:
        """The longest of the known conversations that these messages go on with; the latest of equals."""
        asked, shown = [_meaning(message) for message in messages], _plain(tools)
        for _, _, base in sorted(((len(base.messages), i, base) for i, base in enumerate(known)), reverse=True):
            fits = 0 < len(base.messages) <= len(messages) and base.token_ids and _plain(base.tools) == shown
            if fits and all(_meaning(mine) == theirs for mine, theirs in zip(base.messages, asked, strict=False)):
                return base
        return None

    def _report(self, difference: str) -> None:
        description = (
            f"the chat template of {self.template.name} renders earlier turns differently as soon as messages follow: "
            f"{difference}"
        )
        if self.rewritten_history == "error":
            raise HistoryRewrittenError(
                f'rewritten_history="error": {description}. Use a template that leaves earlier turns as they are '
                '(data.chat_template_path), or set rewritten_history to "fork" (train on each '
                'rendering as a sample of its own) or "keep" (go on with the tokens as they were)'
            )
        if not self._was_told:
            self._was_told = True
            kept = "the tokens stay as they were" if self.rewritten_history == "keep" else "a new sample starts"
            _logger.warning("%s: %s (rewritten_history=%r)", description, kept, self.rewritten_history)

    def read(self, text: str, tools: Sequence[Message] = ()) -> dict[str, Any]:
        """Return the text of an answer, without the token that ends it, as an assistant message (see `parse`)."""
        if self._own_parser:
            return self._parse_own(text + self.template.close.rstrip(), self.template.header, tools, "")
        return self._parse_text(text, tools, "")

    def _parse_own(self, text: str, prefix: str, tools: Sequence[Message], digest: str) -> dict[str, Any]:
        """Parse by the description that the tokenizer ships."""
        try:
            parts = self.tokenizer.parse_response(text, prefix=prefix, tools=list(tools) or None)
            calls = [checked_call(call.get("function", call)) for call in parts.pop("tool_calls", None) or ()]
            # Descriptions of formats without quotes read 7 as a number, even if the tool takes a text.
            calls = [as_declared(call, argument_types(tools)) for call in calls]
        except Exception as error:  # a broken description may raise anything, as may broken JSON
            return {"role": "assistant", "content": self._without_end(text), CALL_ERROR: _told(error)}
        content = parts.pop("content", None)
        message = {"role": "assistant", "content": content if isinstance(content, str) else "", **parts}
        if calls:
            message["content"] = message["content"].strip()
        return self._with_calls(message, calls, self._without_end(text), digest)

    def _parse_text(self, text: str, tools: Sequence[Message], digest: str) -> dict[str, Any]:
        reasoning, said = _split_thinking(text)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        # Where the template does not know thinking apart, it stays in the content; no call is looked for in it.
        kept = ""
        if self.template.knows_reasoning:
            if reasoning:
                message["content"] = said.lstrip("\n")
            if thought := _bare_thinking(reasoning):
                message["reasoning_content"] = thought
        else:
            kept = reasoning
            message["content"] = reasoning + said
        try:
            content, calls = find_calls(said, self.call_format, argument_types(tools))
        except MalformedCallError as error:
            return {**message, CALL_ERROR: _told(error)}
        if not calls:
            return message
        verbatim = message["content"]
        return self._with_calls({**message, "content": kept + content}, calls, verbatim, digest)

    def _with_calls(
        self, message: dict[str, Any], calls: Sequence[ToolCall], verbatim: str, digest: str
    ) -> dict[str, Any]:
        if len(calls) > 1 and not self.template.takes_many_calls:
            several = f"the answer holds {len(calls)} tool calls; make one call per answer"
            return {**message, "content": verbatim, CALL_ERROR: several}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id or hashlib.blake2b(f"{digest}{place}".encode(), digest_size=5).hexdigest()[:9],
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for place, call in enumerate(calls)
            ]
        return message

    def _opening_of(self, prompt_ids: Sequence[int]) -> str:
        """The start of the answer that its prompt gives away: `<think>`, or an answer that the caller has begun."""
        header = self.template.header
        for ids in (prompt_ids[-_OPENING_TOKENS:], prompt_ids) if header else ():
            start = self.template.up_to_answer(text := self._decode(ids))
            if start.endswith(header):
                return text[len(start) :]
        return ""

    def _shown(self, token_ids: Sequence[int]) -> list[int]:
        return [int(i) for i in token_ids if i not in self._hidden]

    def _without_end(self, text: str) -> str:
        return text[: len(text) - len(end)] if (end := self._last_special(text)) else text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        # Tools may return megabytes, and while they are cut into tokens no other trajectory goes on: of a text that is
        # too long its beginning shows that.
        most = None if most_tokens is None else most_tokens + SPARE_TOKENS
        if most is not None and len(text) > most * self._longest_token:
            start = self._encode(text[: most * self._longest_token])
            if len(start) >= most:
                return start
        # Without a warning about lengths: what is too long is refused elsewhere.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _find_anchor(self) -> str:
        """A special token to stand before a text that continues another: without it, some tokenizers add the space
        that they put before the first word of a text."""
        for token in self.tokenizer.all_special_tokens:
            if len(alone := self._encode(token)) == 1 and self._encode(f"{token}\n")[:1] == alone:
                return str(token)
        return ""

    def _encode_after(self, text: str, most_tokens: int | None = None) -> list[int]:
        if not self._anchor:
            return self._encode(text, most_tokens)
        return self._encode(self._anchor + text, most_tokens)[1:]


class _Seam(NamedTuple):
    """tail: what the template puts after a known answer, None if it cannot be told; difference: between what was known
    and its new rendering, "" if there is none."""

    tail: str | None
    difference: str


def _split_thinking(text: str) -> tuple[str, str]:
    """An answer's thinking, tags included, and what it says after it. Thinking without an end has nothing after it."""
    head, end, rest = text.partition("</think>")
    if end:
        return head + end, rest
    return (text, "") if text.lstrip().startswith("<think>") else ("", text)


def _bare_thinking(text: str) -> str:
    return text.strip().removeprefix("<think>").removesuffix("</think>").strip("\n")


def _told(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"The tool call could not be read, and no tool was called: {reason}"


def _meaning(message: Message) -> tuple[Any, ...]:
    """What a message says, whatever form it has: clients return contents as blocks, arguments as JSON text, calls with
    other ids, keys with None."""
    role = message.get("role")
    if role != "assistant":
        others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_call_id")}
        return role, text_of(message), _plain({key: value for key, value in others.items() if value})
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [(name, _plain(arguments)) for name, arguments in calls_of(message)]
    return role, text_of(message).strip(), str(reasoning).strip(), calls


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _answer_text(answer: Message) -> str:
    calls = "".join(f" {name}({_plain(arguments)})" for name, arguments in calls_of(answer))
    return f"{answer.get('reasoning_content') or ''} {text_of(answer)}{calls}".strip()


def _first_difference(old: str, new: str, max_chars: int = 40) -> str:
    """Where two texts part, shown from a little before."""
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(place - max_chars // 2, 0)
    shown = [shorten(text[start : place + max_chars], 2 * max_chars) for text in (old, new)]
    return f"{shown[0]} has become {shown[1]}"
