"""Checks of tools, environments and agents before a run starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.agents.agent_setup import AgentSetup, setup_tools
from hybrid_rl.agents.chat import Chat
from hybrid_rl.agents.environments import ENVIRONMENT_COLUMN
from hybrid_rl.agents.floor import check_rollout_func
from hybrid_rl.config import AgentConfig, TrainerConfig
from hybrid_rl.config.algorithm import learns_from_demonstrations, token_rewards_problem
from hybrid_rl.data.source import SizedSource, StreamSource
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.process.hooks import extra
from hybrid_rl.rewards import GivenReward
from hybrid_rl.rollout.agent_columns import AGENT

OF_TOOLS = ("tool_timeout_seconds", "tool_processes")  # keys about tools that the library calls


@dataclass(frozen=True)
class AgentArguments:
    """The arguments of the Trainer that make trajectories of many turns."""

    tools: Sequence[Any] | None = None
    environment_factory: Any = None
    rollout_func: Any = None
    agent: Any = None


def check_agents(
    given: AgentArguments,
    config: TrainerConfig,
    tokenizer: PreTrainedTokenizerBase,
    closing: contextlib.ExitStack,
) -> AgentSetup | None:
    """Look at what makes trajectories, and return it as the workers get it; None if there is nothing: every sample is
    one completion then. closing: closes the environments that this makes.

    Raises ConfigError for arguments that cannot be used, alone or together.
    """
    tools = given.tools or ()
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools={given.tools!r:.100} is a {type(given.tools).__name__}; pass a list of functions")
    used = {"tools": bool(tools), "environment_factory": given.environment_factory is not None}
    alone = {"rollout_func": given.rollout_func is not None, "agent": given.agent is not None}
    names = [name for name, is_used in (used | alone).items() if is_used]
    if not names:
        keys = [item.name for item in dataclasses.fields(AgentConfig)]
        _refuse_inert(
            config.agents, keys, "without tools=, environment_factory=, rollout_func= or agent=; leave it out"
        )
        return None
    if any(alone.values()) and len(names) > 1:
        raise ConfigError(
            f"{' and '.join(names)} were passed; rollout_func and agent bring a loop of their own, which calls tools "
            "and environments itself: pass only one of them, and neither with tools= or environment_factory="
        )
    if learns_from_demonstrations(config):
        raise ConfigError(
            f"{' and '.join(names)} make trajectories, but {config.algorithm.name} learns from the dataset's own "
            "completions; choose another algorithm, or leave them out"
        )
    if config.data.overlong_prompts == "truncate":
        raise ConfigError(
            f"overlong_prompts=truncate cuts tokens off a prompt, but with {' and '.join(names)} prompts are messages; "
            "use 'drop' or 'error'"
        )
    if given.rollout_func is not None:
        check_rollout_func(given.rollout_func)
        _refuse_inert(
            config.agents,
            ("max_open_trajectories", "max_environments", "max_tool_calling_iterations", *OF_TOOLS),
            "on rollout_func, which begins trajectories and calls tools itself; leave it out, and limit them there",
        )
        return AgentSetup(rollout_func=given.rollout_func, turn_rewards_problem=token_rewards_problem(config))
    if given.agent is not None:
        _refuse_inert(
            config.agents,
            ("max_environments", *OF_TOOLS),
            "on agent, which calls tools and environments itself; leave it out, and limit them there",
        )
        extra("http_agent")(given.agent, temperature=config.rollout.temperature)
        return AgentSetup(agent=given.agent, turn_rewards_problem=token_rewards_problem(config))
    if config.data.chat_template_kwargs.get("tools"):
        raise ConfigError(f"chat_template_kwargs has 'tools', and {' and '.join(names)} give tools too; leave it out")
    if not tools:
        _refuse_inert(
            config.agents,
            ("tool_processes",),
            "on environments, whose methods run in threads of this process; leave it out",
        )
    if given.environment_factory is None:
        _refuse_inert(config.agents, ("max_environments",), "without environment_factory=; leave it out")
    setup = setup_tools(tools, given.environment_factory, config.agents)
    closing.callback(setup.close)
    kwargs = config.data.chat_template_kwargs
    chat = Chat(tokenizer, chat_template_kwargs=kwargs, tool_call_format=config.agents.tool_call_format)
    for schemas in setup.schemas:  # otherwise the run would go on while the policy never learns what it could call
        if problem := chat.problem_with_tools(schemas):
            raise ConfigError(problem)
    return setup


def _refuse_inert(config: AgentConfig, names: Iterable[str], where: str) -> None:
    """Raise ConfigError if one of these keys was set, which all do nothing there."""
    defaults = AgentConfig()
    for name in names:
        if (value := getattr(config, name)) != getattr(defaults, name):
            raise ConfigError(f"{name}={value} has no effect {where}")


def reward_sources(agents: AgentSetup | None) -> list[Any]:
    """Return the rewards that come with samples rather than from functions."""
    if agents is None:
        return []
    return [*map(GivenReward, agents.sources), *([GivenReward(AGENT, is_dense=True)] if agents.gives_rewards else [])]


def widest(agents: AgentSetup | None) -> list[Mapping[str, Any]]:
    """Return the schemas of tools that a prompt shows; those of the kind with the longest."""
    return [] if agents is None else max(agents.schemas, key=lambda schemas: len(json.dumps(schemas)))


def check_rows(source: SizedSource | StreamSource, agents: AgentSetup, what: str) -> None:
    """Raise DataError for rows that tools or environments cannot be used with: text prompts, no prompt and no
    environment, names of environments that do not exist. what: the dataset. The rows of a stream come later, and
    are checked then."""
    if not agents.has_tools:
        return
    first = source[0] if isinstance(source, SizedSource) else next(iter(source))
    if isinstance(first.prompt, str):
        raise DataError(
            f"{what}: the prompts are text, but tools and environments need chat messages; give a list such as "
            '[{"role": "user", "content": "..."}]'
        )
    if not agents.kinds and not first.has_prompt:
        raise DataError(f"{what} has no `prompt` column; only environment_factory= or an agent can do without")
    if not agents.is_by_name:
        return
    names = [kind.name for kind in agents.kinds]
    if ENVIRONMENT_COLUMN not in source.column_names:
        raise DataError(
            f"{what} has no column {ENVIRONMENT_COLUMN!r}, which says for each row which environment of "
            f"environment_factory it needs: {', '.join(map(repr, names))}"
        )
    values = source.values(ENVIRONMENT_COLUMN) if isinstance(source, SizedSource) else ()
    for row, value in enumerate(values):
        if value not in names:
            raise DataError(
                f"{what}, row {row}: {ENVIRONMENT_COLUMN}={value!r} is not in environment_factory; it has "
                f"{', '.join(map(repr, names))}"
            )
