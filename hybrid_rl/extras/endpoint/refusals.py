"""Answers of the endpoint other than 200, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_rl.agents.trajectory import EndReason

RETRY_SECONDS = 5  # after which a client may try again; how long an update takes is not known here


class Refusal(Exception):
    """A request that is not answered. status: of HTTP; code, param: as in OpenAI's error objects."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON object that tells it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> Refusal:
    """Return the refusal of a request that could never be answered."""
    return Refusal(400, message, code=code, param=param)


def nested_too_deep() -> Refusal:
    """Return the refusal of JSON with more levels than Python follows."""
    return bad_request("the body has too many levels of lists and objects in each other: send a flatter one")


def wrong_key() -> Refusal:
    """Return the refusal of a key that is of no trajectory, or of another one than the path."""
    message = (
        "Incorrect API key provided: it belongs to no trajectory of this run, or not to the one that the URL names; "
        "use base_url and api_key as the agent was called with them"
    )
    return Refusal(401, message, code="invalid_api_key")


def session_ended() -> Refusal:
    """Return the refusal of a request for a trajectory that is over."""
    return Refusal(410, "the trajectory of this key has ended: nothing more is generated for it", code="session_ended")


def no_rollout() -> Refusal:
    """Return the refusal of a request that comes between two rollouts."""
    message = "no rollout is under way: the policy is being updated, and generates nothing meanwhile"
    return Refusal(503, message, code="no_rollout", headers={"Retry-After": str(RETRY_SECONDS)})


def limit_reached(reason: EndReason) -> Refusal:
    """Return the refusal that tells an agent why its trajectory gets no further answer. It holds no numbers: some
    frameworks look for codes of HTTP such as 429 in a text, and try again."""
    if reason == "length":
        message = (
            "This model's maximum context length is reached: with this prompt, no token is left of "
            "max_completion_length (all turns of a conversation together), or of the longest sequence"
        )
        return Refusal(400, message, code="context_length_exceeded", param="messages")
    if reason == "turns":
        message = "the trajectory has had all the rounds of tool calls that max_tool_calling_iterations allows"
        return Refusal(400, message, code="max_tool_calling_iterations")
    return no_rollout() if reason == "abort" else session_ended()


def failed(error: Exception) -> Refusal:
    """Return the refusal of a request that failed here; trying again would not help."""
    message = f"the policy could not answer: {type(error).__name__}: {error}"
    return Refusal(500, message, code="internal_error", headers={"x-should-retry": "false"})
