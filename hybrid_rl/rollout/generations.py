"""Generated completions as `Trainer.generate` returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_rl.batch import Batch, Trajectories
from hybrid_rl.batch.messages import prompt_text
from hybrid_rl.data.prompts import Messages, shorten


@dataclass(frozen=True, repr=False)
class Generation:
    """One generated completion; `.completion` is its text. logprobs: ln p of each token under the distribution that it
    was sampled from; 0.0 of what tools and environments put between the policy's tokens. messages: the conversation
    after the prompt, if an agent held one in messages. error: the traceback of an agent that failed."""

    prompt: Any
    completion: str
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    messages: Messages | None = None
    error: str | None = None

    def __repr__(self) -> str:
        texts = (shorten(prompt_text(self.prompt)), shorten(self.completion, 200))
        numbers = f"{len(self.completion_ids)} tokens, {self.finish_reason}"
        return f"Generation({' -> '.join(texts)}, {numbers}{', failed' if self.error else ''})"


def generations_of(batch: Batch) -> list[Generation]:
    """Return the samples of a batch one by one, in order; of a trajectory of several the last one. One without any
    token of the policy has an empty completion."""
    batch = Trajectories.of(batch).last_turns(batch)
    has_agents = "conversation" in batch
    talks = batch["conversation"] if has_agents else [{}] * batch.num_samples
    lengths = batch["policy_length" if has_agents else "completion_length"].tolist()
    columns = ("prompt", "completion", "completion_ids", "rollout_logprobs", "finish_reason")
    return [
        Generation(prompt, text, ids.tolist(), logprobs.tolist(), reason, talk.get("messages"), talk.get("error"))
        if length
        else Generation(prompt, "", [], [], reason, talk.get("messages"), talk.get("error"))
        for length, talk, (prompt, text, ids, logprobs, reason) in zip(
            lengths, talks, zip(*(batch[name] for name in columns), strict=True), strict=True
        )
    ]
