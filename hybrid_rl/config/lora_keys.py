"""The configuration keys of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_rl.algos.options import entries, key
from hybrid_rl.errors import ConfigError

RANK_DOC = "rank of low-rank adapters (LoRA, arXiv:2106.09685): only they are trained; None = no adapters"


@dataclass(frozen=True)
class FullTrainingConfig:
    """Training of all weights; `lora.r` turns adapters on."""

    r: int | None = key(None, RANK_DOC, minimum=1)

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained instead of the model's own weights."""
        return self.r is not None


@dataclass(frozen=True)
class PeftKeys:
    """Options of adapters that are seldom set."""

    exclude_modules: list[str] | str | None = key(None, "layers without an adapter, in the same forms")
    target_parameters: list[str] = key(
        [], "ends of names of parameters with an adapter, for experts that are fused into one: mlp.experts.gate_up_proj"
    )
    modules_to_save: list[str] = key([], "ends of names of modules that are trained whole and saved with the adapter")
    use_rslora: bool = key(False, "scale by lora_alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)")
    use_dora: bool = key(False, "train a magnitude per output beside the direction (DoRA, arXiv:2402.09353)")
    rank_pattern: dict[str, Any] = key({}, "other ranks by ends of names or regular expressions of layers")
    alpha_pattern: dict[str, Any] = key({}, "other values of lora_alpha, likewise")


@dataclass(frozen=True)
class LoraKeys(FullTrainingConfig):
    """Low-rank adapters, under the names of peft's LoraConfig: y = W x + s B A x, s = lora_alpha / r."""

    lora_alpha: float = key(8, "the adapters' product is scaled by lora_alpha / r", above=0)
    target_modules: list[str] | str | None = key(
        "all-linear",
        "layers with an adapter: all-linear (all but the head), a list of ends of names, or a text, which is a regular "
        "expression of whole names; None = those that peft chooses for the architecture",
    )
    peft: PeftKeys = entries(PeftKeys, "further options of peft's LoraConfig, under its names")
    lora_critic: bool = key(False, "the critic's backbone is frozen and trained through an adapter of its own too")


def check_slot(lora: FullTrainingConfig) -> None:
    """Raise ConfigError unless vLLM's own LoRA slots hold such adapters (handoff.lora=adapter)."""
    asked = "handoff.lora=adapter"
    if not isinstance(lora, LoraKeys):
        raise ConfigError(f"{asked}, but no adapters are trained; set lora.r, or leave it out")
    unlike = {
        "use_dora": "DoRA changes the length of the rows of the base",
        "modules_to_save": "modules that are trained whole are no adapters",
        "target_parameters": "experts that are fused into one parameter have no slot",
    }
    for name, why in unlike.items():
        if value := getattr(lora.peft, name):
            raise ConfigError(
                f"{asked} and lora.peft.{name}={value}: vLLM's slots hold low-rank matrices of linear layers, and "
                f"{why}; set handoff.lora=merged, or leave lora.peft.{name} out"
            )
