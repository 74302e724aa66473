"""A judge on the rollout engine: the policy grades its own completions."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.judging import JudgeMode, JudgeParser, JudgePrompt, JudgeStyle

# Room for a judge's own words.
PROMPT_TOKENS = 512


@dataclass(eq=False)
class EngineJudge:
    """A reward that the rollout engine gives, with the weights that made the samples.

    The engine answers the judge's prompts while it makes other groups of completions; about held groups, and samples of
    agents, in a second round of generation. They go through the policy's chat template if its tokenizer has one.

    prompt, parser: see JudgeStyle; None: a grade from 0 to 10 in <score></score>, or pairwise the winner in
    <winner></winner>, with the share of wins within the group as score. An answer in which the parser finds nothing
    leaves the sample unscored. max_tokens: of an answer. temperature: 0 = greedy. max_prompt_length: tokens of
    a question that the engine makes room for; None = the longest prompt and completion (pairwise: twice) and
    PROMPT_TOKENS. A sample whose question is longer is not scored, and counts as failed.
    Raises ConfigError for an unusable argument.
    """

    prompt: JudgePrompt | None = None
    parser: JudgeParser | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    mode: JudgeMode = "pointwise"
    max_prompt_length: int | None = None
    name: str = "engine_judge"

    def __post_init__(self) -> None:
        limit = self.max_prompt_length
        if self.max_tokens < 1 or self.temperature < 0 or (limit is not None and limit < 1):
            raise ConfigError(
                f"max_tokens={self.max_tokens} and max_prompt_length={limit} must be at least 1, "
                f"temperature={self.temperature} at least 0"
            )
        self.style = JudgeStyle.of(self.mode, self.prompt, self.parser)
        self.__name__ = self.name

    def max_length(self, sample_length: int) -> int:
        """Count the tokens of the longest question with its answer. sample_length: of a prompt with completion."""
        num_samples = 2 if self.mode == "pairwise" else 1
        return (self.max_prompt_length or num_samples * sample_length + PROMPT_TOKENS) + self.max_tokens
