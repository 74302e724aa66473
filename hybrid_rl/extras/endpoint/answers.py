"""Answers of the policy in OpenAI's form: JSON objects, whole or in the chunks of a stream."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.agents.trajectory import Turn
from hybrid_rl.data.rendering import THOUGHTS
from hybrid_rl.extras.endpoint.requests import AnswerRequest

BROKEN = "\ufffd"  # how a part of a character decodes
# Mistral's templates refuse ids of tool calls that are not of 9 letters and digits.
ID_LENGTH = 9


@dataclass(frozen=True)
class Answer:
    """One answer to a request. text: as the client gets it, cut where a stop text begins. calls: the tool calls, in
    OpenAI's form. reasoning: what the policy thought, if that is known apart. pieces: the text of each token, if the
    request asked for logprobs."""

    turn: Turn
    text: str
    calls: Sequence[Mapping[str, Any]]
    reasoning: str
    finish_reason: str
    pieces: Sequence[str]


def answer_of(turn: Turn, request: AnswerRequest, decode: Callable[[Sequence[int]], str]) -> Answer:
    """Return a turn as the client gets it. Tool calls are calls only if the request showed tools, else text."""
    message = turn.message
    calls = [_call(call, turn, place) for place, call in enumerate(message.get("tool_calls") or ())]
    if not request.is_chat or (calls and not request.tools):
        text, calls, reasoning = turn.text, [], ""
    else:
        text = str(message.get("content") or "")
        reasoning = next((str(message[name]) for name in THOUGHTS if message.get(name)), "")
    finish_reason = turn.finish_reason
    if finish_reason == "stop":
        text = text[: min((place for stop in request.stop if (place := text.find(stop)) >= 0), default=len(text))]
        finish_reason = "tool_calls" if calls else "stop"
    pieces = token_texts(decode, turn.token_ids) if request.has_logprobs else ()
    return Answer(turn, text, calls, reasoning, finish_reason, pieces)


def _call(call: Mapping[str, Any], turn: Turn, place: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    return {
        "id": call.get("id") or _call_id(turn, place),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        },
    }


def _call_id(turn: Turn, place: int) -> str:
    """Return the id of a tool call: the same if the same is sampled again: templates may show it to the policy."""
    whole = repr((tuple(turn.prompt_ids), tuple(turn.token_ids), place))
    return hashlib.blake2b(whole.encode()).hexdigest()[:ID_LENGTH]


def token_texts(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds, "" for special tokens. The bytes of one character may be spread over
    several tokens: the last of them has it."""
    texts: list[str] = []
    start = read = 0  # texts up to `read` are known; they are decoded from `start` on, for the spaces between them
    for end in range(1, len(token_ids) + 1):
        known, text = decode(token_ids[start:read]), decode(token_ids[start:end])
        if len(text) > len(known) and (not text.endswith(BROKEN) or end == len(token_ids)):
            texts.append(text[len(known) :])
            start, read = read, end
        else:
            texts.append("")
    return texts


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the counts of tokens of a request."""
    prompt, completion = len(answers[0].turn.prompt_ids), sum(len(answer.turn.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def whole(identity: str, request: AnswerRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    choices = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {"index": index, "logprobs": _logprobs(request, answer)}
        if request.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            if answer.calls:
                message |= {"tool_calls": list(answer.calls), "content": answer.text or None}
            choice["message"] = message
        else:
            choice["text"] = answer.text
        choices.append({**choice, "finish_reason": answer.finish_reason, **_token_ids(request, answer)})
    head = _head(identity, request, "chat.completion" if request.is_chat else "text_completion")
    return {**head, "choices": choices, "usage": usage(answers), **_prompt_ids(request, answers)}


def chunks(identity: str, request: AnswerRequest, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the answer to a request that streams: its chunks, in order."""
    head = _head(identity, request, "chat.completion.chunk" if request.is_chat else "text_completion")
    if request.includes_usage:
        head["usage"] = None

    def chunk(index: int, reason: str | None = None, **parts: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": index, "logprobs": None, "finish_reason": reason, **parts}]}

    made = []
    for index, answer in enumerate(answers):
        token_fields = {"logprobs": _logprobs(request, answer), **_token_ids(request, answer)}
        if not request.is_chat:
            made += [chunk(index, answer.finish_reason, text=answer.text, **token_fields)]
            continue
        delta: dict[str, Any] = {"content": answer.text}
        if answer.reasoning:
            delta["reasoning_content"] = answer.reasoning
        if answer.calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(answer.calls)]
        made += [
            chunk(index, delta={"role": "assistant", "content": "", "refusal": None}),
            chunk(index, delta=delta, **token_fields),
            chunk(index, answer.finish_reason, delta={}),
        ]
    if request.has_token_ids:
        made[0] |= _prompt_ids(request, answers)
    if request.includes_usage:
        made.append({**head, "choices": [], "usage": usage(answers)})
    return made


def _head(identity: str, request: AnswerRequest, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if request.is_chat else "cmpl"
    return {"id": f"{prefix}-{identity}", "object": kind, "created": int(time.time()), "model": request.model}


def _token_ids(request: AnswerRequest, answer: Answer) -> dict[str, Any]:
    return {"token_ids": list(answer.turn.token_ids)} if request.has_token_ids else {}


def _prompt_ids(request: AnswerRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    return {"prompt_token_ids": list(answers[0].turn.prompt_ids)} if request.has_token_ids else {}


def _logprobs(request: AnswerRequest, answer: Answer) -> dict[str, Any] | None:
    if not request.has_logprobs:
        return None
    logprobs = [float(value) for value in answer.turn.logprobs]
    if request.is_chat:
        content = [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(answer.pieces, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets = [sum(map(len, answer.pieces[:place])) for place in range(len(answer.pieces))]
    return {"tokens": list(answer.pieces), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
