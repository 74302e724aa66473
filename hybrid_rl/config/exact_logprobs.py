"""What model.exact=true cannot hold for, refused."""

from __future__ import annotations

from hybrid_rl.config.schema import InPlaceRolloutConfig, TrainerConfig
from hybrid_rl.errors import ConfigError


def check_exact(config: TrainerConfig) -> None:
    """Raise ConfigError if engine and trainer of a configuration would not add up in one order."""
    if not config.model.exact:
        return
    model, rollout = config.model, config.rollout
    if not isinstance(rollout, InPlaceRolloutConfig):
        why = {
            "vllm": "vLLM has kernels of its own: its batch-invariant mode (VLLM_BATCH_INVARIANT, on GPUs) makes the "
            "engine equal to itself at any batch size, but not to the trainer",
            "hf": "its attention is that of transformers, whose sums depend on the batch",
        }
        raise ConfigError(
            f"model.exact=true with rollout.engine={rollout.engine}: "
            f"{why.get(rollout.engine, 'its kernels are not those of the trainer')}; use rollout.engine=inplace, or "
            "leave exact out"
        )
    if model.device == "cuda":
        raise ConfigError(
            "model.exact=true is for CPUs: on a GPU, libraries choose kernels and their order of summation by the size "
            "of the batch; set device=cpu, or leave exact out"
        )
    if model.torch_compile:
        raise ConfigError(
            "model.exact=true with torch_compile=true: compiled blocks choose the order of their sums themselves; "
            "leave one of them out"
        )
    if model.attention not in ("auto", "compiled"):
        raise ConfigError(
            f"model.exact=true with model.attention={model.attention}: only the compiled attention adds up in the "
            "order of the engine's; leave attention out"
        )
    if rollout.quantization != "none":
        raise ConfigError(
            f"model.exact=true with rollout.quantization={rollout.quantization}: the engine would compute with other "
            "weights than the trainer; leave one of them out"
        )
    if rollout.handoff.probe_tolerance is not None:
        raise ConfigError(
            f"model.exact=true with rollout.handoff.probe_tolerance={rollout.handoff.probe_tolerance}: the probe "
            "accepts no gap between equal numbers; leave probe_tolerance out"
        )
    if rollout.engine_args.block_size % 16:
        raise ConfigError(
            f"model.exact=true with rollout.engine_args.block_size={rollout.engine_args.block_size}: the engine's "
            "compiled attention needs a multiple of 16; leave block_size out"
        )
