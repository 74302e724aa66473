"""What makes the trajectories of a run: tools and environments, a rollout function, or an agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rl.agents.calls import Caller
from hybrid_rl.agents.environments import Environment, EnvironmentKind
from hybrid_rl.agents.tool_agent import ToolAgent
from hybrid_rl.agents.tools import Functions
from hybrid_rl.config import AgentConfig
from hybrid_rl.errors import ConfigError


@dataclass(frozen=True)
class AgentSetup:
    """How the trajectories of a run are made; it travels to ranks by cloudpickle.

    tools: functions; kinds: of environments. rollout_func, agent: instead of both. turn_rewards_problem: why they may
    give no rewards to turns; "" = they may. opened: with an instance of each kind, made when they were looked at; left
    out of pickles.
    """

    tools: tuple[Callable[..., Any], ...] = ()
    kinds: tuple[EnvironmentKind, ...] = ()
    rollout_func: Callable[..., Any] | None = None
    agent: Callable[..., Any] | None = None
    turn_rewards_problem: str = ""
    opened: Opened | None = field(default=None, compare=False)

    @property
    def has_tools(self) -> bool:
        """Whether the policy calls tools, here or in environments."""
        return bool(self.tools or self.kinds)

    @property
    def makes_prompts(self) -> bool:
        """Whether prompts become longer, or come to be, only when a trajectory begins."""
        return bool(self.kinds) or not self.has_tools

    @property
    def gives_rewards(self) -> bool:
        """Whether the user's code may add rewards to a trajectory while it is made (`Trajectory.add_reward`)."""
        return self.rollout_func is not None or self.agent is not None

    @property
    def is_by_name(self) -> bool:
        """Whether the column `environment` names the kind of a row."""
        return any(kind.name is not None for kind in self.kinds)

    @property
    def sources(self) -> list[str]:
        """Names of `GivenReward` for environments that score themselves: one per class."""
        return list(dict.fromkeys(kind.class_name for kind in self.kinds if kind.has_reward))

    @property
    def schemas(self) -> list[list[Mapping[str, Any]]]:
        """Schemas of the tools that a prompt shows, for each kind of environment."""
        own = self.opened.standalone if self.opened is not None else []
        return [[*own, *kind.schemas.values()] for kind in self.kinds] or [own]

    def tool_agent(self, config: AgentConfig) -> ToolAgent:
        """Make the agent of a rank from tools and environments. It takes over what is opened in this process."""
        opened = self.opened
        if opened is None or opened.is_taken:
            return ToolAgent(self.tools, self.kinds, config)
        opened.is_taken = True
        return ToolAgent(self.tools, self.kinds, config, caller=opened.caller, free=opened.environments)

    def close(self) -> None:
        """Close what is opened and was not taken over. Idempotent."""
        if self.opened is not None and not self.opened.is_taken:
            self.opened.is_taken = True
            for environment in self.opened.environments:
                environment.end()
            self.opened.caller.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": None}


@dataclass
class Opened:
    """What was made to look at tools and environments. standalone: schemas of the tools."""

    caller: Caller
    environments: list[Environment]
    standalone: list[Mapping[str, Any]]
    is_taken: bool = False


def setup_tools(tools: Sequence[Any], environment_factory: Any, config: AgentConfig) -> AgentSetup:
    """Look at tools and environments: the signatures of functions, and one instance of each environment.

    Raises ConfigError for tools that cannot be described or share a name, and for environments that cannot be made or
    have no reset.
    """
    kinds = _kinds(environment_factory)
    if kinds and (config.max_environments or len(kinds)) < len(kinds):
        raise ConfigError(
            f"max_environments={config.max_environments}, but environment_factory has {len(kinds)} kinds, "
            f"and one of each is made to look at it; set it to at least {len(kinds)}"
        )
    caller = Caller(config.tool_timeout_seconds)
    environments: list[Environment] = []
    try:
        standalone = Functions(tools, caller, config.tool_processes).tools
        for kind in kinds:
            environment = Environment(kind, caller)
            environments.append(environment)
            outcome = caller.loop.start(environment.make()).result()
            if outcome.error is not None:
                raise ConfigError(
                    f"environment_factory cannot make {kind.label}: "
                    f"{type(outcome.error).__name__}: {outcome.error}; it is called without arguments"
                ) from outcome.error
            kind.look_at(environment.instance)
            standalone.with_tools(environment.tools())
    except BaseException:
        for environment in environments:
            environment.end()
        caller.close()
        raise
    opened = Opened(caller, environments, standalone.schemas)
    return AgentSetup(tuple(tools), tuple(environment.kind for environment in environments), opened=opened)


def _kinds(factory: Any) -> list[EnvironmentKind]:
    """Return the kinds that the argument environment_factory gives."""
    if factory is None:
        return []
    named = factory if isinstance(factory, Mapping) else {None: factory}
    if not named:
        raise ConfigError("environment_factory is an empty dict; give at least one name and class, or leave it out")
    for name, kind_factory in named.items():
        if not callable(kind_factory):
            hint = "pass its class, so that each trajectory gets an instance of its own"
            raise ConfigError(f"environment_factory has {kind_factory!r}, which cannot be called; {hint}")
        if isinstance(factory, Mapping) and not isinstance(name, str):
            raise ConfigError(f"environment_factory has the name {name!r}; names are text, as in the dataset's column")
    return [EnvironmentKind(name, kind_factory) for name, kind_factory in named.items()]
