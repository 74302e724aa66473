"""A scripted agent of several turns, which rents an environment for each trajectory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

TOOL = 90  # what a tool says


class Numbers:
    """In the place of a chat template: prompts are token ids."""

    error_role = "tool"

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Any = ()) -> dict[str, Any]:
        return {"role": "assistant", "content": ""}

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(len(token_ids))


class Environments:
    """Counts what is rented until it is scored, and who is under way. seconds: of the tool between two turns, by
    prompt and turn; encode: the tokens of a prompt."""

    def __init__(
        self,
        seconds: Callable[[int, int], float] = lambda prompt, turn: 0.0,
        encode: Callable[[int], Sequence[int]] = lambda prompt: (prompt,),
    ) -> None:
        self.seconds, self.encode = seconds, encode
        self.num_rented = self.num_open = self.most_open = 0
        self._lock = threading.Lock()  # ranks are threads

    async def agent(self, episode: Any) -> None:
        """One to four turns with a tool between two of them."""
        prompt = int(episode.row.get("answer", 900))
        self._count(rented=1, begun=1)
        episode.trajectory.on_left.append(partial(self._count, rented=-1))
        ids = [*self.encode(prompt)]
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
