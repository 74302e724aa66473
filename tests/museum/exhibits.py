"""Bugs of handoffs, most of them met in public, each rebuilt small from its description.

An exhibit is a fault of an engine that holds weights of its own (tests/support/engines/sleeping_engine.py), from the
handoff FAULTY on, in the middle of a run: the probe of the first handoffs is over, and the next is four handoffs away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.engines.inplace.engine import RoundedEngine
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from tests.support.engines.sleeping_engine import SleepingEngine
from tests.support.inside.engines import model_of
from tests.support.inside.models import rounded_weights

UNKNOWN = "no thread known: it can happen"
FAULTY = 4  # policy version with which the fault begins

Own = Callable[[SleepingEngine, Source, int], HandoffReport]
Weights = dict[str, Tensor]


class History:
    """What an engine was given: weights[version] are copies of its tensors by name."""

    def __init__(self) -> None:
        self.weights: dict[int, Weights] = {}

    def before(self, version: int) -> Weights:
        return self.weights[version - 1]


def tensors_of(engine: Any) -> Weights:
    """The engine's live tensors: those that a trace names, or integers and scales."""
    if isinstance(engine, RoundedEngine):
        held = rounded_weights(engine.rounded).items()
        return {f"{kind} of {name}": getattr(weight, kind) for name, weight in held for kind in ("values", "scales")}
    traced = engine.weights
    return {spec.name: tensor for spec, tensor in zip(traced.trace.destinations, traced.destinations, strict=True)}


Fault = Callable[[SleepingEngine, History, int], None]  # after the handoff has written everything as it should


@dataclass(frozen=True)
class Exhibit:
    """A bug. told: where it was told in public, as repository#number, or UNKNOWN; what: happens; fault: does it to an
    engine that has just been given a version; stopped_by: a mechanism of the library; message: what its error says.
    keys: of the run; patches: methods of the engine that are replaced from the handoff `begins` on; engine: its
    class."""

    name: str
    told: str
    what: str
    stopped_by: str
    message: str
    fault: Fault | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    patches: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    model: str = "qwen2"
    begins: int = FAULTY
    engine: type = SleepingEngine


def everything_of(version: int) -> Fault:
    """Let the engine hold all of an older version."""

    def fault(engine: SleepingEngine, history: History, now: int) -> None:
        for name, tensor in tensors_of(engine).items():
            tensor.copy_(history.weights[version if version >= 0 else now + version][name])

    return fault


def one(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Fault:
    """Change the tensors whose names end so. change: takes what they should hold and what they held before."""

    def fault(engine: SleepingEngine, history: History, version: int) -> None:
        chosen = {full: tensor for full, tensor in tensors_of(engine).items() if full.endswith(name)}
        assert chosen, f"no tensor of the engine ends with {name}: {sorted(tensors_of(engine))}"
        for full, tensor in chosen.items():
            tensor.copy_(change(tensor.clone(), history.before(version)[full]))

    return fault


def swapped(first: str, second: str) -> Fault:
    def fault(engine: SleepingEngine, history: History, version: int) -> None:
        tensors = tensors_of(engine)
        one_name, other_name = (next(n for n in tensors if n.endswith(end)) for end in (first, second))
        held = tensors[one_name].clone()
        tensors[one_name].copy_(tensors[other_name])
        tensors[other_name].copy_(held)

    return fault


def stale_rows(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The last rows are those of the version before."""

    def change(new: Tensor, old: Tensor) -> Tensor:
        count = max(1, round(share * len(new)))
        return torch.cat([new[:-count], old[-count:]])

    return change


def add_again(engine: SleepingEngine, history: History, version: int) -> None:
    for name, tensor in tensors_of(engine).items():
        tensor.add_(tensor - history.weights[0][name])


def of_module(change: Callable[[nn.Module, History, int], None]) -> Fault:
    """Change the module that the engine computes with, not the tensors that a handoff writes."""

    def fault(engine: SleepingEngine, history: History, version: int) -> None:
        change(model_of(engine).module, history, version)

    return fault


def rebind_mlp(module: Any, history: History, version: int) -> None:
    layer = module.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(history.weights[0]["model.layers.0.mlp.down_proj.weight"].clone(), requires_grad=False)


def untie_head(module: Any, history: History, version: int) -> None:
    module.lm_head.weight = nn.Parameter(history.weights[0]["model.embed_tokens.weight"].clone(), requires_grad=False)


def lose_rotary(module: Any, history: History, version: int) -> None:
    module.model.rotary_emb.inv_freq.zero_()


def derive_norm(module: Any, history: History, version: int) -> None:
    """The final norm multiplies by a derived scale that was computed from the first weights, and never again."""
    scale = 1.0 + history.weights[0]["model.layers.0.mlp.up_proj.weight"].abs().mean()
    module.model.norm.register_forward_hook(lambda _, __, output: output * scale)


def keep_cache(own: Any, engine: SleepingEngine) -> None:
    """Prefixes of the old weights stay findable."""


def mislabel(engine: SleepingEngine, history: History, version: int) -> None:
    everything_of(-1)(engine, history, version)
    engine.policy_version = version - 1


def wake_half(own: Any, engine: SleepingEngine, tags: Any) -> None:
    if "weights" in tags:
        own(engine, {"weights"})


LORA = {"lora.r": 2, "lora_alpha": 8}
VERIFIED = "bytes compared at every handoff"
GUARD = "tokens compared before the update"
STATES = "states of the engine"
WEIGHTS_DIFFER = "engines do not hold the trainer's weights of policy version 4: that of participant 0 in "

EXHIBITS = [
    Exhibit(
        "first checkpoint",
        "vllm-project/vllm#29341, huggingface/trl#4571",
        "after sleep level 2 the engine reads the checkpoint again, over what the trainer has sent",
        VERIFIED,
        WEIGHTS_DIFFER,
        everything_of(0),
    ),
    Exhibit(
        "cached iterator",
        "vllm-project/vllm#32718",
        "a reload gives the weights of the reload before",
        VERIFIED,
        WEIGHTS_DIFFER,
        everything_of(-1),
    ),
    Exhibit(
        "a name that matches nothing",
        "NVIDIA-NeMo/labs-molt#26",
        "a tensor that the engine does not know under its name is left out, with a warning at most",
        VERIFIED,
        WEIGHTS_DIFFER + "model.layers.1.mlp.up_proj.weight",
        one("layers.1.mlp.up_proj.weight", lambda new, old: old),
    ),
    Exhibit(
        "a bucket twice",
        "verl-project/verl#7327",
        "a buffer is filled with the next tensor while the engine still reads it",
        VERIFIED,
        WEIGHTS_DIFFER + "model.layers.0.self_attn.k_proj.weight",
        one("layers.0.self_attn.k_proj.weight", lambda new, old: torch.cat([new[len(new) // 2 :]] * 2)),
    ),
    Exhibit(
        "shards in another order",
        UNKNOWN,
        "the pieces of a sharded tensor are put together in the order of ranks of another mesh",
        VERIFIED,
        WEIGHTS_DIFFER + "model.layers.0.mlp.gate_proj.weight",
        one("layers.0.mlp.gate_proj.weight", lambda new, old: new.roll(len(new) // 2, 0)),
    ),
    Exhibit(
        "uneven shards",
        "inclusionAI/AReaL, its vLLM adapter",
        "offsets by floor division leave out the last rows of a tensor that the ranks do not divide",
        VERIFIED,
        WEIGHTS_DIFFER + "model.embed_tokens.weight",
        one("model.embed_tokens.weight", stale_rows(0.03)),
    ),
    Exhibit(
        "gate for up",
        UNKNOWN,
        "two tensors of one shape change places in a fused one",
        VERIFIED,
        WEIGHTS_DIFFER + "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight",
        swapped("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
    ),
    Exhibit(
        "transposed",
        "vllm-project/vllm#47874",
        "a tensor is transposed twice, or once too seldom; its square shape hides it",
        VERIFIED,
        WEIGHTS_DIFFER + "model.layers.1.self_attn.q_proj.weight",
        one("layers.1.self_attn.q_proj.weight", lambda new, old: new.T),
    ),
    Exhibit(
        "one rank left out",
        "verl-project/verl#5590",
        "a replica that was asleep in the update keeps half of every tensor",
        VERIFIED,
        WEIGHTS_DIFFER,
        one(".weight", stale_rows(0.5)),
    ),
    Exhibit(
        "a delta in bfloat16",
        UNKNOWN,
        "what changed is sent in 16 bits and added, and errors add up",
        VERIFIED,
        WEIGHTS_DIFFER,
        one(".weight", lambda new, old: old + (new - old).bfloat16().float()),
    ),
    Exhibit(
        "not finite",
        UNKNOWN,
        "memory that was never written is read as weights",
        VERIFIED,
        WEIGHTS_DIFFER + "model.norm.weight",
        one("model.norm.weight", lambda new, old: torch.full_like(new, torch.nan)),
    ),
    Exhibit(
        "the base instead of the adapters",
        "verl-project/verl#7495, verl-project/verl-omni#553",
        "adapters never arrive, and the engine samples from the base for the whole run",
        VERIFIED,
        WEIGHTS_DIFFER,
        everything_of(0),
        keys=LORA,
    ),
    Exhibit(
        "merged twice",
        "radixark/miles#1087",
        "the base is sent with its adapters merged, and they are added once more",
        VERIFIED,
        WEIGHTS_DIFFER,
        add_again,
        keys=LORA,
    ),
    Exhibit(
        "only adapters after a sleep",
        "verl-project/verl#3461",
        "sleep level 2 has discarded the base, and only the adapters are sent",
        VERIFIED,
        WEIGHTS_DIFFER,
        one("norm.weight", lambda new, old: torch.zeros_like(new)),
        keys=LORA,
    ),
    Exhibit(
        "experts of one rank",
        "verl-project/verl#7195",
        "every rank sends the experts that it holds, and the engine keeps those of the first",
        VERIFIED,
        WEIGHTS_DIFFER + "model.layers.0.mlp.experts",
        one("layers.0.mlp.experts.down_proj", stale_rows(0.5)),
        model="qwen3-moe",
    ),
    Exhibit(
        "experts in another layout",
        "NovaSky-AI/SkyRL#1680, vllm-project/vllm-ascend#13012",
        "weights are written as a checkpoint has them into memory that a kernel reads in another order",
        VERIFIED,
        WEIGHTS_DIFFER + "model.layers.1.mlp.experts",
        one("layers.1.mlp.experts.gate_up_proj", lambda new, old: new.flip(1)),
        model="qwen3-moe",
    ),
    Exhibit(
        "scales left behind",
        UNKNOWN,
        "integers of quantised weights are new, and the scales of one weight are those of the handoff before",
        VERIFIED,
        "policy version 4: 1 tensors of the engine's int8 weights are not what the trainer's weights are when they are "
        "rounded, e.g. scales of model.layers.1.mlp.down_proj.weight",
        one("scales of model.layers.1.mlp.down_proj.weight", lambda new, old: old),
        keys={"engine": "inplace", "rollout.quantization": "int8"},
        engine=RoundedEngine,
    ),
    Exhibit(
        "a parameter that was replaced",
        "vllm-project/vllm-ascend#13012, vllm-project/vllm#48251",
        "the module computes with a new tensor, and handoffs write the old one",
        GUARD,
        "engine and trainer differ by",
        of_module(rebind_mlp),
    ),
    Exhibit(
        "a tied head left behind",
        "vllm-project/vllm#51665, PrimeIntellect-ai/prime-rl#2823",
        "the head has become a copy of the embedding, and only the embedding is written",
        GUARD,
        "engine and trainer differ by",
        of_module(untie_head),
    ),
    Exhibit(
        "buffers lost in a sleep",
        "vllm-project/vllm#16564, OpenRLHF/OpenRLHF#723",
        "the frequencies of the rotary embedding are discarded with the weights, and no checkpoint has them",
        GUARD,
        "engine and trainer differ by",
        of_module(lose_rotary),
    ),
    Exhibit(
        "a derived tensor",
        "vllm-project/vllm#48941",
        "what was computed from the weights when they were loaded is not computed again",
        GUARD,
        "engine and trainer differ by",
        of_module(derive_norm),
    ),
    Exhibit(
        "the prefix cache of the old policy",
        "NVIDIA-NeMo/RL#4018, InternLM/lmdeploy#4917, vllm-project/vllm-omni#6739",
        "prompts that come again are answered from keys and values of older weights",
        GUARD,
        "engine and trainer differ by",
        patches={"_begin_rollout": keep_cache},
        begins=FAULTY - 1,  # what is left then is found after the next one
    ),
    Exhibit(
        "an older version under a new number",
        UNKNOWN,
        "the engine holds a version, and says that it holds another",
        VERIFIED,
        WEIGHTS_DIFFER,
        mislabel,
    ),
    Exhibit(
        "one tag woken of two",
        UNKNOWN,
        "weights are woken and written, and generation begins without the cache",
        STATES,
        "is weights",
        patches={"wake": wake_half},
    ),
]
