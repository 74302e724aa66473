"""Arguments of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.agents.agent_setup import AgentSetup
from hybrid_rl.agents.turn_record import TurnFiles
from hybrid_rl.algos import Needs
from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import needs_reference, reference_ranks
from hybrid_rl.errors import ConfigError, counted
from hybrid_rl.memory.comparison import Expected
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.rewards import RewardList, RewardRunner
from hybrid_rl.rollout.demonstrations import DemonstrationEncoder


@dataclass(frozen=True)
class RewardSetup:
    """The reward functions, and how they are called. available_columns: of the dataset, None = not known. num_added:
    how many of them, the last ones, the configuration added to the user's, each of which weighs 1; num_sources: how
    many before those are rewards that come with samples, which weigh 1 unless the user says otherwise.
    has_environments: whether functions get `environments`."""

    functions: Any
    available_columns: tuple[str, ...] | None
    num_added: int = 0
    num_sources: int = 0
    has_environments: bool = False

    @property
    def entries(self) -> RewardList:
        """The functions by kind."""
        return RewardList.of(self.functions)

    def weights(self, given: Sequence[float] | None) -> list[float] | None:
        """Return the weights of all functions, from those that the user gave: for the user's functions, or for those
        and the rewards that come with samples after them. Raises ConfigError for another number."""
        if given is None:
            return None
        names = self.entries.names
        num_known = len(names) - self.num_added
        num_functions = num_known - self.num_sources
        if len(given) not in (num_functions, num_known):
            own, sources = ", ".join(names[:num_functions]), ", ".join(names[num_functions:num_known])
            hint = (
                f"; the reward of {sources} weighs 1, unless weights are given for all {num_known}, its own last"
                if sources
                else ""
            )
            raise ConfigError(
                f"{counted(len(given), 'reward weight')} for {counted(num_functions, 'reward function')}"
                f"{f' ({own})' if own else ''}{hint}; give one weight for each"
            )
        return [*given, *([1.0] * (len(names) - len(given)))]

    def runner(self, config: TrainerConfig) -> RewardRunner:
        """Make their runner. Raises ConfigError for functions that cannot be used."""
        return RewardRunner(
            self.functions,
            weights=self.weights(config.rewards.reward_weights),
            available_columns=self.available_columns,
            num_processes=config.rewards.reward_processes,
            timeout_seconds=config.rewards.reward_timeout_seconds,
            score_by=config.rewards.score_by,
            has_environments=self.has_environments,
        )


def demonstration_encoder(tokenizer: PreTrainedTokenizerBase, config: TrainerConfig) -> DemonstrationEncoder:
    """Make the encoder that turns the dataset's own completions into tokens."""
    return DemonstrationEncoder(tokenizer, chat_template_kwargs=config.data.chat_template_kwargs)


@dataclass(frozen=True)
class WorkerSetup:
    """Arguments from which a rank builds its worker. model: a module of this process, or how to build it in any.
    probe_ids: the prompt on which engine and trainer are compared; first_prompt: one as the dataset has it. teacher:
    the model that is distilled, if any; critic: the model that the critic starts from, if that is not the policy.
    fingerprint: outputs of the live module that the recipe copies. expected: memory of a rank, as planned. agents: what
    makes trajectories of many turns, None = each sample is one completion. is_trained: False for a policy without an
    optimizer, which only generates; generates: False for one without an engine, which is only trained. turn_files:
    for the turns of agents that have ended, None = they are not written down."""

    model: PreTrainedModel | ModelRecipe
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardSetup
    config: TrainerConfig
    num_optimizer_steps: int
    max_length: int
    probe_ids: tuple[int, ...]
    first_prompt: Any = ""
    teacher: PreTrainedModel | ModelRecipe | None = None
    critic: ModelRecipe | None = None
    num_critic_steps: int = 0
    fingerprint: list[float] | None = None
    expected: Expected | None = None
    agents: AgentSetup | None = None
    turn_files: TurnFiles | None = None
    is_trained: bool = True
    generates: bool = True

    @property
    def engine_length(self) -> int:
        """Tokens of the longest sequence that the engine must take: a sample, or a question to a judge."""
        return self.rewards.entries.max_length(self.max_length)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's logprobs are needed."""
        return needs_reference(self.config)

    @property
    def has_own_reference(self) -> bool:
        """Whether the policy's own ranks compute them."""
        return self.needs_reference and not reference_ranks(self.config)

    @property
    def has_scores(self) -> bool:
        """Whether the policy's own ranks compute anything of a batch before the advantages."""
        wanted = self.config.advantage.needs & {Needs.TEACHER_LOGPROBS, Needs.VALUES, Needs.SUM_PI_SQUARED}
        return self.has_own_reference or bool(wanted) or self.config.algorithm.old_logprobs != "detach"

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
