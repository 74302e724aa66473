"""Reward models: frozen sequence classification models that score whole samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.batch import Batch, Trajectories
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.data.packing import pack_by_tokens
from hybrid_rl.data.rendering import MessageRenderer
from hybrid_rl.errors import ModelError
from hybrid_rl.memory.shortage import Halvings
from hybrid_rl.models import CausalLM, check_tokenizer, load_tokenizer
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.packed.classifier import (
    VERIFY_SEQUENCES,
    check_classifier,
    classifier_recipe,
    row_tokens,
    sequence_scores,
    verify_scores,
)
from hybrid_rl.models.packed.startup_check import VERIFY_TOLERANCE, relative_gap
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.process import progress
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.rewards import RewardFailure, RewardModelEntry
from hybrid_rl.rollout.deferred_scores import LateScores
from hybrid_rl.training.batch_plan import token_cap
from hybrid_rl.training.sharding.build import call_options, filled
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM
from hybrid_rl.weights.sources import StateSource

# Computed by a rank while others still have samples; the result is not used.
FILLER = (((0,), ()),)


class RewardModel:
    """One reward model on this rank: whole with one rank, sharded with more.

    entry: its model is a folder or hub name, a module of this process or a recipe; its tokenizer is loaded with it
    if none is given. Prompt and completion are tokenised again from text, even where policy and reward model have one
    tokenizer: messages by the reward model's own chat template, to the end of the conversation as in its training; text
    as one text without special tokens. TRL does the same (grpo_trainer.py, `_calculate_rewards`).

    Collective if there are several ranks. Raises ModelError for a model that cannot be used.
    """

    def __init__(self, entry: RewardModelEntry, config: TrainerConfig, context: RankContext) -> None:
        self.name = entry.name
        self.tokens_per_micro_batch, self._context = config.optimizer.tokens_per_micro_batch, context
        self._halvings = Halvings(is_alone=context.num_ranks == 1)
        self.model = build_reward_model(entry, config, context)
        self._tokenizer = _tokenizer_of(entry, config)
        # Not the policy's template, which may be among them.
        template_kwargs = config.data.chat_template_kwargs or {}
        kwargs = {name: value for name, value in template_kwargs.items() if name != "chat_template"}
        self._renderer = MessageRenderer(self._tokenizer, kwargs)
        check_tokenizer(self._tokenizer, self.model.module)
        self._verify()

    @torch.no_grad()
    def _verify(self) -> None:
        if not isinstance(self.model, ShardedCausalLM):
            verify_scores(self.model)
            return
        with self.model.twin.bound():
            plain = self.model.plain_twin()
            verify_scores(plain)
            self.model.masked_from = plain.masked_from
            expected = sequence_scores(plain, VERIFY_SEQUENCES)
        gap = relative_gap(sequence_scores(self.model, VERIFY_SEQUENCES), expected)
        if not gap <= VERIFY_TOLERANCE.get(self.model.dtype, 1e-3):
            raise ModelError(
                f"reward model {self.name!r} gives other scores on shards (relative gap {gap:.1e}); this architecture "
                f"is not supported on several ranks"
            )

    @torch.no_grad()
    def scores(self, batch: Batch) -> Tensor:
        """Compute the score of every sample, float64 [N]; NaN for those that are longer than the model takes.

        Collective: ranks with fewer micro-batches run FILLER meanwhile.
        """
        sequences = _with_shared_starts([self._ids(batch, row) for row in range(batch.num_samples)], batch)
        lengths, limit = row_tokens(sequences), self.model.length_limit
        rows = [row for row, size in enumerate(lengths) if limit is None or size - 1 <= limit.num_tokens]
        sizes = [lengths[row] for row in rows]
        cap = max(token_cap(self.model.device, self.tokens_per_micro_batch, sizes), *sizes, 1)
        micros = pack_by_tokens(sizes, cap) if sizes else []
        scores = torch.full((batch.num_samples,), torch.nan, dtype=torch.float64)
        progress.count(len(rows), "samples")

        def score(part: Sequence[int]) -> Tensor:
            return sequence_scores(self.model, [sequences[row] for row in part] or FILLER).double().cpu()

        for number in range(max(self._context.gather(len(micros)))):
            mark_progress()
            chosen = [rows[i] for i in micros[number]] if number < len(micros) else []
            values = self._halvings.each(score, chosen, lambda part: sum(lengths[row] for row in part))
            if chosen:
                scores[chosen] = torch.cat(values)
            progress.advance(len(chosen))
        return scores

    def _ids(self, batch: Batch, row: int) -> list[int]:
        """Return the tokens of a sample, prompt and completion."""
        prompt, completion = batch["prompt"][row], batch["completion"][row]
        ids: list[int]
        if isinstance(prompt, str):
            ids = self._tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
        else:
            messages = batch["conversation"][row].get("messages") if "conversation" in batch else None
            ids = self._chat(prompt, completion, messages)
        if not ids:
            raise ModelError(
                f"reward model {self.name!r}: its tokenizer makes no token of {prompt!r:.100} {completion!r:.100}"
            )
        return ids

    def _chat(
        self, prompt: Sequence[Mapping[str, Any]], completion: str, told: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Return the tokens of a conversation. told: what followed the prompt, None = the completion only."""
        messages = [*prompt, *(told or ())]
        if not told and messages[-1]["role"] == "assistant":  # the completion continues it
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + completion}
        elif not told:
            messages.append({"role": "assistant", "content": completion})
        text = self._renderer.render(messages, "closed")
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_shared_starts(ids: Sequence[list[int]], batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return each sample's tokens in two parts, of which samples of one prompt have the first in common: the model
    computes that once."""
    prompts = [tuple(prompt.tolist()) for prompt in batch["prompt_ids"]]
    members: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt, of_sample in zip(prompts, ids, strict=True):
        members.setdefault(prompt, []).append(of_sample)
    lengths = {prompt: len(os.path.commonprefix(those)) for prompt, those in members.items()}
    return [
        (sample_ids[: lengths[prompt]], sample_ids[lengths[prompt] :])
        for prompt, sample_ids in zip(prompts, ids, strict=True)
    ]


class RewardModels:
    """All reward models of a run, by their places in reward_funcs. Same arguments as RewardModel."""

    def __init__(
        self,
        entries: Mapping[int, RewardModelEntry],
        names: Sequence[str],
        config: TrainerConfig,
        context: RankContext,
    ) -> None:
        self._names = names
        self._models = {place: RewardModel(entry, config, context) for place, entry in entries.items()}

    def check_prompts(self, prompt: Any) -> None:
        """Raise ModelError if a model cannot score prompts of this kind: messages without a chat template."""
        for model in self._models.values():
            if not isinstance(prompt, str) and not getattr(model._tokenizer, "chat_template", None):
                raise ModelError(
                    f"reward model {model.name!r}: its tokenizer has no chat template, but prompts are messages; pass "
                    f"reward_processing_classes= with one that has"
                )

    def reconfigure(self, config: TrainerConfig) -> None:
        """Go on with micro-batches of another size."""
        for model in self._models.values():
            model.tokens_per_micro_batch = config.optimizer.tokens_per_micro_batch

    @property
    def models(self) -> list[CausalLM]:
        """The models that score."""
        return [model.model for model in self._models.values()]

    def late_scores(self, batch: Batch) -> LateScores:
        """Score this rank's trajectories by their last turns. Collective."""
        batch = Trajectories.of(batch).last_turns(batch)
        keys = sample_keys(batch)
        values: dict[int, list[float | None]] = {}
        failures: list[RewardFailure] = []
        for place, model in self._models.items():
            scores = model.scores(batch)
            limit = model.model.length_limit
            detail = (
                "" if limit is None else f"prompt and completion take more than {limit.num_tokens} tokens: {limit.why}"
            )
            for row in scores.isnan().nonzero()[:, 0].tolist():
                failures.append(RewardFailure(self._names[place], keys[row], "long", detail))
            values[place] = [None if score != score else score for score in scores.tolist()]
        return LateScores(values, failures)


def build_reward_model(entry: RewardModelEntry, config: TrainerConfig, context: RankContext) -> CausalLM:
    """Build the model of an entry on this rank, frozen. Collective if there are several ranks."""
    model = entry.model
    # They need not be of the policy's architecture, and run packed whatever the policy does.
    options = call_options(config, is_trained=False) | {"attention": config.model.attention, "exact": False}
    if isinstance(model, PreTrainedModel):
        check_classifier(model, entry.name)
        if context.num_ranks == 1:
            return CausalLM(model.requires_grad_(False), **options)
        model = ModelRecipe.of_module(model, StateSource(model.state_dict()))
    if isinstance(model, str):
        model = classifier_recipe(model, trust_remote_code=config.model.trust_remote_code)
    if not isinstance(model, ModelRecipe):
        raise ModelError(f"reward model {entry.name!r} is a {type(model).__name__}; give a path or a PreTrainedModel")
    module = build_on_meta(model, DTYPES[config.model.dtype]).requires_grad_(False)
    check_classifier(module, entry.name)
    return filled(module, model.source, config, context, options)


def _tokenizer_of(entry: RewardModelEntry, config: TrainerConfig) -> Any:
    if entry.tokenizer is not None:
        return entry.tokenizer
    path = entry.model if isinstance(entry.model, str) else getattr(entry.model, "path", None)
    if path is None and isinstance(entry.model, PreTrainedModel):
        path = entry.model.config.name_or_path or None
    if path is None:
        raise ModelError(
            f"reward model {entry.name!r} was passed as a module; pass its tokenizer in reward_processing_classes="
        )
    return load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
