"""Agents written by hand, on a real engine of a tiny model: what tests of rollouts of agents share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybrid_rl.agents.client import Limits
from hybrid_rl.agents.plain_text import PlainText
from hybrid_rl.config import AgentConfig
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import TAGS, SamplingParams
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.rewards import GivenReward, RewardRunner, TrainerState
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.episodes import EpisodeSettings
from hybrid_rl.rollout.trajectory_stream import TrajectoryStream
from tests.support.engines.engine_settings import inplace_settings
from tests.support.tiny import EOS_ID, build_model, build_tokenizer, ids_of

STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)
PROMPTS = ("1+2=", "12+30=", "7", "3+4+5+6=")
TASKS = [
    RolloutTask(place, PromptRow(place, text, tuple(ids_of(text)), {"answer": str(place)}))
    for place, text in enumerate(PROMPTS)
]
MAX_LENGTH, MAX_TOKENS = 64, 40
TOKENIZER = build_tokenizer()


class Rig:
    """A rank's engine and the rollout of its agents."""

    def __init__(
        self,
        agent: Any,
        *,
        functions: Any = None,
        config: Mapping[str, Any] | None = None,
        max_num_seqs: int = 16,
        seed: int = 11,
        rollout_func: Any = None,
        chat: Any = None,
        **rewards: Any,
    ) -> None:
        self.module = build_model(max_position_embeddings=MAX_LENGTH)
        settings = inplace_settings(block_size=4, max_num_seqs=max_num_seqs)
        self.engine = InPlaceEngine(CausalLM(self.module), settings, max_length=MAX_LENGTH, decode=TOKENIZER.decode)
        self.engine.wake(TAGS)
        self.engine.update_weights(TensorSource.of(self.module), 1)
        self.client = EngineClient(self.engine)
        given = [GivenReward("agent", is_dense=True)]
        self.rewards = RewardRunner([*(functions or []), *given], **rewards)
        settings_of_episodes = EpisodeSettings(
            chat or PlainText(TOKENIZER),
            agent,
            Limits(MAX_TOKENS, MAX_LENGTH),
            AgentConfig(**(config or {})),
            seed,
            max_num_seqs,
            rollout_func,
            TOKENIZER,
        )
        self.rollout = TrajectoryStream(self.client, self.rewards, settings_of_episodes, encode=ids_of)

    def run(self, num_generations: int = 3, tasks: Sequence[RolloutTask] = TASKS, **options: Any) -> Any:
        params = SamplingParams(MAX_TOKENS, stop_token_ids=(EOS_ID,))
        return self.rollout.run(tasks, RolloutCall(num_generations, params, 1, STATE, "test", 100, **options))

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollout.close()
        self.rewards.close()


def own_logprobs(module: Any, batch: Any, temperature: float = 1.0) -> torch.Tensor:
    """The independent reference: ln p of every token after the prompt, by one plain forward per sample."""
    rows = []
    for prompt, completion in zip(batch["prompt_ids"], batch["completion_ids"], strict=True):
        with torch.no_grad():
            logits = module(input_ids=torch.cat([prompt, completion])[None]).logits[0]
        logits = logits[len(prompt) - 1 : -1].double() / temperature
        rows.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return torch.cat(rows)


def wandering(delay: Callable[[], float] = lambda: 0.0) -> Any:
    """An agent of three turns with tool answers between them. What it does depends on tokens only; `delay`: seconds of
    each of its tools. One in four forks: it asks with a history that begins differently."""

    async def agent(episode: Any) -> None:
        ids = ids_of(episode.prompt)
        for number in range(3):
            turn = await episode.client.generate(ids, max_tokens=2 + sum(ids) % 4)
            await asyncio.sleep(delay())
            value = sum(turn.token_ids)
            episode.trajectory.add_reward(value % 5, turn)
            ids = [*ids, *turn.token_ids, *ids_of(f"[{value % 10}]")]
            if value % 4 == 0 and number == 1:
                ids = ids[3:]

    return agent


def random_delays(seed: int, longest: float = 0.01) -> Callable[[], float]:
    noise = random.Random(seed)
    return lambda: noise.random() ** 4 * longest
