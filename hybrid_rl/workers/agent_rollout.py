"""The rollout of a rank whose samples agents make."""

from __future__ import annotations

from hybrid_rl.agents.chat import Chat
from hybrid_rl.agents.client import Limits
from hybrid_rl.agents.episode import Agent
from hybrid_rl.agents.plain_text import PlainText
from hybrid_rl.agents.turn_record import TurnRecord
from hybrid_rl.process.hooks import extra
from hybrid_rl.rollout.episodes import EpisodeSettings
from hybrid_rl.workers.setup import WorkerSetup


def episode_settings(setup: WorkerSetup, rank: int) -> EpisodeSettings:
    """Return how the agents of a worker make trajectories. rank: of the worker, whose record they write. Raises
    ConfigError for agents that cannot be used."""
    config, agents, tokenizer = setup.config, setup.agents, setup.tokenizer
    assert agents is not None
    kwargs, chat = config.data.chat_template_kwargs, None
    agent: Agent | None = None
    if tokenizer.chat_template or kwargs.get("chat_template"):
        chat = Chat(
            tokenizer,
            chat_template_kwargs=kwargs,
            tool_call_format=config.agents.tool_call_format,
            rewritten_history=config.agents.rewritten_history,
        )
    if agents.agent is not None:
        agent = extra("http_agent")(agents.agent, temperature=config.rollout.temperature)
    elif agents.rollout_func is None:
        agent = agents.tool_agent(config.agents)
    longest = config.rollout.max_completion_length
    return EpisodeSettings(
        chat or PlainText(tokenizer),
        agent,
        Limits(longest, setup.max_length, config.agents.max_tool_calling_iterations, setup.max_length - longest),
        config.agents,
        config.seed,
        max_running=max(1, config.rollout.max_num_seqs // config.rollout.ranks_per_engine),
        rollout_func=agents.rollout_func,
        tokenizer=tokenizer,
        turn_rewards_problem=agents.turn_rewards_problem,
        record=TurnRecord(setup.turn_files, rank, config),
    )
