"""Runs with partial rollouts of agents in this process: as `holding`, with a scripted agent of several turns, which
rents an environment for each trajectory."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hybrid_rl.agents.client import Limits
from hybrid_rl.batch import Batch
from hybrid_rl.config import AgentConfig
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.rollout.episodes import EpisodeSettings
from hybrid_rl.rollout.trajectory_stream import TrajectoryStream
from tests.unit.rollout.holding import MAX_TOKENS, STOP, Lengths, Run, Step, logprob_of, token_of

TOOL = 950  # a token that no policy makes


class Numbers:
    """In the place of a chat template: prompts are token ids."""

    error_role = "tool"

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Any = ()) -> dict[str, Any]:
        return {"role": "assistant", "content": ""}

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(len(token_ids))


class Environments:
    """Counts what is rented until it is scored, and who is under way. seconds: of the tool between two turns, by
    prompt and turn."""

    def __init__(self, seconds: Callable[[int, int], float] = lambda prompt, turn: 0.0) -> None:
        self.seconds = seconds
        self.num_rented = self.num_open = self.most_open = 0
        self._lock = threading.Lock()  # ranks are threads

    async def agent(self, episode: Any) -> None:
        """One to four turns with a tool between two of them."""
        prompt = int(episode.row.get("answer", 900))
        self._count(rented=1, begun=1)
        episode.trajectory.on_left.append(partial(self._count, rented=-1))
        ids = [prompt]
        try:
            for turn in range(1 + prompt % 4):
                made = await episode.client.generate(ids)
                await asyncio.sleep(self.seconds(prompt, turn))
                ids = [*ids, *made.token_ids, TOOL]
        finally:
            self._count(begun=-1)

    def _count(self, rented: int = 0, begun: int = 0) -> None:
        with self._lock:
            self.num_rented += rented
            self.num_open += begun
            self.most_open = max(self.most_open, self.num_open)


class AgentRun(Run):
    """A run whose samples are trajectories. keys: of AgentConfig."""

    def __init__(self, *arguments: Any, environments: Environments, keys: Mapping[str, Any] | None = None) -> None:
        self.environments, self.keys = environments, keys or {}
        # Answers with tokens of several versions, and answers by other weights than the one before.
        self.num_broken_turns = self.num_others = 0
        super().__init__(*arguments)

    def _rank(self, client: EngineClient, gather: Callable[[Any], list[Any]]) -> Any:
        rewards, chat, limits, config = Lengths(), Numbers(), Limits(MAX_TOKENS, 10**4), AgentConfig(**self.keys)
        settings = EpisodeSettings(chat, self.environments.agent, limits, config, 7, self.setting.slots)
        return TrajectoryStream(client, rewards, settings, gather=gather)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def kill(self, num_ranks: int | None = None) -> None:
        self.close()
        super().kill(num_ranks)

    def _checked(self, batch: Batch) -> Step:
        setting, found = self.setting, Step(self.step)
        names = ("completion_ids", "rollout_logprobs", "policy_version", "completion_mask", "prompt_ids")
        numbers = dict[int, int]()
        for place, rows in enumerate(zip(*(batch[name] for name in names), strict=True)):
            ids, logprobs, versions, mask, (prompt,) = (row.tolist() for row in rows)
            generation = numbers[prompt] = numbers.get(prompt, -1) + 1
            at, before, made = 0, -1, [version for version in versions if version >= 0]
            for token, logprob, version, is_policy in zip(ids, logprobs, versions, mask, strict=True):
                if not is_policy:
                    assert (token, logprob, version) == (TOOL, 0.0, -1)
                    at = 0
                    continue
                assert token in (STOP, token_of(prompt, at)) and logprob == logprob_of(version, at)
                self.num_broken_turns += at > 0 and version != before
                self.num_others += at == 0 and before not in (-1, version)
                at, before = at + 1, version
            assert made == sorted(made) and max(made) <= self.step
            assert self.step - min(made) <= setting.max_staleness, (self.step, made)
            found.samples[prompt, generation] = (tuple(ids), tuple(made), float(batch["rewards"][place]))
        assert set(numbers.values()) == {setting.num_generations - 1} and len(numbers) == setting.num_prompts
        return found


def sleepy(seed: int, longest: float) -> Callable[[int, int], float]:
    """Tools that are instant in two of three cases."""
    noise = random.Random(seed)
    return lambda prompt, turn: longest * noise.random() * (noise.random() < 0.33)
