"""Reward models: sequence classification with one label, run packed. The score of a sequence is the output of the head
for the hidden state of its last token that is not padding, as in transformers' own forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from hybrid_rl.batch import Jagged
from hybrid_rl.compat.transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from hybrid_rl.errors import ModelError
from hybrid_rl.memory.transfer import upload
from hybrid_rl.models.experts.routing import HeldRouting
from hybrid_rl.models.model_loading import loading
from hybrid_rl.models.packed.causal_lm import CausalLM
from hybrid_rl.models.packed.startup_check import (
    VERIFY_TOLERANCE,
    check_survey,
    check_weights,
    named_failure,
    own_attention,
    same_places,
)
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.models.row import PackedRow

# Sequences that a model is verified on, as prompt and completion: two share a prompt, one has no completion.
VERIFY_SEQUENCES = (((5, 9, 4), (7, 3)), ((5, 9, 4), (8,)), ((6, 2, 9, 3), ()))

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


def classifier_recipe(path: str, *, trust_remote_code: bool = False) -> ModelRecipe:
    """Describe the reward model of a folder or hub name; its head has one label (as TRL loads it), whatever its config
    says.

    Raises ModelError if its config cannot be loaded, or transformers has no such class for its family.
    """
    recipe = ModelRecipe.of_folder(path, trust_remote_code=trust_remote_code)
    with loading("the config of reward model", path):
        config: Any = AutoConfig.from_pretrained(str(recipe.path), trust_remote_code=trust_remote_code)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"reward model {path!r}: transformers has no sequence classification for {config.model_type!r}; use a "
            f"model of a family that has"
        )
    config.num_labels = 1
    model_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    return dataclasses.replace(recipe, model_class=model_class, config=config)


def check_classifier(module: PreTrainedModel, name: str) -> None:
    """Raise ModelError for a module that is not a sequence classifier with one label."""
    labels = getattr(module.config, "num_labels", None)
    if "ForSequenceClassification" not in type(module).__name__ or labels != 1:
        raise ModelError(
            f"reward model {name!r} is a {type(module).__name__} with {labels} labels; give a "
            f"...ForSequenceClassification with num_labels=1, or a function that calls it"
        )


def last_token_row(
    sequences: Sequences, pad_token_id: int | None, device: torch.device, least_saved: float | None = None
) -> PackedRow:
    """Lay N sequences out as one row, whose `sources` are the places of their last tokens. What they share is
    computed once. least_saved: as of `PackedRow.of`."""
    stripped = [_without_padding(prompt, completion, pad_token_id) for prompt, completion in sequences]
    prompts = Jagged.from_rows([list(prompt) for prompt, _ in stripped], torch.int64)
    # The place that predicts one more token is the place of the last one.
    completions = Jagged.from_rows([[*completion, 0] for _, completion in stripped], torch.int64)
    row = PackedRow.of(prompts, completions, device, least_saved)
    (last,) = upload([completions.offsets[1:] - 1], device)
    return row.at(last)


def row_tokens(sequences: Sequences) -> list[int]:
    """Return the tokens of each sequence in such a row, no prompt shared."""
    return [len(prompt) + len(completion) + 1 for prompt, completion in sequences]


def sequence_scores(model: CausalLM, sequences: Sequences) -> Tensor:
    """Compute the score of each sequence, float32 (float64 of a float64 model) [N]; none may be longer than the model
    has positions. Collective if the model is sharded."""
    least_saved = model.attention.least_saved(model.device)
    row = last_token_row(sequences, pad_token_id(model.module), model.device, least_saved)
    if model.max_positions is not None:  # the place after the last token may have none
        row = dataclasses.replace(row, positions=row.positions.clamp(max=model.max_positions - 1))
    return model.row_values(row)


def pad_token_id(module: PreTrainedModel) -> int | None:
    """Return the padding token that the module's own forward pass looks for."""
    return getattr(module.config.get_text_config(), "pad_token_id", None)


@torch.no_grad()
def verify_scores(model: CausalLM) -> float:
    """Compare packed scores of a model that is not sharded with its module's own forward of each sequence; the largest
    gap, relative to the largest number that could come of such hidden states.

    Raises ModelError if they differ: scores would be wrong, silently.
    """
    plain: Any = model.module
    name = type(plain).__name__
    model.masked_from = check_survey(model)
    routing, expected, sizes = HeldRouting(plain), [], []
    sequences = [[*prompt, *completion] for prompt, completion in VERIFY_SEQUENCES]
    with own_attention(plain), routing.recording():
        for sequence in sequences:
            ids = torch.tensor([sequence], device=model.device)
            output = plain(input_ids=ids, use_cache=False, output_hidden_states=True)
            expected.append(output.logits[0, 0])
            sizes.append(output.hidden_states[-1][0, -1].norm())
    row = last_token_row(VERIFY_SEQUENCES, pad_token_id(plain), model.device, model.attention.least_saved(model.device))
    places, own = same_places(row, sequences)
    with named_failure(name, "with packed sequences"), routing.repeating(own):
        scores = sequence_scores(model, VERIFY_SEQUENCES)
    head = next(child for child in plain.children() if isinstance(child, torch.nn.Linear))
    scale = (torch.stack(sizes).max() * head.weight.norm()).clamp(min=1e-6)
    gap = float((scores - torch.stack(expected).to(scores.dtype)).abs().max() / scale)
    gap = max(gap, *routing.gaps(places).values(), 0.0)
    if not gap <= VERIFY_TOLERANCE.get(model.dtype, 1e-3):
        check_weights(plain)
        raise ModelError(
            f"{name} gives other scores with packed sequences (relative gap {gap:.1e}); this architecture is not "
            f"supported as a reward model"
        )
    return gap


def _without_padding(
    prompt: Sequence[int], completion: Sequence[int], pad_id: int | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Cut padding off the end; at least the first token is left."""
    while completion and completion[-1] == pad_id:
        completion = completion[:-1]
    while not completion and len(prompt) > 1 and prompt[-1] == pad_id:
        prompt = prompt[:-1]
    return prompt, completion
