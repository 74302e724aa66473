"""The data of a run: its prompt sources, and the length limit that prompts must keep."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from hybrid_rl.agents.agent_setup import AgentSetup
from hybrid_rl.config import TrainerConfig
from hybrid_rl.data.gym_rows import is_gym
from hybrid_rl.data.mixture import is_named, load_sources
from hybrid_rl.data.prompts import PromptEncoder, PromptRoom, PromptRow
from hybrid_rl.data.rendering import KWARGS_COLUMN, TOOLS_COLUMN
from hybrid_rl.data.source import SizedSource, StreamSource
from hybrid_rl.errors import ConfigError
from hybrid_rl.models import load_tokenizer
from hybrid_rl.rewards import reasoning_gym_reward
from hybrid_rl.run.adapters import tokenizer_place
from hybrid_rl.run.agent_checks import check_rows, widest
from hybrid_rl.run.evaluation import load_sets

Source = SizedSource | StreamSource
OBSERVATION_LENGTH = 1024  # tokens that an agent's prompt may get on top of the dataset's, without max_prompt_length
PROBE_LENGTH = 64  # tokens of the probe prompt: enough to exercise positions and cache, cheap at every eighth handoff


def prompt_room(config: TrainerConfig, max_positions: int | None) -> PromptRoom | None:
    """Return the tokens that the model and a micro-batch leave for a prompt; None if neither has a limit.

    Raises ConfigError if nothing is left, or less than max_prompt_length.
    """
    completion = config.rollout.max_completion_length
    candidates = {
        "tokens_per_micro_batch": config.optimizer.tokens_per_micro_batch,
        "the model's positions": max_positions,
    }
    limits = {name: limit for name, limit in candidates.items() if limit is not None}
    if not limits:
        return None
    name = min(limits, key=limits.__getitem__)
    room = limits[name] - completion
    if room < 1:
        raise ConfigError(
            f"max_completion_length={completion} leaves no room for a prompt: {name}={limits[name]}; lower it"
            + (" or raise tokens_per_micro_batch" if name == "tokens_per_micro_batch" else "")
        )
    asked = config.data.max_prompt_length
    if asked is not None and asked > room:
        raise ConfigError(
            f"max_prompt_length={asked} and max_completion_length={completion} exceed {name}={limits[name]}; lower "
            f"one of them"
        )
    return PromptRoom(room, f"{name}={limits[name]} less max_completion_length={completion}")


@dataclass(frozen=True)
class Data:
    """The prompt sources of a run and the encoder that made them. eval: sets by name (`load_sets`). grows: whether
    prompts become longer when they are used, by environments or agents. given_length: max_prompt_length as
    configured."""

    encoder: PromptEncoder
    train: Source
    eval: Mapping[str, SizedSource]
    grows: bool = False
    given_length: int | None = None

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt; None for a stream, whose length is unknown. If agents or environments make or
        extend prompts: what those may have."""
        if not isinstance(self.train, SizedSource):
            return None
        longest = max(source.max_length for source in (self.train, *self.eval.values()))
        if not self.grows:
            return longest
        room = self.encoder.room
        most = longest + OBSERVATION_LENGTH if room is None else min(longest + OBSERVATION_LENGTH, room.num_tokens)
        return self.given_length or most

    @property
    def first(self) -> PromptRow:
        """The first training prompt."""
        return self.train[0] if isinstance(self.train, SizedSource) else next(iter(self.train))

    @property
    def own_reward(self) -> Any:
        """The reward function that comes with the training data; None if there is none."""
        return reasoning_gym_reward if isinstance(self.train, SizedSource) and self.train.is_gym else None

    @property
    def notes(self) -> list[str]:
        """How the datasets are read, if they are not taken as they are, for people."""
        named = {"training data": self.train}
        named |= {f"evaluation data {name}".strip(): source for name, source in self.eval.items()}
        return [f"{name}: {source.note}" for name, source in named.items() if source.note]

    @property
    def probe_ids(self) -> tuple[int, ...]:
        """The token ids at the start of the first training prompt, at most PROBE_LENGTH."""
        return tuple(self.first.prompt_ids[:PROBE_LENGTH])


def load_data(
    train: Any,
    evaluation: Any,
    config: TrainerConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_positions: int | None,
    agents: AgentSetup | None = None,
) -> Data:
    """Validate and tokenise the datasets (arguments, or data.train_path and data.eval_path).

    max_positions: the longest sequence that the model allows, None if unknown.
    agents: what makes trajectories; environments and agents may do without prompts, and one environment without a
    dataset."""
    room = prompt_room(config, max_positions)
    grows, schemas = agents is not None and agents.makes_prompts, widest(agents)
    encoder = PromptEncoder(
        tokenizer,
        max_prompt_length=config.data.max_prompt_length or (room.num_tokens if room else None),
        overlong_prompts=config.data.overlong_prompts,
        chat_template_kwargs={**config.data.chat_template_kwargs, **({"tools": schemas} if schemas else {})},
        room=room,
        unused_columns=_unused_columns(agents),
        needs_prompts=not grows,
        prompt_column=config.data.prompt_column,
        system_prompt=config.data.system_prompt,
        apply_chat_template=config.data.apply_chat_template,
    )
    train = config.data.train_path if train is None else train
    if train is None and agents is not None and agents.kinds:
        train = _empty_rows(agents, config)
    if train is None:
        raise ConfigError("there is no training data: pass train_dataset= or set data.train_path")
    source = load_sources(train, encoder)
    evaluation = config.data.eval_path if evaluation is None else evaluation
    held_out = {} if evaluation is None else load_sets(evaluation, encoder)
    if agents is not None:
        check_rows(source, agents, "the training data")
        for eval_source in held_out.values():
            check_rows(eval_source, agents, "the evaluation data")
    return Data(encoder, source, held_out, grows, config.data.max_prompt_length)


def paths_of(dataset: Any) -> Any:
    """Return what a run folder records of a dataset or model that was passed: a path or a task as text, or a mapping of
    names to these; None if it is something else."""
    if isinstance(dataset, str | os.PathLike):
        return str(dataset)
    if not isinstance(dataset, Mapping) or not (is_gym(dataset) or is_named(dataset)):
        return None
    paths = {str(n): value if is_gym(dataset) else paths_of(value) for n, value in dataset.items()}
    return None if None in paths.values() else paths


def with_template(tokenizer: Any, config: TrainerConfig) -> Any:
    """Return the tokenizer with the chat template of data.chat_template_path, if there is one; the given one is not
    changed. Raises ConfigError if the file cannot be read or is no template."""
    path = config.data.chat_template_path
    if path is None:
        return tokenizer
    if "chat_template" in config.data.chat_template_kwargs:
        raise ConfigError("chat_template_path and chat_template in chat_template_kwargs are both set; leave one out")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_path={path!r} cannot be read: {error}; give a Jinja file in UTF-8") from error
    changed = copy.copy(tokenizer)
    changed.chat_template = text
    try:
        changed.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat_template_path={path!r}, line {error.lineno}: {error.message}; correct it") from error
    except Exception:  # what it demands of messages is checked with those of the data
        pass
    return changed


def tokenizer_of(path: str, config: TrainerConfig) -> Any:
    """Return the tokenizer of a model by name or folder, with its template as `with_template`. Raises ModelError if
    there is none."""
    tokenizer = load_tokenizer(tokenizer_place(path), trust_remote_code=config.model.trust_remote_code)
    return with_template(tokenizer, config)


def _unused_columns(agents: AgentSetup | None) -> dict[str, str]:
    """Return the columns for chat templates that trajectories of agents have no use for, each with the reason. Agents
    of the user's own get all columns, and may show the tools in them."""
    if agents is None:
        return {}
    return {
        TOOLS_COLUMN: "tools= and environment_factory= say what the policy can call" if agents.has_tools else "",
        KWARGS_COLUMN: "trajectories of tools and agents get data.chat_template_kwargs alone",
    }


def _empty_rows(agents: AgentSetup, config: TrainerConfig) -> list[dict[str, Any]]:
    """Return rows for an environment that finds its own tasks: one step's, which repeat (as in TRL)."""
    if agents.is_by_name:
        raise ConfigError(
            "environment_factory is a dict, so a dataset must say by its column `environment` which row needs which: "
            "pass train_dataset=, or a single class"
        )
    if config.max_steps is None:
        raise ConfigError("without train_dataset= the environment finds its own tasks, for ever: set max_steps")
    return [{}] * config.data.prompts_per_step
