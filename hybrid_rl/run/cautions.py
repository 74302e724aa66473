"""Warnings at the start about prompts and tokens with which a run would work, but not as it seems."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.data.source import SizedSource
from hybrid_rl.models.model_loading import vocabulary_size
from hybrid_rl.models.tokenizer import end_of_turn, lacks_bos
from hybrid_rl.run.inputs import Data

logger = logging.getLogger("hybrid_rl")

# Embeddings beyond the tokenizer's tokens that come from rounding a vocabulary up. More are those of another tokenizer.
PADDED_ROWS = 1024


def caution(
    data: Data, tokenizer: PreTrainedTokenizerBase, module: PreTrainedModel, stop_ids: tuple[int, ...], extra: list[int]
) -> None:
    """Warn of turns that nothing ends, texts without the token that should begin them, a vocabulary that the tokenizer
    does not fill, and evaluation prompts that are trained on. extra: the stop tokens of the configuration."""
    _caution_of_turns(data, tokenizer, stop_ids, extra)
    surplus = vocabulary_size(module) - len(tokenizer)
    if surplus > PADDED_ROWS:
        logger.warning(
            "the model embeds %d tokens, the tokenizer has %d: the other %d have no text, whenever the policy samples "
            "one; if this is not the model's own tokenizer, leave tokenizer= out",
            *(vocabulary_size(module), len(tokenizer), surplus),
        )
    train = data.train if isinstance(data.train, SizedSource) and not data.grows else None
    for name, held_out in data.eval.items():
        if train is not None and (shared := shared_prompts(train, held_out)):
            logger.warning(
                "%d of the %d prompts of the evaluation data%s are trained on too (%s is the first): what they measure "
                "is memory. Take them out of one of the two%s",
                *(len(shared), len(held_out), f" {name!r}" if name else "", f"row {held_out[shared[0]].index}"),
                "; problem i of reasoning-gym is made from seed + i, so the seeds must be at least as far apart as "
                "either has problems"
                if held_out.is_gym
                else "",
            )


def shared_prompts(train: SizedSource, held_out: SizedSource) -> Sequence[int]:
    """Return the positions of the prompts of evaluation data that are among those of training, token by token."""
    places: dict[bytes, list[int]] = {}
    for place, key in enumerate(held_out.prompt_keys()):
        places.setdefault(key, []).append(place)
    trained = {key for key in train.prompt_keys() if key in places}
    return sorted(place for key in trained for place in places[key])


def _caution_of_turns(data: Data, tokenizer: Any, stop_ids: tuple[int, ...], extra: list[int]) -> None:
    if isinstance(data.first.prompt, str):
        if lacks_bos(tokenizer):
            logger.warning(
                "tokenizer_config.json has add_bos_token=true, but tokenizer.json puts no %r before a text, and it is "
                "followed; if the model has learned texts with it, write it at the start of each prompt",
                tokenizer.bos_token,
            )
        return
    token = end_of_turn(tokenizer, data.encoder.chat_template_kwargs)
    if token is not None and token not in stop_ids:
        logger.warning(
            "the chat template ends an answer with %r, which is not a stop token: completions go on after it, up to "
            "the limit, and their text does not show it; set stop_token_ids=%s",
            *(tokenizer.convert_ids_to_tokens(token), [*extra, token]),
        )
