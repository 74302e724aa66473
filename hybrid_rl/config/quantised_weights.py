"""What engines round, and combinations of keys that an engine with quantised weights cannot work with."""

from __future__ import annotations

from typing import Any

from hybrid_rl.errors import ConfigError


def rounding_choices(config: Any) -> list[str]:
    """Return the keys by which the engine of a resolved TrainerConfig samples with rounded numbers, as NAME=VALUE."""
    rollout = config.rollout
    cache = getattr(rollout.engine_args, "others", {}).get("kv_cache_dtype", "auto")
    choices = {
        "quantization": "none" if rollout.quantization_aware else rollout.quantization,
        "kv_cache_dtype": "none" if rollout.kv_cache_dtype == "auto" else rollout.kv_cache_dtype,
        "engine_args.kv_cache_dtype": "none" if cache in ("auto", config.model.dtype) else cache,
    }
    return [f"rollout.{name}={choice}" for name, choice in choices.items() if choice != "none"]


def check_quantised(config: Any) -> None:
    """Raise ConfigError for what rollout.quantization, or training with it, cannot be combined with.

    config: a TrainerConfig with rollout.engine=vllm.
    """
    rollout, handoff, adapts = config.rollout, config.rollout.handoff, config.lora.is_on
    words = f"rollout.quantization={rollout.quantization}"
    if rollout.quantization == "none":
        if rollout.quantization_aware:
            raise ConfigError(
                f"rollout.quantization_aware=true trains with the engine's quantised weights, and {words}; set both, "
                "or leave it out"
            )
        return
    if handoff.transport in ("ipc", "disk"):
        raise ConfigError(
            f"{words} makes the engine's weights at every handoff, and handoff.transport={handoff.transport} "
            "reads or writes the trainer's own; leave transport out"
        )
    if handoff.adopt_weights:
        raise ConfigError(f"{words}: quantised weights cannot be the trainer's own memory; leave adopt_weights out")
    if handoff.lora == "adapter":
        raise ConfigError(
            f"{words} is for whole weights, and handoff.lora=adapter hands over adapters alone; set handoff.lora=merged"
        )
    if rollout.quantization_aware and adapts:
        raise ConfigError(
            "rollout.quantization_aware=true trains all weights on the grid, and lora.r trains adapters beside them; "
            "set one of them only"
        )
    if rollout.quantization_aware and config.model.torch_compile:
        raise ConfigError("model.torch_compile=true has not been tried with quantization_aware=true; leave it out")
    if adapts and handoff.probe_steps and handoff.probe_tolerance is None:
        raise ConfigError(
            f"{words} with lora.r quantises base and adapters together, so the probe compares the engine with weights "
            "that are not quantised; set handoff.probe_tolerance, or handoff.probe_steps=0"
        )
    if getattr(config.controller, "rollout_ranks", 0):
        raise ConfigError(
            f"{words} needs ranks that both train and generate, and those of controller.rollout_ranks read weights "
            "from files; set rollout_ranks=0"
        )
