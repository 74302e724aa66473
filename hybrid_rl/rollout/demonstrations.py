"""Demonstrations: batches whose completions come from the dataset, for supervised fine-tuning.

The rows are in TRL's prompt-completion format: the column `completion` holds a text, or chat messages: one of the
assistant. A completion becomes the tokens that a policy would have to produce after the prompt's tokens, up to and
with the one that ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hybrid_rl.batch import Batch
from hybrid_rl.data.prompts import PromptRow, check_message
from hybrid_rl.data.rendering import PROBE, Ending, MessageRenderer, row_settings
from hybrid_rl.data.source import SizedSource, StreamSource
from hybrid_rl.data.text import text_ids
from hybrid_rl.engines.base import FinishedSample, SamplingParams
from hybrid_rl.errors import DataError, ModelError, shorten
from hybrid_rl.metrics.metric_sums import Timings
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.sample_columns import columns_of

COMPLETION_COLUMN = "completion"
DEMONSTRATION = "demonstration"  # in the place of a reward function's name: each has the reward 1
CHECKED_ROWS = 1024  # tokenised together while a dataset is checked


class DemonstrationEncoder:
    """Turns the completions of dataset rows into token ids.

    Text is tokenised with its prompt, as one text, and split at the end of the prompt's tokens. If a token would cross
    that border, the completion is tokenised by itself, since a policy gets the prompt's tokens as they are. Messages go
    through the chat template with their prompt, and the result must begin as that of the prompt by itself. What a
    template writes after the token that ends the completion is left out: a rollout stops there.

    chat_template_kwargs: those of the prompts.
    """

    def __init__(self, tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._renderer = MessageRenderer(tokenizer, chat_template_kwargs)
        self._next_tokens: dict[str, int | None] = {}  # after an answer, by the role of the message that follows

    def encode(self, rows: Sequence[PromptRow], params: SamplingParams) -> list[list[int]]:
        """Return the token ids of each row's completion, whatever its length. The last one is one of the stop tokens
        in `params`.

        Raises DataError, naming the row, for a completion that is missing, of a wrong type or cannot be tokenised
        after its prompt, ModelError for a tokenizer that cannot be used.
        """
        if not rows:
            return []
        is_chat = not isinstance(rows[0].prompt, str)
        pairs = [self._chat_texts(row) if is_chat else self._plain_texts(row) for row in rows]
        heads, wholes = (self._tokens([pair[part] for pair in pairs], special=not is_chat) for part in (0, 1))
        return [
            self._ended(self._behind(head, whole, head_text, whole_text, row), row, params)
            for head, whole, (head_text, whole_text), row in zip(heads, wholes, pairs, rows, strict=True)
        ]

    def _plain_texts(self, row: PromptRow) -> tuple[str, str]:
        completion = _completion(row)
        if not isinstance(completion, str):
            raise DataError(
                f"row {row.index}: the prompt is text, but the completion {shorten(completion)} is not; give both as "
                "text, or both as messages"
            )
        return str(row.prompt), f"{row.prompt}{completion}"

    def _chat_texts(self, row: PromptRow) -> tuple[str, str]:
        prompt: Any = row.prompt
        if prompt[-1]["role"] == "assistant":
            raise DataError(
                f"row {row.index}: the prompt ends with a message of the assistant; move it to the completion"
            )
        head = self._render(prompt, row, "answer")
        whole = self._render([*prompt, _message(_completion(row), row)], row, "closed")
        if not whole.startswith(head):
            place = next((i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), len(whole))
            raise DataError(
                f"row {row.index}: the chat template does not begin prompt and completion as it begins the prompt: "
                f"{shorten(head[place:])} becomes {shorten(whole[place:])}; what is trained would not be what is "
                "sampled. Use a template that keeps the prompt as it is (chat_template_kwargs may choose so), or give "
                "prompt and completion as text"
            )
        return head, whole

    def _render(self, messages: Sequence[Mapping[str, Any]], row: PromptRow, ending: Ending) -> str:
        settings = row_settings(row.columns, row.index)
        try:
            text = self._renderer.render(messages, ending, settings)
            self._renderer.check_shown(messages, ending, settings)
            return text
        except Exception as error:  # templates raise anything
            raise DataError(
                f"row {row.index}: the messages {shorten(messages)} are refused by the chat template "
                f"({type(error).__name__}: {error}); correct the row"
            ) from error

    def _tokens(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if special:
            return text_ids(self._tokenizer, texts)
        encoding = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return [list(ids) for ids in encoding["input_ids"]]

    def _behind(self, head: list[int], whole: list[int], head_text: str, whole_text: str, row: PromptRow) -> list[int]:
        """Return the tokens after those of the prompt."""
        # A truncated prompt is the end of the whole one.
        if head[len(head) - len(row.prompt_ids) :] != list(row.prompt_ids):
            raise DataError(
                f"row {row.index}: the prompt was tokenised to other ids than here; use one tokenizer, one chat "
                "template and one chat_template_kwargs for both"
            )
        if whole[: len(head)] == head:
            return whole[len(head) :]
        own = self._tokens([whole_text[len(head_text) :]], special=False)[0]
        if self._text(head + own) != self._text(whole):
            raise DataError(
                f"row {row.index}: the completion {shorten(whole_text[len(head_text) :])} cannot be tokenised after "
                f"its prompt, which ends with {shorten(head_text[-20:])}: the text would become another; move spaces "
                "from the end of the prompt to the start of the completion"
            )
        return own

    def _ended(self, ids: list[int], row: PromptRow, params: SamplingParams) -> list[int]:
        """Return the completion up to its first stop token. If it has none: with the one that the template writes
        next, else with an end-of-sequence token."""
        place = next((i for i, token in enumerate(ids) if token in params.stop_token_ids), None)
        if place is None and (next_token := self._next_token(row)) in params.stop_token_ids:
            return [*ids, next_token]
        if place is None:
            if self._tokenizer.eos_token_id is None:
                raise ModelError(
                    "the tokenizer has no end-of-sequence token to end a completion with; set tokenizer.eos_token"
                )
            return [*ids, int(self._tokenizer.eos_token_id)]
        rest = self._tokenizer.decode(ids[place + 1 :], skip_special_tokens=True)
        if rest.strip():
            stop = self._tokenizer.convert_ids_to_tokens(ids[place])
            raise DataError(
                f"row {row.index}: the completion goes on after the stop token {stop!r}: {shorten(rest)}; a rollout "
                "would end there: remove the token from the text, or from stop_token_ids"
            )
        return ids[: place + 1]

    def _next_token(self, row: PromptRow) -> int | None:
        """The first token of the message after an answer, where a template closes no turn (GLM): that of a tool after
        calls, else of a user. None if it cannot be told."""
        if isinstance(row.prompt, str):
            return None
        role = "tool" if _message(_completion(row), row).get("tool_calls") else "user"
        if role not in self._next_tokens:
            mark = "endofanswer"
            messages = [PROBE, {"role": "assistant", "content": mark}, {"role": role, "content": "next"}]
            try:
                rest = self._renderer.render(messages, "closed").partition(mark)[2]
            except Exception:  # a template may take results of tools after a call only
                rest = ""
            self._next_tokens[role] = next(iter(self._tokens([rest], special=False)[0]), None)
        return self._next_tokens[role]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class Demonstrations:
    """Makes batches of demonstrations, as `GroupStream` makes those of samples. decode: token ids to text without
    special tokens."""

    def __init__(self, encoder: DemonstrationEncoder, decode: Callable[[Sequence[int]], str]) -> None:
        self._encoder = encoder
        self._decode = decode

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return the demonstrations of these rows, in order. No policy made them: versions are -1, logprobs 0.

        Raises DataError for a completion of more than params.max_tokens tokens, and what the encoder raises.
        """
        timings, rows, groups = Timings(), [task.row for task in tasks], [call.group(task) for task in tasks]
        with timings.measure("rollout"):
            samples = []
            for task, ids in zip(tasks, self._encoder.encode(rows, call.params), strict=True):
                if len(ids) > call.params.max_tokens:
                    raise overlong_error(1, len(ids), task.row.index, call.params)
                trajectory, size = call.trajectory(task, 0), len(ids)
                samples.append(FinishedSample(trajectory, ids, [0.0] * size, [-1] * size, "stop"))
            columns = columns_of(rows, groups, samples, call.params.temperature)
            columns["completion"] = [self._decode(sample.completion_ids) for sample in samples]
            columns["rewards"] = torch.ones(len(samples), dtype=torch.float64)
            columns["function_rewards"] = [[1.0] for _ in samples]
            columns["extra"] = [{} for _ in samples]
        return Batch(columns), RolloutReport(timings.seconds)


def check_demonstrations(
    source: SizedSource | StreamSource,
    encoder: DemonstrationEncoder,
    params: SamplingParams,
    *,
    max_length: int | None = None,
) -> None:
    """Encode every completion of a dataset once (of a stream the first, the others as they come), before work starts.
    max_length: most tokens of a prompt with its completion, None = any number.

    Raises DataError for a dataset without the column `completion`, and for rows that cannot be used.
    """
    if COMPLETION_COLUMN not in source.column_names:
        raise DataError(
            f"supervised fine-tuning needs a column `{COMPLETION_COLUMN}` besides `prompt`; the dataset has "
            f"{', '.join(repr(name) for name in source.column_names)}. Rename the one that holds the answer"
        )
    over: list[tuple[int, int]] = []  # (row, tokens)
    longest_prompt = 0
    for rows in _chunks(source):
        for row, ids in zip(rows, encoder.encode(rows, params), strict=True):
            longest_prompt = max(longest_prompt, len(row.prompt_ids))
            if len(ids) > params.max_tokens:
                over.append((row.index, len(ids)))
    if over:
        room = None if max_length is None else max_length - longest_prompt
        raise overlong_error(len(over), max(size for _, size in over), over[0][0], params, room)


def overlong_error(
    num_over: int, longest: int, first_row: int, params: SamplingParams, room: int | None = None
) -> DataError:
    """Return the error for completions that are too long, the longest of `longest` tokens. room: the most that
    max_completion_length could be raised to, None = no limit."""
    remedy = f"Raise max_completion_length to {longest}, or shorten"
    if room is not None and longest > room:
        remedy = f"The longest prompt leaves room for {room} in the model and in a micro-batch: shorten"
    return DataError(
        f"max_completion_length={params.max_tokens}, but {num_over} completion(s) are longer: the longest has "
        f"{longest} tokens with the one that ends it, the first is row {first_row}. {remedy} or remove such rows"
    )


def _chunks(source: SizedSource | StreamSource) -> Iterator[list[PromptRow]]:
    if isinstance(source, StreamSource):
        yield [next(iter(source))]
        return
    for start in range(0, len(source), CHECKED_ROWS):
        yield [source[position] for position in range(start, min(start + CHECKED_ROWS, len(source)))]


def _completion(row: PromptRow) -> Any:
    completion = row.columns[COMPLETION_COLUMN]
    if completion is None or (isinstance(completion, str | list | tuple) and not completion):
        raise DataError(f"row {row.index}: the completion {completion!r} is missing or empty; fill or remove the row")
    return completion


def _message(completion: Any, row: PromptRow) -> Mapping[str, Any]:
    """Return the assistant's message of a chat completion, which may be given as text too."""
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    is_list = isinstance(completion, list | tuple)
    message = completion[0] if is_list and len(completion) == 1 else None
    if not isinstance(message, Mapping) or "role" not in message or message["role"] != "assistant":
        raise DataError(
            f"row {row.index}: the completion {shorten(completion)} must be a text or a list of one message of the "
            'assistant: [{"role": "assistant", "content": "..."}]; earlier turns belong into the prompt'
        )
    if message.get("content") is None and not message.get("tool_calls"):
        raise DataError(f"row {row.index}: the completion {shorten(completion)} needs a text as its content")
    check_message(message, f"row {row.index}, completion")
    return message
