"""The rollout of a rank whose samples agents make."""

from __future__ import annotations

from hybrid_rl.agents.chat import Chat
from hybrid_rl.agents.client import ChatFormat, Limits
from hybrid_rl.agents.episode import Agent
from hybrid_rl.agents.plain_text import PlainText
from hybrid_rl.rollout.episodes import EpisodeSettings
from hybrid_rl.workers.setup import WorkerSetup


def episode_settings(setup: WorkerSetup) -> EpisodeSettings:
    """Return how the agents of a worker make trajectories. Raises ConfigError for agents that cannot be used."""
    config, agents = setup.config, setup.agents
    assert agents is not None
    limits = Limits(
        config.rollout.max_completion_length,
        setup.max_length,
        config.agents.max_tool_calling_iterations,
        setup.max_length - config.rollout.max_completion_length,
    )
    return EpisodeSettings(
        chat_format(setup),
        None if agents.rollout_func is not None else make_agent(setup),
        limits,
        config.agents,
        config.seed,
        max_running=max(1, config.rollout.max_num_seqs // config.rollout.ranks_per_engine),
        rollout_func=agents.rollout_func,
        tokenizer=setup.tokenizer,
        turn_rewards_problem=agents.turn_rewards_problem,
    )


def chat_format(setup: WorkerSetup) -> ChatFormat:
    """Return how messages become tokens, and answers messages."""
    config = setup.config
    kwargs = config.data.chat_template_kwargs
    if not (setup.tokenizer.chat_template or kwargs.get("chat_template")):
        return PlainText(setup.tokenizer)
    return Chat(
        setup.tokenizer,
        chat_template_kwargs=kwargs,
        tool_call_format=config.agents.tool_call_format,
        rewritten_history=config.agents.rewritten_history,
    )


def make_agent(setup: WorkerSetup) -> Agent:
    """Return the agent that makes one trajectory at a time."""
    assert setup.agents is not None
    if setup.agents.agent is not None:
        return HttpAgent(setup.agents.agent, temperature=setup.config.rollout.temperature)
    return setup.agents.tool_agent(setup.config.agents)
