"""A model that decodes from weights of 8 bits beside the one that is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hybrid_rl.compat import native
from hybrid_rl.compat.transformers import experts_of, gated
from hybrid_rl.errors import ConfigError, HandoffError, ModelError
from hybrid_rl.models.experts.routing import find_routers
from hybrid_rl.models.int8.rounding import Int8Weight
from hybrid_rl.models.packed.causal_lm import CausalLM
from hybrid_rl.weights.sources import named_weights

EXPERTS = ("gate_up_proj", "up_proj", "down_proj")


class RoundedPlace(NamedTuple):
    """A parameter that is rounded. layer: the path of its module; own: its name there."""

    layer: str
    own: str

    @property
    def name(self) -> str:
        """Its name in the model."""
        return f"{self.layer}.{self.own}"


def rounded_places(module: PreTrainedModel) -> list[RoundedPlace]:
    """Return the weights of a model that are rounded: of its linear layers, and of experts that lie in tensors [E, out,
    in]. The head is not, whose error goes into every logit, nor are routers, which would choose other experts."""
    routers = {child for router, _ in find_routers(module) for child in router.modules()}
    kept = {*routers, module.get_output_embeddings()}
    experts = {owner for owner, _ in experts_of(module) if not owner.is_transposed}
    places = []
    for path, child in module.named_modules():
        if child in experts:
            places += [RoundedPlace(path, name) for name in EXPERTS if hasattr(child, name)]
        elif type(child) is nn.Linear and child not in kept:
            places.append(RoundedPlace(path, "weight"))
    return places


class Int8CausalLM(CausalLM):
    """A copy of a module whose linear layers and experts compute with weights of 8 bits of its own.

    All else, the head included, is `shared`: the module's own tensors; where the module has none (a twin, on meta),
    they are this model's. `write` fills what is its own; until then it holds zeros. dtype: that the model computes in.

    Raises ConfigError if the compiled extension is missing, ModelError for a model that cannot be rounded.
    """

    def __init__(
        self, module: PreTrainedModel, attention: str, *, dtype: torch.dtype, float32_head: bool = False
    ) -> None:
        if native.operator("int8_linear") is None:
            raise ConfigError(
                "rollout.quantization=int8 needs the compiled extension, without which decoding would be slower than "
                f"in full precision ({native.why_missing('cpu') or 'it was built from older sources'})"
            )
        if dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"rollout.quantization=int8 rounds models in float32 and bfloat16, not in {dtype}")
        places = rounded_places(module)
        if not places:
            raise ModelError(
                f"{type(module).__name__} has no linear layers or experts that rollout.quantization=int8 could round; "
                "leave it out"
            )
        names = {place.name for place in places}
        self._own: dict[str, Tensor] = {}
        memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
        for name, parameter in module.named_parameters():
            memo[id(parameter)] = parameter
            if parameter.is_meta and name not in names:
                self._own[name] = torch.zeros(parameter.shape, dtype=dtype)
                memo[id(parameter)] = nn.Parameter(self._own[name], requires_grad=False)
        copied: PreTrainedModel = copy.deepcopy(module, memo)
        self._rounded = {place.name: _switch_over(copied, place) for place in places}
        super().__init__(copied, attention, float32_head=float32_head)
        self.shared = {name: t for name, t in named_weights(copied).items() if name not in {*self._own, *names}}

    @property
    def names(self) -> frozenset[str]:
        """The names of all weights of the trainer that this model was made for."""
        return frozenset({*self.shared, *self._own, *self._rounded})

    @property
    def rounded_names(self) -> Iterable[str]:
        """The names of the weights that are rounded."""
        return self._rounded

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is this model's own."""
        return self.num_rounded_bytes + sum(tensor.nbytes for tensor in self._own.values())

    @property
    def num_rounded_bytes(self) -> int:
        """Bytes of integers and their scales."""
        return sum(weight.num_bytes for weight in self._rounded.values())

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Round the trainer's weights, by name, masters where there are any. Of sharded ones every rank rounds its own
        rows, and integers are gathered, a weight after the other. Collective if they are sharded."""
        for name, weight in self._rounded.items():
            for own, fresh in zip(_parts(weight), _parts(rounded(weights[name])), strict=True):
                own.copy_(fresh)
        for name, own in self._own.items():
            own.copy_(_whole(weights[name]))

    @torch.no_grad()
    def check(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Prove that this model holds what the trainer's weights, by name, are when they are rounded now: every byte of
        integers, scales and all else of its own. Collective if they are sharded. Raises HandoffError."""
        differing = []
        for name, weight in self._rounded.items():
            kinds = zip(("integers", "scales"), _parts(weight), _parts(rounded(weights[name])), strict=True)
            differing += [f"{kind} of {name}" for kind, own, fresh in kinds if not _same_bytes(own, fresh)]
        differing += [
            name for name, own in self._own.items() if not _same_bytes(own, _whole(weights[name]).to(own.dtype))
        ]
        if differing:
            raise HandoffError(
                f"policy version {version}: {len(differing)} tensors of the engine's int8 weights are not what the "
                f"trainer's weights are when they are rounded, e.g. {differing[0]}; the handoff has not reached it, or "
                "something has written into one of them since"
            )


def rounded(weight: Tensor) -> Int8Weight:
    """Round a weight. Of a sharded one every rank rounds its rows, and all get all of them. Collective then."""
    if not isinstance(weight, DTensor):
        return Int8Weight.of(weight.detach())
    parts = _parts(Int8Weight.of(weight.to_local().detach()))
    shapes = (weight.shape, weight.shape[:-1])
    values, scales = (
        DTensor.from_local(
            part,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        ).full_tensor()
        for part, shape in zip(parts, shapes, strict=True)
    )
    return Int8Weight(values, scales)


@contextmanager
def rounded_layers(module: PreTrainedModel) -> Iterator[None]:
    """Inside the block the layers that an `Int8CausalLM` rounds compute with rounded weights, by the module's own
    products. A layer's weight is rounded while the layer runs, so that shards may be gathered by then."""
    held: dict[str, nn.Parameter] = {}

    def before(place: RoundedPlace) -> Callable[..., None]:
        def replace(layer: nn.Module, *_: Any) -> None:
            own = held[place.name] = layer.get_parameter(place.own)
            plain = Int8Weight.of(own.detach()).as_float().to(own.dtype)
            layer._parameters[place.own] = nn.Parameter(plain, requires_grad=False)

        return replace

    def after(place: RoundedPlace) -> Callable[..., None]:
        def restore(layer: nn.Module, *_: Any) -> None:
            if place.name in held:
                layer._parameters[place.own] = held.pop(place.name)

        return restore

    with ExitStack() as hooks:
        for place in rounded_places(module):
            layer = module.get_submodule(place.layer)
            hooks.callback(layer.register_forward_pre_hook(before(place)).remove)
            hooks.callback(layer.register_forward_hook(after(place), always_call=True).remove)
        yield


def _switch_over(module: PreTrainedModel, place: RoundedPlace) -> Int8Weight:
    """Let a layer compute with a weight of 8 bits, and return that."""
    layer: Any = module.get_submodule(place.layer)
    weight = Int8Weight.zeros(tuple(getattr(layer, place.own).shape))
    if place.own == "weight":
        vars(layer)["forward"] = lambda input: weight.linear(input, layer.bias)
    else:
        vars(layer).setdefault("forward", _Experts(layer)).weights[place.own] = weight
    return weight


class _Experts:
    """The replacement of the forward method of transformers' experts: expert by expert, as their eager form does."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.weights: dict[str, Int8Weight] = {}

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        first = "gate_up_proj" if self._layer.has_gate else "up_proj"
        places = top_k_index.flatten().sort(stable=True).indices
        tokens = places // top_k_index.shape[-1]
        counts = top_k_index.flatten().bincount(minlength=len(self.weights[first].scales)).tolist()
        results = hidden_states.new_empty(len(places), hidden_states.shape[-1])
        for expert, (rows, own) in enumerate(zip(tokens.split(counts), places.split(counts), strict=True)):
            if len(rows):
                between = gated(self._layer, self._product(first, expert, hidden_states[rows]))
                results[own] = self._product("down_proj", expert, between)
        weighted = results.view(*top_k_index.shape, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)

    def _product(self, name: str, expert: int, rows: Tensor) -> Tensor:
        bias = getattr(self._layer, f"{name}_bias")[expert] if self._layer.has_bias else None
        return self.weights[name][expert].linear(rows, bias)


def _parts(weight: Int8Weight) -> tuple[Tensor, Tensor]:
    return weight.values, weight.scales


def _whole(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.contiguous().view(torch.uint8))
