"""One attention function under every layer of any Hugging Face causal LM.

Sequences travel packed: one row of T tokens, no padding in the linear layers. The function registered here hands each
layer's projected queries, keys and values to a context object: one of `backends.py` when training, the engine's paged
cache when generating. The thread holds the context: as a keyword it would reach attention only if every layer of an
architecture passes on keywords that it does not know. No mask function is registered next to it: transformers then
builds no mask, and does not look into the positions for packing either, which would wait for the device in every
forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from hybrid_rl.compat.transformers import config_view, viewed_config
from hybrid_rl.errors import ModelError

NAME = "hybrid_rl_packed"


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a layer beyond causal softmax attention. window: tokens seen, own included; None = all before."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


class AttentionContext(Protocol):
    """Computes attention for one packed row of T tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Compute attention. query: [T, num_heads, D]; key, value: [T, num_key_value_heads, D]. Returns [T, num_heads,
        D]."""
        ...


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """Compute attention, called by transformers in every layer. query: [1, H, T, D]; returns [1, T, H, D] and no
    weights."""
    context = current_context()
    if attention_mask is not None:  # the architecture made it: packing needs none, and would ignore it
        raise ModelError(f"{type(module).__name__} makes its own attention mask; it cannot run packed")
    layer, options = options_of(module, keywords)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return context.attend(layer, q, k, v, options).unsqueeze(0), None


# Keywords that decide nothing here: dropout is off, and positions are in queries and keys already.
IGNORED = frozenset({"dropout", "position_ids", "use_cache", "is_causal", "return_dict"})


def options_of(module: nn.Module, keywords: Mapping[str, Any]) -> tuple[int, AttentionOptions]:
    """Return the number of a layer, and the options in the keywords of its call of attention.

    Raises ModelError for what packed attention does not have.
    """
    name = type(module).__name__
    asked = {word: value for word, value in keywords.items() if value is not None and value is not False}
    options = AttentionOptions(
        scale=asked.pop("scaling", None), window=asked.pop("sliding_window", None), softcap=asked.pop("softcap", None)
    )
    if "s_aux" in asked or "position_bias" in asked:
        raise ModelError(f"{name} uses attention sinks or a position bias, which packed attention does not have")
    if getattr(module, "is_causal", True) is False or keywords.get("is_causal") is False:
        raise ModelError(f"{name} is not causal; only causal language models are supported")
    unknown = sorted(asked.keys() - IGNORED)
    if unknown:
        raise ModelError(f"{name} hands {unknown[0]!r} to its attention, which packed attention does not know")
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        raise ModelError(
            f"{name} scales queries by their place in the row instead of their position (attn_temperature_tuning); "
            f"those of a packed row would be scaled by the samples before them"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError(f"{name} has no layer_idx, so its keys and values cannot be cached")
    return layer, options


AttentionInterface.register(NAME, attention_forward)


class _Overrides(threading.local):
    """The attention functions that this thread uses instead of those that configs name, by the id of a view, and the
    context that gets their queries, keys and values."""

    names: dict[int, str] = {}
    context: AttentionContext | None = None


_overrides = _Overrides()


def current_context() -> AttentionContext:
    """Return the context of this thread. A caller that names an attention function of this package gives one."""
    assert _overrides.context is not None
    return _overrides.context


def _chosen(view: PreTrainedConfig) -> str | None:
    return _overrides.names.get(id(view))


def installed_views(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Replace each config that decides which attention function the layers of a model use by a view of it, once; return
    the distinct views, as `attention_functions` takes them.

    A config belongs to its user: other threads (a reward that runs the policy, a judge made from the same config) use
    the attention that it names while this one runs packed. So nothing is written into configs; modules inside the model
    ask a view, which looks here first. `model.config` itself stays the user's object, unless the model is a backbone.
    """
    inner = (child for child in model.modules() if child is not model or model.base_model is model)
    holders = [child for child in inner if isinstance(vars(child).get("config"), PreTrainedConfig)]
    configs: list[PreTrainedConfig] = [vars(child)["config"] for child in holders]
    views = {id(viewed_config(config)): config for config in configs if viewed_config(config) is not config}
    for child, config in zip(holders, configs, strict=True):
        own = viewed_config(config)
        if id(own) not in views:
            views[id(own)] = config_view(own, _chosen)
        vars(child)["config"] = views[id(own)]
    return list(views.values())


def attention_functions(
    configs: Sequence[PreTrainedConfig], name: str, context: AttentionContext | None = None
) -> AbstractContextManager[None]:
    """Let the layers of these configs use the attention function of that name, inside the block and in this thread
    only. A user's own calls of the model stay as they were. configs: as `installed_views` gives them; context: gets the
    queries, keys and values of the functions of this module."""
    return _overridden(_overrides.names | {id(config): name for config in configs}, context)


@contextmanager
def _overridden(names: dict[int, str], context: AttentionContext | None) -> Iterator[None]:
    before = _overrides.names, _overrides.context
    _overrides.names, _overrides.context = names, context
    try:
        yield
    finally:
        _overrides.names, _overrides.context = before


def same_attention() -> AbstractContextManager[None]:
    """Return a context in which layers use the attention that this thread uses now, also in another thread: gradient
    checkpointing recomputes them in the backward pass, after the blocks of the forward pass were left."""
    return _overridden(_overrides.names, _overrides.context)
