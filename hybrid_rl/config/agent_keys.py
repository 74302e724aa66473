"""The configuration keys of agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rl.algos.options import key


@dataclass(frozen=True)
class AgentConfig:
    """Trajectories of many turns: limits, tools and chat format. max_completion_length limits all turns of a
    conversation together."""

    max_tool_calling_iterations: int | None = key(
        None, "rounds of tool calls in a trajectory; None = until the agent answers without one", minimum=0
    )
    max_open_trajectories: int | None = key(
        None, "trajectories that a rank has under way at once; None = twice what its engine runs at once", minimum=1
    )
    max_environments: int | None = key(
        None,
        "environments that a rank has at once; trajectories wait for one before they begin; None = any number",
        minimum=1,
    )
    trajectory_timeout_seconds: float | None = key(
        None, "longest time from a trajectory's start to its end, waiting for tools included; None = no limit", above=0
    )
    tool_timeout_seconds: float = key(
        60.0, "longest time of one tool call, and of making, resetting or scoring an environment", above=0
    )
    tool_processes: int = key(
        0, "call plain tools in this many worker processes per rank; 0 = in threads of the rank", minimum=0
    )
    tool_call_format: Literal["auto", "hermes", "llama3", "mistral", "glm", "none"] = key(
        "auto", "how tool calls are written; auto = the tokenizer's own description, or by its chat template"
    )
    rewritten_history: Literal["fork", "keep", "error"] = key(
        "fork",
        "if the chat template renders earlier turns differently later on: train on both as separate samples, go on "
        "with the tokens as they were, or refuse",
    )
    unrestorable: Literal["restart", "drop"] = key(
        "restart",
        "if the environment of a trajectory is lost in the middle that has neither `state()` nor @repeatable methods: "
        "reset another one and make the calls again, or give up the trajectory, which then has no reward",
    )
