"""Requests to the endpoint, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.data.prompts import Messages, shorten
from hybrid_rl.extras.endpoint.refusals import bad_request

# The name of the only model; a request may give any, since agents have names of their own built in.
MODEL = "policy"
MAX_ANSWERS = 128
MAX_STOPS = 16

_UNBIASED = (
    "training needs the probability that the policy itself gives every token, and this makes the engine choose "
    "otherwise, which biases training: leave it out"
)
_CONSTRAINED = f"constrained decoding is refused: {_UNBIASED}; describe the form in the prompt and reward it"
_TEMPLATE = (
    "the chat template is the run's: set data.chat_template_path or data.chat_template_kwargs in its configuration"
)
# Parameters that may be there only with a value that changes nothing (None always may), and what to do otherwise.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "length_penalty", "best_of"), ((1,), _UNBIASED)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_tokens"), ((0,), _UNBIASED)),
    **dict.fromkeys(("ignore_eos", "use_beam_search"), ((False,), _UNBIASED)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), (([],), _UNBIASED)),
    "top_k": ((0, -1), _UNBIASED),
    "logit_bias": (({},), _UNBIASED),
    "response_format": (({"type": "text"},), _CONSTRAINED),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), ((), _CONSTRAINED)),
    "parallel_tool_calls": ((True,), "the policy decides how many tools it calls at once: answer all of them"),
    "top_logprobs": ((0,), "the engine knows the logprob of the token that it chose only: set logprobs alone"),
    "functions": (([],), "tools has taken its place"),
    "function_call": (("none",), "tool_choice has taken its place"),
    "echo": ((False,), "the prompt is not scored"),
    "suffix": (("",), "the policy writes at the end only"),
    "modalities": ((["text"],), "the policy reads and writes text"),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ((), "the policy reads and writes text")),
    **dict.fromkeys(("reasoning_effort", "verbosity"), ((), "nothing tells the policy: say it in the prompt")),
    "chat_template": ((), _TEMPLATE),
    "chat_template_kwargs": (({},), _TEMPLATE),
    "stop_token_ids": (([],), "set rollout.stop_token_ids in the configuration, or stop (texts) in the request"),
    "add_generation_prompt": ((True,), "the policy always answers as the assistant"),
    "continue_final_message": ((False,), "the policy always answers as the assistant"),
}
# Parameters that change nothing here whatever their value. seed: the noise of a sample comes from the run's seed and
# the sample's place in it; a seed in the request would make the samples of a group alike.
_IGNORED = frozenset(
    {
        *("model", "user", "seed", "metadata", "store", "service_tier", "safety_identifier", "moderation"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "request_id"),
    }
)
_READ = frozenset(
    {
        *("messages", "prompt", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens", "stop"),
        *("stream", "stream_options", "logprobs", "temperature", "return_token_ids"),
    }
)


@dataclass(frozen=True)
class AnswerRequest:
    """What a request asks for.

    prompt: chat messages (`is_chat`), text, or token ids. tools: those that the policy is shown. has_logprobs,
    has_token_ids: whether the answer tells those of its tokens. model: the name that it gives to the policy.
    """

    is_chat: bool
    prompt: Messages | str | list[int]
    tools: tuple[Mapping[str, Any], ...]
    num_answers: int
    max_tokens: int | None
    stop: tuple[str, ...]
    streams: bool
    includes_usage: bool
    has_logprobs: bool
    has_token_ids: bool
    model: str


def read_request(body: Any, *, is_chat: bool, temperature: float) -> AnswerRequest:
    """Read the body of a request for answers. temperature: of the run. Raises Refusal for what cannot be done, or would
    bias training; parameters that would have no effect are ignored."""
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object; it is {shorten(body)}")
    parameters = {name: value for name, value in body.items() if value is not None}
    _check_parameters(parameters, temperature)
    for name in ("prompt", "stop", "tools"):
        _check_unicode(parameters.get(name), name)
    options = parameters.get("stream_options", {})
    limits = [_number(parameters, name, 1) for name in ("max_tokens", "max_completion_tokens") if name in parameters]
    is_told = parameters.get("logprobs", False)
    if not isinstance(is_told, bool) and (is_chat or is_told != 0):
        reason = _NEUTRAL["top_logprobs"][1] if isinstance(is_told, int) else "it must be true or false"
        raise bad_request(f"logprobs={shorten(is_told)}: {reason}", "logprobs")
    return AnswerRequest(
        is_chat=is_chat,
        prompt=read_messages(parameters.get("messages")) if is_chat else _read_prompt(parameters.get("prompt")),
        tools=_read_tools(parameters) if is_chat else (),
        num_answers=_number(parameters, "n", 1, MAX_ANSWERS) if "n" in parameters else 1,
        max_tokens=min(limits, default=None),
        stop=_read_stop(parameters.get("stop", [])),
        streams=_flag(parameters, "stream"),
        includes_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        has_logprobs=is_told is not False,
        has_token_ids=_flag(parameters, "return_token_ids"),
        model=str(parameters.get("model", MODEL)),
    )


def _check_parameters(given: Mapping[str, Any], temperature: float) -> None:
    for name, value in given.items():
        if name in _NEUTRAL:
            neutral, reason = _NEUTRAL[name]
            if value not in neutral:
                raise bad_request(f"{name}={shorten(value)}: {reason}", name, "unsupported_value")
        elif name not in _READ and name not in _IGNORED:
            raise bad_request(f"unknown parameter {shorten(name)}: leave it out", name, "unknown_parameter")
    # 1 is the protocol's default, which many frameworks always send.
    if (asked := given.get("temperature", temperature)) not in (1, temperature):
        raise bad_request(
            f"temperature={shorten(asked)}: this run samples and trains with temperature={temperature:g}, and samples "
            "of another one would bias training; leave it out, or change the configuration",
            "temperature",
            "unsupported_value",
        )


def _check_unicode(value: Any, name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        reason = f"is not valid Unicode: {half!a} is half of a surrogate pair; send whole characters"
        raise bad_request(f"{name}={shorten(value)} {reason}", name) from None


def _number(given: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int:
    value = given[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        words = f"a whole number from {least} on" if most is None else f"a whole number from {least} to {most}"
        raise bad_request(f"{name}={shorten(value)} must be {words}", name)
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise bad_request(f"{name}={shorten(value)} must be true or false", name)
    return value


def _read_stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise bad_request(f"stop={shorten(stop)} must be a text or at most {MAX_STOPS} texts, none empty", "stop")
    return tuple(stops)


def _read_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise bad_request(
        f"prompt={shorten(prompt)} must be a text or a list of token ids; send one request each", "prompt"
    )


def _read_tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that the policy is shown."""
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise bad_request(f'tool_choice={shorten(choice)}: {_CONSTRAINED}; send "auto" or "none"', "tool_choice")
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise bad_request(f"tools={shorten(tools)} must be a list", "tools")
    read = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise bad_request(f'a tool must be {{"type": "function", "function": ...}}; got {shorten(tool)}', "tools")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if not isinstance(parameters, dict | None) or not (isinstance(properties, dict) or not properties):
            raise bad_request(
                f"the parameters of the tool {function['name']} must be a JSON schema of an object, with an object of "
                f"properties; got {shorten(parameters)}",
                "tools",
            )
        # strict asks for constrained decoding, which is left to the policy; every framework sends it.
        read.append({"type": "function", "function": {k: v for k, v in function.items() if k != "strict"}})
    return tuple(read) if choice == "auto" else ()


def read_messages(messages: Any) -> Messages:
    """Return chat messages in the form of chat templates: content is text, the arguments of tool calls are objects,
    and nothing is None. Raises Refusal for what is no message, or is more than text."""
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"messages={shorten(messages)} must be a list with a message at least", "messages")
    return [_read_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise bad_request(f"{where}={shorten(message)} has no role that chats have", where)
    read = {"role": "system" if role == "developer" else role, "content": _text(message.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            read[name] = _checked_text(message[name], f"{where}.{name}")
    for name in ("reasoning_content", "thinking"):
        if role == "assistant" and isinstance(message.get(name), str):
            read[name] = message[name]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls={shorten(calls)} must be a list", where)
        read["tool_calls"] = [_read_call(call, where) for call in calls]
    return read


def _checked_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{where}={shorten(value)} must be a text", where)
    return value


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise bad_request(f"{where} has content other than text: {shorten(part)}; the policy reads text", where)
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} has a tool call without a function: {shorten(call)}", where)
    arguments = as_object(function.get("arguments") or {})
    if not isinstance(arguments, dict | str):
        raise bad_request(f"{where} has a tool call whose arguments are no object: {shorten(call)}", where)
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": _checked_text(call["id"], f"{where}.tool_calls.id"), **read} if call.get("id") else read


def as_object(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object if they are the text of one, else as they are."""
    if isinstance(arguments, str):
        try:
            parsed_arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed_arguments if isinstance(parsed_arguments, dict) else arguments
    return arguments
