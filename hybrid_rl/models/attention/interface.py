"""One attention function under every layer of any Hugging Face causal LM.

Sequences travel packed: one row of T tokens, no padding in the linear layers. The function registered here hands each
layer's projected queries, keys and values to a context object: one of `backends.py` when training, the engine's paged
cache when generating. The thread holds the context: as a keyword it would reach attention only where every layer of an
architecture hands on what it does not know. No mask function is registered beside it: transformers then builds no mask,
and does not look into the positions for packing either, which would wait for the device in every forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from hybrid_rl.compat.transformers import config_view, viewed_config
from hybrid_rl.errors import ModelError
from hybrid_rl.models.linear import Linears

NAME = "hybrid_rl_packed"


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks for beyond causal softmax attention. window: tokens seen, own included; None = all before."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


class AttentionContext(Protocol):
    """Computes attention for one packed row of T tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query: [T, num_heads, D]; key, value: [T, num_key_value_heads, D]. Returns [T, num_heads, D]."""
        ...


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer. query: [1, H, T, D]; returns [1, T, H, D] and no weights."""
    context = current_context()
    if attention_mask is not None:  # ours is None: the architecture made one itself, which packing would ignore
        raise ModelError(f"{type(module).__name__} makes an attention mask of its own; it cannot run packed")
    layer, options = options_of(module, keywords)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return context.attend(layer, q, k, v, options).unsqueeze(0), None


# Keywords that decide nothing here: dropout is off, and positions are in queries and keys already.
IGNORED = frozenset({"dropout", "position_ids", "use_cache", "is_causal", "return_dict"})


def options_of(module: nn.Module, keywords: Mapping[str, Any]) -> tuple[int, AttentionOptions]:
    """The number of a layer, and what it asks for by the keywords of its call of attention.

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
    """What this thread uses instead of the attention functions that configs name, by the id of a view, and where those
    of this module send queries, keys and values."""

    names: dict[int, str] = {}
    context: AttentionContext | None = None


_overrides = _Overrides()


def current_context() -> AttentionContext:
    """The context of this thread. Whoever names an attention function of this package gives one."""
    assert _overrides.context is not None
    return _overrides.context


def _chosen(view: PreTrainedConfig) -> str | None:
    return _overrides.names.get(id(view))


def attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The distinct configs that decide which attention function the layers of a model use, as views that
    `attention_functions` takes, put in their place once.

    What a config names belongs to its user: other threads (a reward that runs the policy, a judge made from the same
    config) continue with it while this one runs packed. So nothing is written into configs; modules inside the model
    ask a view, which looks here first. `model.config` itself stays the user's object, unless the model is a backbone.
    """
    views: dict[int, PreTrainedConfig] = {}
    for child in model.modules():
        config = vars(child).get("config")
        if not isinstance(config, PreTrainedConfig) or (child is model and model.base_model is not model):
            continue
        own = viewed_config(config)
        if id(own) not in views:
            views[id(own)] = config_view(own, _chosen) if config is own else config
        vars(child)["config"] = views[id(own)]
    return list(views.values())


@contextmanager
def attention_functions(
    configs: Sequence[PreTrainedConfig], name: str, context: AttentionContext | None = None
) -> Iterator[None]:
    """Inside the block, and in this thread only, the layers of these configs use the attention function of that name. A
    user's own calls of the model stay as they were. configs: as `attention_configs` gives them; context: where the
    functions of this module send what they get.
    """
    with _overridden(_overrides.names | {id(config): name for config in configs}, context):
        yield


@contextmanager
def _overridden(names: dict[int, str], context: AttentionContext | None) -> Iterator[None]:
    before = _overrides.names, _overrides.context
    _overrides.names, _overrides.context = names, context
    try:
        yield
    finally:
        _overrides.names, _overrides.context = before


def checkpoint_contexts(linears: Linears) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The context_fn of torch.utils.checkpoint: what is recomputed in the backward pass, long after the blocks of the
    forward pass were left and maybe in another thread, uses the attention and the linear layers of that pass."""
    return nullcontext(), _recompute(_overrides.names, _overrides.context, linears, linears.num_rows)


@contextmanager
def _recompute(
    names: dict[int, str], context: AttentionContext | None, linears: Linears, num_rows: int
) -> Iterator[None]:
    with _overridden(names, context), linears.fast(num_rows):
        yield
