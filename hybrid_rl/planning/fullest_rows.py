"""The fullest micro-batch that a configuration allows, as columns of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_rl.algos import Needs
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.training.spec import LossSpec


@dataclass(frozen=True)
class Samples:
    """Samples by their lengths in tokens. groups: which of them have the same prompt."""

    prompts: tuple[int, ...]
    completions: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of a packed row of them, in which a group has its prompt once."""
        return sum(dict(zip(self.groups, self.prompts, strict=True)).values()) + sum(self.completions)

    @classmethod
    def fullest(
        cls, max_tokens: int, *, prompt: int, completion: int, num_generations: int, num_samples: int, is_packed: bool
    ) -> Samples:
        """Fill a micro-batch with samples of full length, and what is left with a shorter one. is_packed: False if
        every sample has its own prompt and is padded to the longest."""
        lengths: list[tuple[int, int, int]] = []
        left = max_tokens
        for index in range(num_samples):
            group = index // num_generations if is_packed else index
            is_new = not lengths or lengths[-1][2] != group
            own = prompt if is_new else 0
            if left < own + completion and (not is_packed or left < own + 1) and lengths:
                break
            lengths.append((prompt, max(1, min(completion, left - own)), group))
            left -= own + lengths[-1][1]
        return cls(*(tuple(column) for column in zip(*lengths, strict=True)))

    @property
    def columns(self) -> dict[str, Jagged]:
        """The columns of their tokens; equal prompts are equal in them, and nothing else is: it would be shared."""
        prompts = [[group] * length for group, length in zip(self.groups, self.prompts, strict=True)]
        completions = [[number] * length for number, length in enumerate(self.completions)]
        return {
            "prompt_ids": Jagged.from_rows(prompts, torch.int64),
            "completion_ids": Jagged.from_rows(completions, torch.int64),
        }


def learning_batch(samples: Samples, config: TrainerConfig, spec: LossSpec) -> Batch:
    """Return the samples with all columns that the policy's update reads."""
    columns = samples.columns
    completions, num_samples = columns["completion_ids"], len(samples.prompts)

    def per_token(*inner: int, dtype: torch.dtype = torch.float32) -> Jagged:
        return completions.with_values(torch.zeros(len(completions.values), *inner, dtype=dtype))

    numbers = torch.arange(num_samples)
    names = ["rollout_logprobs", "advantages"]
    if config.algorithm.old_logprobs != "detach":
        names.append("old_logprobs")
    if spec.kl.in_loss:
        names.append("ref_logprobs")
    if Needs.VALUES in config.advantage.needs:
        names += ["values", "returns"]
    extra: dict[str, Jagged] = {name: per_token() for name in names}
    if spec.num_top:
        extra["old_top_ids"] = per_token(spec.num_top, dtype=torch.int64)
        extra["old_top_logprobs"] = per_token(spec.num_top)
    return Batch(
        {
            **columns,
            **extra,
            "completion_mask": completions.with_values(torch.ones(len(completions.values), dtype=torch.bool)),
            "policy_version": per_token(dtype=torch.int64),
            "temperature": torch.full((num_samples,), config.rollout.temperature, dtype=torch.float64),
            "rewards": torch.ones(num_samples, dtype=torch.float64),
            "group": torch.tensor(samples.groups),
            "trajectory": numbers,
            "turn": torch.zeros(num_samples, dtype=torch.int64),
            "finish_reason": ["stop"] * num_samples,
        }
    )
