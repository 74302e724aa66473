"""Sections of the configuration whose class is a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, KL_TERMS, POLICY_LOSSES, Needs
from hybrid_rl.config.algorithm_keys import AdaptiveEntropyConfig, AlgorithmConfig, EntropyConfig
from hybrid_rl.config.hf import HFRolloutConfig
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.config.schema import (
    BFloat16ModelConfig,
    CriticConfig,
    EvalConfig,
    InPlaceRolloutConfig,
    LocalControllerConfig,
    ModelConfig,
    RayControllerConfig,
    SampledEvalConfig,
    TrainerConfig,
    ValueHeadConfig,
    VLLMRolloutConfig,
)


def _refuse(section: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(
        f"{name}={value!r}: a configuration is fixed. dataclasses.replace(...) makes another one; a Trainer goes on "
        f"with other values as Trainer(..., resume=trainer.save(), {name}={value!r})"
    )


@dataclass(frozen=True)
class Union:
    """A section whose class is chosen by the value of its tag key, which may lie in the section or be its value.

    infer: from all given leaves (name to value) and the members chosen so far, the member where none is named; None
    where nothing speaks for one. Without a tag the member is always inferred. remedies: what to do who gives a key of a
    member beside the default one.
    """

    tag: str | None
    default: str
    members: Mapping[str, type]
    infer: Callable[[Mapping[str, Any], Mapping[str, str]], str | None] | None = None
    remedies: Mapping[str, str] = field(default_factory=dict)


def number(value: Any) -> float:
    """A given value as a number, 0 where it is none: whether it may be used is checked with the other values."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _loss_section(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    # Of a loss that compares with the policy that sampled, nothing could be read where nobody did.
    named = given.get("advantage", given.get("estimator"))
    estimator = ADVANTAGES.get(named) if isinstance(named, str) else None
    return "reinforce" if estimator is not None and Needs.DEMONSTRATIONS in estimator().needs else None


def _kl_section(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    if "beta" not in given:
        return None
    return "loss" if number(given["beta"]) > 0 else "none"


def _controller_section(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    # Whether auto is more than one shows when the GPUs are counted.
    return "ray" if given.get("num_ranks") == "auto" or number(given.get("num_ranks")) > 1 else None


def _entropy_section(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    return "adaptive" if given.get("entropy_target") is not None else None


def _eval_section(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    return "sampled" if number(given.get("eval_temperature")) > 0 else None


def _model_section(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    # As a value is read: torch.bfloat16 too. What auto stands for is settled when the hardware is known.
    return "bfloat16" if str(given.get("dtype")).removeprefix("torch.") == "bfloat16" else None


def _critic_section(_: Mapping[str, Any], chosen: Mapping[str, str]) -> str:
    return "value_head" if Needs.VALUES in ADVANTAGES[chosen["advantage"]]().needs else "none"


# In an order in which each is inferred from those before it.
UNIONS: Mapping[str, Union] = MappingProxyType(
    {
        "model": Union(
            None,
            "any dtype",
            {"any dtype": ModelConfig, "bfloat16": BFloat16ModelConfig},
            infer=_model_section,
            remedies={"bfloat16": "it exists with dtype=bfloat16, and that has to be given (auto does not do)"},
        ),
        "algorithm": Union("name", "grpo", dict.fromkeys(PRESETS, AlgorithmConfig)),
        "advantage": Union("estimator", "grpo", ADVANTAGES),
        "policy_loss": Union("objective", "clip", POLICY_LOSSES, infer=_loss_section),
        "kl": Union("kl_in", "none", KL_TERMS, infer=_kl_section, remedies={"loss": "set beta above 0"}),
        "correction": Union("correction_mode", "none", CORRECTIONS),
        "critic": Union(
            None,
            "none",
            {"none": CriticConfig, "value_head": ValueHeadConfig},
            infer=_critic_section,
            remedies={"value_head": "there is no critic; choose an advantage that has one: gae, vapo or vtrace"},
        ),
        "entropy": Union(
            None,
            "fixed",
            {"fixed": EntropyConfig, "adaptive": AdaptiveEntropyConfig},
            infer=_entropy_section,
            remedies={"adaptive": "entropy_coef is fixed; set entropy_target"},
        ),
        "eval": Union(
            None,
            "greedy",
            {"greedy": EvalConfig, "sampled": SampledEvalConfig},
            infer=_eval_section,
            remedies={
                "sampled": "evaluation is greedy; with an eval_dataset (or eval_path), set eval_temperature above 0"
            },
        ),
        "rollout": Union(
            "engine", "inplace", {"inplace": InPlaceRolloutConfig, "vllm": VLLMRolloutConfig, "hf": HFRolloutConfig}
        ),
        "controller": Union(
            "backend",
            "local",
            {"local": LocalControllerConfig, "ray": RayControllerConfig},
            infer=_controller_section,
            remedies={"ray": "set num_ranks above 1 or auto, or that"},
        ),
    }
)


def _sections(config: Any) -> Iterator[Any]:
    """The class of a configuration and those of all of its sections."""
    yield type(config)
    for item in fields(config):
        if is_dataclass(getattr(config, item.name)):
            yield from _sections(getattr(config, item.name))


for _config in (TrainerConfig(), *(member() for union in UNIONS.values() for member in union.members.values())):
    for _section in _sections(_config):
        _section.__setattr__ = _refuse  # dataclasses say "cannot assign to field", and no more
