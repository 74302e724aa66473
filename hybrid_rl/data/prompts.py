"""Prompts: the form of a dataset row, and the encoding of a prompt as token ids."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from hybrid_rl.data.rendering import (
    FIXED_TEMPLATE_KWARGS,
    KWARGS_COLUMN,
    TEMPLATE_CALL_KWARGS,
    TEMPLATE_COLUMNS,
    TOOLS_COLUMN,
    Ending,
    MessageRenderer,
    row_settings,
    tool_names,
)
from hybrid_rl.data.text import IDS_ONLY, text_ids
from hybrid_rl.errors import ConfigError, DataError, ModelError, shorten

Messages: TypeAlias = list[dict[str, Any]]
Prompt: TypeAlias = str | Messages
PromptKind: TypeAlias = Literal["text", "messages"]
OverlongPolicy: TypeAlias = Literal["error", "drop", "truncate"]

PROMPT_COLUMN = "prompt"
# Keywords of the reward call that are not dataset columns: they would hide a column of the same name.
RESERVED_COLUMNS = (
    *("prompts", "completions", "completion_ids", "completion_lengths", "completion_openings"),
    "trainer_state",
    *("log_extra", "log_metric"),
)
# The names that TRL gives to columns whose contents (images, sound) the model is shown besides the text.
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
NOT_SHOWN = "Images, audio and video cannot be used yet"


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready for rollout.

    Attributes:
        index: row index in the dataset; in a stream, the count of rows before it in the same pass.
        prompt: text or chat messages, as the user gave it.
        prompt_ids: token ids that the model will see (at least one). An agent's environment may add to them.
        columns: every other dataset column of the row; the reward call receives them by name.
        has_prompt: whether the dataset has a prompt; if not, `prompt` is an empty one.
    """

    index: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    has_prompt: bool = True


class PromptRoom(NamedTuple):
    """The most tokens that a prompt may have whatever the configuration says, and the reason for that limit."""

    num_tokens: int
    reason: str


def check_plain_names(names: Sequence[Any], where: str) -> None:
    """Raise DataError unless column names are strings, each there once. `where` names the dataset or row."""
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"{where} has the column name {shorten(name)}; column names must be strings: rename it")
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise DataError(f"{where} has the column {duplicates[0]!r} more than once; rename or drop one of them")


def check_column_names(names: Sequence[Any], where: str, *, needs_prompt: bool = True) -> None:
    """Raise DataError unless all columns can be passed to a reward function by keyword, and, if needs_prompt, there is
    a column `prompt`.

    `where` names the dataset or row in the message.
    """
    check_plain_names(names, where)
    if needs_prompt and PROMPT_COLUMN not in names:
        near = difflib.get_close_matches(PROMPT_COLUMN, names, n=1, cutoff=0.5)
        hint = f" (the nearest name is {near[0]!r})" if near else ""
        present = ", ".join(repr(name) for name in names) or "none"
        raise DataError(f"{where} has no `prompt` column; its columns are {present}{hint}. Rename one to `prompt`")
    check_reserved_columns(names, where)


def check_reserved_columns(names: Iterable[str], where: str) -> None:
    """Raise DataError for a column that would hide what the library itself passes to reward functions."""
    for name in names:
        if name in RESERVED_COLUMNS:
            raise DataError(
                f"{where} has a column {name!r}, which is a keyword of the reward call; rename the column "
                f"(reserved: {', '.join(RESERVED_COLUMNS)})"
            )


def prompt_kind(prompt: Any, row: int, *, may_be_empty: bool = False) -> PromptKind:
    """Return whether a prompt is text or chat messages; raise DataError, naming `row`, if it is neither or is empty.
    may_be_empty: whether messages may have no text, because an environment adds it."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"row {row}: the prompt {prompt!r} is empty; remove the row or give it a text")
        return "text"
    if not isinstance(prompt, list | tuple):
        raise DataError(
            f"row {row}: the prompt {shorten(prompt)} is of type {type(prompt).__name__}; a prompt is a string or a "
            'list of messages such as [{"role": "user", "content": "..."}]'
        )
    if not prompt:
        raise DataError(f"row {row}: the prompt is an empty list of messages; remove the row or add a message")
    for position, message in enumerate(prompt):
        check_message(message, f"row {row}, message {position}")
    if not may_be_empty and all(
        not _content_text(message).strip() and not message.get("tool_calls") for message in prompt
    ):
        raise DataError(f"row {row}: the messages {shorten(prompt)} contain no text; remove the row or fill it")
    if not may_be_empty and all(message["role"] in ("system", "developer", "assistant") for message in prompt):
        roles = ", ".join(dict.fromkeys(message["role"] for message in prompt))
        raise DataError(
            f"row {row}: the messages {shorten(prompt)} have no message of a user, only of {roles}; add what the model "
            "is to answer, or remove the row"
        )
    return "messages"


def check_message(message: Any, where: str) -> None:
    """Raise DataError, naming `where`, for what is not a message with a role, a text or tool calls."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f'{where} is {shorten(message)}; a message is a dict with "role" (a string) and "content"')
    calls, old_call = message.get("tool_calls"), message.get("function_call")
    if old_call:
        raise DataError(f"{where}: the function_call {shorten(old_call)} has the old form; give it as tool_calls")
    if calls is not None and not (isinstance(calls, list | tuple) and all(tool_names(calls))):
        raise DataError(
            f"{where}: the tool_calls {shorten(calls)} cannot be used; give a list such as "
            '[{"type": "function", "function": {"name": "...", "arguments": {...}}}]'
        )
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if isinstance(content, list) and all(is_text_block(block) for block in content):
        return
    raise DataError(
        f"{where}: the content {shorten(content)} is of type {type(content).__name__}; content is a string, or a list "
        'of text blocks [{"type": "text", "text": "..."}] if the chat template takes one. '
        f"{NOT_SHOWN}"
    )


def check_media(columns: Mapping[str, Any], row: int) -> None:
    """Raise DataError for a column of images, video or audio that is not empty: without them the model would learn to
    answer blindly."""
    for name in MEDIA_COLUMNS:
        if is_shown_elsewhere(columns.get(name)):
            raise DataError(
                f"row {row} has something in the column {name!r}. {NOT_SHOWN}, so the model would be trained on the "
                "text alone: drop the column if that is intended, or rename it if only the rewards need it"
            )


def is_text_block(block: Any) -> bool:
    """Whether a part of a message's content is text."""
    return isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str)


def is_shown_elsewhere(value: Any) -> bool:
    """Whether the value of a media column stands for one or more images or sounds; None and empty lists do not."""
    if isinstance(value, list | tuple):
        return any(map(is_shown_elsewhere, value))
    return value is not None and not (isinstance(value, str) and not value)


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


class PromptEncoder:
    """Turns prompts into the token ids that the model sees.

    Text goes through `tokenizer(text)` with the special tokens that the tokenizer puts before it; one that begins with
    the BOS token gets no second one. Messages go through
    `apply_chat_template` with a generation prompt; if the last message is the assistant's, they are continued instead.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_length: int | None,
        overlong_prompts: OverlongPolicy = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        room: PromptRoom | None = None,
        unused_columns: Mapping[str, str] | None = None,
        needs_prompts: bool = True,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        apply_chat_template: bool | None = None,
    ) -> None:
        """
        Args:
            tokenizer: a `transformers` tokenizer.
            max_prompt_length: the most tokens of a prompt; None = no limit.
            overlong_prompts: what happens to longer ones: `error`; `drop` the row; `truncate` to the last
                `max_prompt_length` tokens.
            chat_template_kwargs: extra keywords for the chat template (`enable_thinking`, `tools` ...).
            room: the highest value that max_prompt_length could have; None = any.
            unused_columns: columns of TEMPLATE_COLUMNS that the template does not get, with the reason why they must
                be empty; "" for those that something else uses.
            needs_prompts: whether every row must have a prompt with text; if not, an environment or an agent adds it.
            prompt_column: the column with the prompt; None = `prompt`, or that of a format that is recognised.
            system_prompt: begins every prompt, which must be messages, as the message of the system; None = none.
            apply_chat_template: whether a text becomes the message of a user; None = questions of recognised formats
                do, if there is a chat template.

        Raises:
            ConfigError: texts are to become messages without a chat template, or it does not read a keyword.
        """
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts = overlong_prompts
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.room = room
        self.unused_columns = dict(unused_columns or {})
        self.needs_prompts = needs_prompts
        self.prompt_column, self.system_prompt = prompt_column, system_prompt
        self.apply_chat_template = apply_chat_template
        if apply_chat_template and not self.has_template:
            raise ConfigError(
                "apply_chat_template=true, but the tokenizer has no chat template; use the tokenizer of an instruct "
                "model, or set chat_template_path"
            )
        self.renderer = MessageRenderer(tokenizer, chat_template_kwargs)
        self._shows_tools = False  # whether the template was seen to show those of a row
        for key in self.chat_template_kwargs:
            if key in FIXED_TEMPLATE_KWARGS:
                raise ConfigError(f"chat_template_kwargs has {key!r}, which the library sets itself; remove it")
        if unread := self._unread(self.chat_template_kwargs):
            raise ConfigError(
                f"chat_template_kwargs has {unread!r}, but the chat template does not use a variable of that name; "
                "correct or remove it"
            )

    def encode(
        self,
        prompts: Sequence[Prompt],
        rows: Sequence[int] | None = None,
        kind: PromptKind | None = None,
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each prompt, whatever its length (see `limit`).

        Args:
            prompts: all text or all messages.
            rows: row index of each prompt for error messages; default 0, 1, 2 ...
            kind: that of row 0 of the dataset, which all must have; None: that of the first of these prompts.
            columns: those of each row, of which the chat template gets TEMPLATE_COLUMNS; None = there are none.

        Raises:
            DataError: a prompt is empty, of a wrong type, cannot be rendered or has no tokens; text and messages
                are mixed; messages without a chat template; columns that cannot be shown.
        """
        rows = range(len(prompts)) if rows is None else rows
        if not prompts:
            return []
        first, first_row = (self.kind(prompts[0], rows[0]), rows[0]) if kind is None else (kind, 0)
        for prompt, row in zip(prompts, rows, strict=True):
            if self.kind(prompt, row) != first:
                raise DataError(
                    f"row {row}: the prompt is {self.kind(prompt, row)}, but that of row {first_row} is {first}; "
                    "give all prompts of a dataset as text, or all as messages"
                )
        settings = [self._settings(own, row, first) for own, row in zip(columns or [{}] * len(rows), rows, strict=True)]
        if first == "text":
            ids = _batch_or_blame(partial(text_ids, self.tokenizer), prompts, rows)
        else:
            ids = self._encode_messages(prompts, rows, settings)
        if not all(ids):
            place = next(place for place, prompt_ids in enumerate(ids) if not prompt_ids)
            raise DataError(
                f"row {rows[place]}: the tokenizer produces no tokens for the prompt {shorten(prompts[place])}; "
                "change the prompt or the tokenizer"
            )
        return ids

    def kind(self, prompt: Any, row: int) -> PromptKind:
        """Return whether a prompt is text or messages. Raises DataError for one that cannot be used."""
        return prompt_kind(prompt, row, may_be_empty=not self.needs_prompts)

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(getattr(self.tokenizer, "chat_template", None) or self.chat_template_kwargs.get("chat_template"))

    @property
    def bare_prompt(self) -> Prompt:
        """The prompt of a row that has none: a message without text, or any text if there is no chat template."""
        return [{"role": "user", "content": ""}] if self.has_template else "."

    @property
    def empty_prompt(self) -> Prompt:
        """The same, with the system prompt if there is one."""
        return self.dressed(self.bare_prompt, 0) if self.dresses else self.bare_prompt

    @property
    def dresses(self) -> bool:
        """Whether `dressed` may change prompts of any dataset."""
        return self.system_prompt is not None or bool(self.apply_chat_template)

    def dressed(self, prompt: Any, row: int, *, is_question: bool = False) -> Any:
        """Return a prompt as messages if texts are to become messages, and with the system prompt in front.

        is_question: whether the text is a question of a recognised format. What is no prompt is returned as it is.
        Raises DataError, naming `row`, for a prompt that cannot have the system prompt.
        """
        as_message = (is_question and self.has_template) if self.apply_chat_template is None else None
        if isinstance(prompt, str) and prompt.strip() and (as_message or self.apply_chat_template):
            prompt = [{"role": "user", "content": prompt}]
        if self.system_prompt is None:
            return prompt
        if isinstance(prompt, str):
            raise DataError(
                f"row {row}: the prompt {shorten(prompt)} is text, which has no place for data.system_prompt; set "
                "data.apply_chat_template=true, which makes it the message of a user"
            )
        if not isinstance(prompt, list | tuple) or not prompt:
            return prompt
        if isinstance(prompt[0], Mapping) and prompt[0].get("role") in ("system", "developer"):
            raise DataError(
                f"row {row}: the prompt begins with a message of the {prompt[0]['role']}, "
                f"{shorten(prompt[0].get('content'))}, and data.system_prompt is set too; leave one of them out"
            )
        return [{"role": "system", "content": self.system_prompt}, *prompt]

    def limit(self, ids: list[int], row: int) -> list[int] | None:
        """Apply `max_prompt_length` to one prompt: return its ids, its last ids (`truncate`) or None (`drop`).

        Raises:
            DataError: the prompt is too long and `overlong_prompts` is `error`.
        """
        limit = self.max_prompt_length
        if limit is None or len(ids) <= limit:
            return ids
        if self.overlong_prompts == "error":
            raise self.overlong_error(1, len(ids), row)
        return None if self.overlong_prompts == "drop" else ids[-limit:]

    def overlong_error(self, num_over: int, longest: int, first_row: int) -> DataError:
        """Return the error for `num_over` prompts that are too long, the longest of `longest` tokens."""
        return DataError(
            f"max_prompt_length={self.max_prompt_length}, but {num_over} prompt(s) are longer: the longest has "
            f"{longest} tokens, the first is row {first_row}. {self.remedy(longest).capitalize()}, or set "
            "overlong_prompts to 'drop' (leave such rows out) or 'truncate' (keep the last tokens)"
        )

    def _settings(self, columns: Mapping[str, Any], row: int, kind: PromptKind) -> dict[str, Any]:
        """Return what the columns of a row give to the chat template. Raises DataError if they cannot be shown."""
        check_media(columns, row)
        for name, reason in self.unused_columns.items():
            if reason and columns.get(name):
                raise DataError(f"row {row} has something in the column {name!r}, but {reason}; drop or rename it")
        used = [name for name in TEMPLATE_COLUMNS if name not in self.unused_columns]
        settings = row_settings({name: columns.get(name) for name in used}, row)
        if settings and kind == "text":
            filled = next(name for name in used if columns.get(name))
            raise DataError(
                f"row {row}: the column {filled!r} is for the chat template, but the prompt is text; give messages, "
                "set data.apply_chat_template=true, or rename the column if only the rewards need it"
            )
        if not settings or not self.has_template:
            return settings
        if unread := self._unread(settings):
            raise DataError(
                f"row {row}: {KWARGS_COLUMN!r} has {unread!r}, but the chat template does not use a variable of that "
                "name; correct or remove it"
            )
        if (tools := settings.get("tools")) and not self._shows_tools:
            if not self.renderer.shows_tools(tool_names(tools), settings):
                raise DataError(
                    f"row {row}: the column {TOOLS_COLUMN!r} has {', '.join(tool_names(tools))}, but the chat template "
                    "does not show tools; use one that renders `tools` (data.chat_template_path), or rename the column "
                    "if only the rewards need it"
                )
            self._shows_tools = True
        return settings

    def _unread(self, keys: Iterable[str]) -> str | None:
        """Return the first keyword that the chat template does not read."""
        template = self.chat_template_kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)
        if not isinstance(template, str):
            return None
        variables = TEMPLATE_CALL_KWARGS | {*re.findall(r"\w+", template)}
        return next((key for key in keys if key not in variables), None)

    def remedy(self, num_tokens: int) -> str:
        """Return what to do about a prompt of so many tokens that is too long: raise the limit, if that is possible."""
        if self.room is None or num_tokens <= self.room.num_tokens:
            return f"raise max_prompt_length to {num_tokens}"
        return f"shorten them: {self.room.reason} leaves room for {self.room.num_tokens} tokens"

    def _encode_messages(
        self, prompts: Sequence[Any], rows: Sequence[int], settings: Sequence[Mapping[str, Any]]
    ) -> list[list[int]]:
        if not self.has_template:
            raise DataError(
                f"row {rows[0]}: the prompt is a list of messages, but the tokenizer has no chat template; use the "
                "tokenizer of an instruct model, set data.chat_template_path, or give prompts as text"
            )
        texts = [self._render(*parts) for parts in zip(prompts, rows, settings, strict=True)]

        def tokenize(batch: Sequence[Any]) -> list[list[int]]:
            # The template has written all special tokens.
            ids: list[list[int]] = self.tokenizer(list(batch), add_special_tokens=False, **IDS_ONLY)["input_ids"]
            return ids

        return _batch_or_blame(tokenize, texts, rows)

    def _render(self, prompt: Sequence[Any], row: int, settings: Mapping[str, Any]) -> str:
        try:
            ending: Ending = "open" if prompt[-1]["role"] == "assistant" else "answer"
            text = self.renderer.render(prompt, ending, settings)
            self.renderer.check_shown(prompt, ending, settings)
        except Exception as error:  # templates raise anything
            raise DataError(
                f"row {row}: the prompt {shorten(prompt)} is refused by the chat template "
                f"({type(error).__name__}: {error}); correct the row"
            ) from error
        return text


def _batch_or_blame(
    encode: Callable[[Sequence[Any]], list[list[int]]], prompts: Sequence[Any], rows: Sequence[int]
) -> list[list[int]]:
    """Encode in one call; if that raises, one by one, to name the row. Tokenizers may raise anything."""
    try:
        return encode(prompts)
    except ModelError:  # of the tokenizer, not of a row
        raise
    except Exception as batch_error:
        for prompt, row in zip(prompts, rows, strict=True):
            try:
                encode([prompt])
            except Exception as error:
                raise DataError(
                    f"row {row}: the prompt {shorten(prompt)} cannot be tokenised ({type(error).__name__}: {error}); "
                    "correct the row"
                ) from error
        raise DataError(
            f"rows {rows[0]} to {rows[-1]} can be encoded one by one but not together "
            f"({type(batch_error).__name__}: {batch_error}); report this tokenizer"
        ) from batch_error
