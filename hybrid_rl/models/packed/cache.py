"""A model's own cache: keys and values, states of convolutions and recurrences, whatever transformers keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from hybrid_rl.compat.torch import tree_leaves
from hybrid_rl.errors import ModelError
from hybrid_rl.models.packed.packed_model import PackedModel
from hybrid_rl.models.packed.startup_check import VERIFY_TOLERANCE, relative_gap, various_tokens

NAMES = ("past_key_values", "cache_params")  # the argument by which models take a cache, and the output that has it


@dataclass(frozen=True)
class ModelCache:
    """What a model keeps of B sequences of one length. name: the argument by which it takes it."""

    name: str
    cache: Cache

    def select(self, rows: Sequence[int]) -> None:
        """Keep these of the B sequences, in this order; one that is named several times is copied."""
        index: Any = torch.tensor(rows, dtype=torch.int64)
        self.cache.reorder_cache(index)

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds."""
        held = tree_leaves([vars(layer) for layer in self.cache.layers])
        return sum(value.numel() * value.element_size() for value in held if isinstance(value, Tensor))


def next_states(model: PackedModel, token_ids: Tensor, cached: ModelCache | None) -> tuple[Tensor, ModelCache]:
    """Return last hidden states [B, H] of B sequences that begin, or continue, with int64 [B, L] tokens, and the cache.

    Raises ModelError if the model gives no cache of transformers.
    """
    arguments = {} if cached is None else {cached.name: cached.cache}
    output = model.own_forward(token_ids, use_cache=True, **arguments)
    for name in NAMES:
        cache = output.get(name)
        if isinstance(cache, Cache):
            return output.last_hidden_state[:, -1], ModelCache(name, cache)
    raise ModelError(
        f"{type(model.module).__name__} does not return a transformers cache (it returns {', '.join(output)}); "
        f"rollout.engine=hf cannot generate with it"
    )


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a sequence in a cache: fixed_bytes, and for each of its tokens token_bytes (less with windows)."""

    fixed_bytes: int
    token_bytes: int

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PackedModel) -> CacheSize:
        """Measure it on sequences of one and two tokens."""
        token = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        bytes_of_one, bytes_of_two = (next_states(model, token[:, :length], None)[1].num_bytes for length in (1, 2))
        return cls(2 * bytes_of_one - bytes_of_two, bytes_of_two - bytes_of_one)

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a sequence of so many tokens."""
        return self.fixed_bytes + self.token_bytes * num_tokens


@torch.inference_mode()
def check_cache(model: PackedModel) -> float:
    """Compare what a model decodes with its cache, whose rows are copied, reordered and dropped meanwhile, with its
    forward pass without a cache; return the largest relative gap.

    Raises ModelError if they differ, or if rows of the cache cannot be chosen.
    """
    name = type(model.module).__name__
    tokens = various_tokens(model.module, 7).to(model.device)
    a, b, c, d, e = tokens[:2], tokens[2:4], tokens[4:5], tokens[5:6], tokens[6:]
    decoded = []
    try:
        _, cached = next_states(model, torch.stack([a, b]), None)
        cached.select([1, 0, 0])
        hidden, cached = next_states(model, torch.stack([c, d, c]), cached)
        decoded.append(hidden)
        cached.select([2, 1])
        decoded.append(next_states(model, torch.stack([e, e]), cached)[0])
    except ModelError:
        raise
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        raise ModelError(
            f"{name} does not decode with rows of its own cache: {error}; rollout.engine=hf cannot generate with it"
        ) from error
    expected = []
    wholes: list[list[tuple[Tensor, ...]]] = [[(b, c), (a, d), (a, c)], [(a, c, e), (a, d, e)]]
    for rows in wholes:
        whole = torch.stack([torch.cat(row) for row in rows])
        expected.append(model.own_forward(whole, use_cache=False).last_hidden_state[:, -1])
    gap = max(relative_gap(*pair) for pair in zip(decoded, expected, strict=True))
    if not gap <= VERIFY_TOLERANCE.get(model.dtype, 1e-3):
        raise ModelError(
            f"{name} gives different results with and without its cache (relative gap {gap:.1e}); rollout.engine=hf "
            f"cannot generate with it"
        )
    return gap
