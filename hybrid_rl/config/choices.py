"""Sections of the configuration whose class is a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, KL_TERMS, POLICY_LOSSES, Needs
from hybrid_rl.config.algorithm_keys import AdaptiveEntropyConfig, AlgorithmConfig, EntropyConfig
from hybrid_rl.config.buffer_keys import BufferConfig, HeldConfig
from hybrid_rl.config.eval_keys import EvalConfig, SampledEvalConfig
from hybrid_rl.config.lora_keys import FullTrainingConfig, LoraKeys
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.config.rank_keys import ControllerConfig, RayControllerConfig
from hybrid_rl.config.schema import (
    BFloat16ModelConfig,
    CriticConfig,
    HFRolloutConfig,
    InPlaceRolloutConfig,
    ModelConfig,
    TrainerConfig,
    ValueHeadConfig,
    VLLMRolloutConfig,
)


def _refuse(section: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(
        f"{name}={value!r}: a configuration cannot be changed; use dataclasses.replace(...) to make a copy, or "
        f"continue a Trainer with other values as Trainer(..., resume=trainer.save(), {name}={value!r})"
    )


@dataclass(frozen=True)
class Choice:
    """A section whose class is chosen by the value of its tag key, which may be in the section or be its value.

    members: by name, the default first. infer: from all given leaves (name to value) and the members chosen so far, the
    member if none is named; None if nothing speaks for one. Without a tag the member is always inferred. remedy: what
    to do if a key is given that the default member lacks; it is meant for the second member.
    """

    tag: str | None
    members: Mapping[str, type]
    infer: Callable[[Mapping[str, Any], Mapping[str, str]], str | None] = lambda given, chosen: None
    remedy: str = ""

    @property
    def default(self) -> str:
        """The member if nothing is given."""
        return next(iter(self.members))


def number(value: Any) -> float:
    """Return a given value as a number, 0 if it is not one: its range is checked later, with the other values."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _loss(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    # Demonstrations were sampled by no policy, so a loss that compares with that policy would mean nothing.
    named = given.get("advantage", given.get("estimator"))
    estimator = ADVANTAGES.get(named) if isinstance(named, str) else None
    return "reinforce" if estimator is not None and Needs.DEMONSTRATIONS in estimator().needs else None


def _kl(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    return None if "beta" not in given else "loss" if number(given["beta"]) > 0 else "none"


def _backend(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    # Whether auto is more than one rank is known when the GPUs are counted.
    is_many = number(given.get("num_ranks")) > 1 or number(given.get("rollout_ranks")) > 0
    return "ray" if given.get("num_ranks") == "auto" or is_many else None


def _dtype(given: Mapping[str, Any], _: Mapping[str, str]) -> str | None:
    # torch.bfloat16 is read as its name. auto is resolved when the hardware is known.
    return "bfloat16" if str(given.get("dtype")).removeprefix("torch.") == "bfloat16" else None


def _holds(given: Mapping[str, Any]) -> bool:
    return _is_ahead(given) or str(given.get("partial")).lower() == "true"


def _is_ahead(given: Mapping[str, Any]) -> bool:
    level = given.get("async_level")
    return number(given.get("rollout_ranks") if level in (None, "auto") else level) > 0


def _correction(given: Mapping[str, Any], chosen: Mapping[str, str]) -> str | None:
    # Tokens of older weights, or of a rounded engine, need a weight, unless loss or advantages bring their own.
    oversample = given.get("oversample")
    is_old = _is_ahead(given) or oversample is None or number(oversample) > 0
    is_old = is_old and _holds(given) and given.get("unfinished") != "drop"
    # On the engine's grid the trainer's weights are the engine's.
    is_on_grid = str(given.get("quantization_aware")).lower() == "true"
    is_rounded = not is_on_grid and given.get("quantization") not in (None, "none")
    dtype = str(given.get("dtype", "float32")).removeprefix("torch.")
    is_rounded |= given.get("kv_cache_dtype") not in (None, "auto", dtype)
    if not (is_old or is_rounded) or given.get("old_logprobs") == "rollout":
        return None
    loss, advantage = POLICY_LOSSES[chosen["policy_loss"]](), ADVANTAGES[chosen["advantage"]]()
    is_weighed = loss.corrects_rollout or Needs.ROLLOUT_LOGPROBS in advantage.needs
    return None if is_weighed or Needs.DEMONSTRATIONS in advantage.needs else "tis"  # demonstrations are refused


def _critic(_: Mapping[str, Any], chosen: Mapping[str, str]) -> str:
    return "value_head" if Needs.VALUES in ADVANTAGES[chosen["advantage"]]().needs else "none"


# In an order in which each is inferred from those before it.
CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        "model": Choice(
            None,
            {"any dtype": ModelConfig, "bfloat16": BFloat16ModelConfig},
            _dtype,
            "it exists with dtype=bfloat16, and that has to be given (auto does not do)",
        ),
        "algorithm": Choice("name", dict.fromkeys(PRESETS, AlgorithmConfig)),
        "advantage": Choice("estimator", ADVANTAGES),
        "policy_loss": Choice("objective", POLICY_LOSSES, _loss),
        "kl": Choice("kl_in", KL_TERMS, _kl, "set beta above 0, without kl=none"),
        "correction": Choice("correction_mode", CORRECTIONS, _correction),
        "critic": Choice(
            None,
            {"none": CriticConfig, "value_head": ValueHeadConfig},
            _critic,
            "there is no critic; choose an advantage that has one: gae, vapo or vtrace",
        ),
        "entropy": Choice(
            None,
            {"fixed": EntropyConfig, "adaptive": AdaptiveEntropyConfig},
            lambda given, _: "adaptive" if given.get("entropy_target") is not None else None,
            "entropy_coef is fixed; set entropy_target",
        ),
        "eval": Choice(
            None,
            {"greedy": EvalConfig, "sampled": SampledEvalConfig},
            lambda given, _: "sampled" if number(given.get("eval_temperature")) > 0 else None,
            "evaluation is greedy; with an eval_dataset (or eval_path), set eval_temperature above 0",
        ),
        "lora": Choice(
            None,
            {"none": FullTrainingConfig, "adapters": LoraKeys},
            lambda given, _: "adapters" if given.get("r") is not None else None,
            "all weights are trained; set lora.r, the rank of adapters",
        ),
        "rollout": Choice(
            "engine", {"inplace": InPlaceRolloutConfig, "vllm": VLLMRolloutConfig, "hf": HFRolloutConfig}
        ),
        "buffer": Choice(
            None,
            {"none": BufferConfig, "held": HeldConfig},
            lambda given, _: "held" if _holds(given) else None,
            "nothing is held between steps; set rollout.partial=true or rollout.async_level=1 (or more)",
        ),
        "controller": Choice(
            "backend",
            {"local": ControllerConfig, "ray": RayControllerConfig},
            _backend,
            "set num_ranks above 1 or auto, or that",
        ),
    }
)


def _sections(config: Any) -> Iterator[Any]:
    """Return the class of a configuration and those of all of its sections."""
    yield type(config)
    for item in fields(config):
        if is_dataclass(getattr(config, item.name)):
            yield from _sections(getattr(config, item.name))


for _config in (TrainerConfig(), *(member() for choice in CHOICES.values() for member in choice.members.values())):
    for _section in _sections(_config):
        _section.__setattr__ = _refuse  # dataclasses say "cannot assign to field", and no more
