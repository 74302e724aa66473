"""Checks of a run before anything is loaded: machine, module, rewards, teacher, critic, demonstrations."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.algos import Needs
from hybrid_rl.checkpoint.manifest import check_model
from hybrid_rl.compat.torch import forward_pre_hooks
from hybrid_rl.compat.transformers import fp32_name_parts
from hybrid_rl.config import RayControllerConfig, TrainerConfig, to_dict
from hybrid_rl.config.algorithm import learns_from_demonstrations, teacher_path, token_rewards_problem
from hybrid_rl.config.hardware import Hardware
from hybrid_rl.config.leaves import by_path
from hybrid_rl.config.rollout_ranks import check_rollout_rewards
from hybrid_rl.data.prompts import PromptRoom
from hybrid_rl.data.source import SizedSource, StreamSource
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models import load_tokenizer
from hybrid_rl.models.attention.backends import check_machine
from hybrid_rl.models.exact import missing_operators
from hybrid_rl.models.lora.folder import is_adapter_folder
from hybrid_rl.models.lora.inject import is_adapter_name
from hybrid_rl.models.model_loading import DTYPES, loading, model_folder
from hybrid_rl.models.saving import check_saved
from hybrid_rl.models.tokenizer import usable_tokenizer
from hybrid_rl.rewards import RewardModelEntry, RewardRunner, overlong_penalty, with_model_entries
from hybrid_rl.rollout.demonstrations import check_demonstrations
from hybrid_rl.workers.setup import RewardSetup, demonstration_encoder

logger = logging.getLogger("hybrid_rl")


def check_attention(config: TrainerConfig, hardware: Hardware) -> None:
    """Raise ConfigError if the device, the dtype or the machine cannot run the requested attention.

    The architecture is checked later, with the model. Logs that the model's own forward is used."""
    settings = config.model
    if not config.is_packed:
        subject = "training runs" if config.rollout.is_packed else "rollout and training run"
        cause = "model.attention=unpacked" if config.rollout.is_packed else f"rollout.engine={config.rollout.engine}"
        logger.warning(
            "%s: %s through the model's own forward, every sample with its prompt and nothing packed", cause, subject
        )
        return
    if settings.exact:
        if missing := missing_operators():
            raise ConfigError(
                f"model.exact=true needs the compiled extension, which has no {missing[0]} here: it was not built, or "
                "HYBRID_RL_NATIVE=0; see docs/installation.md, or leave exact out"
            )
        return
    check_machine(settings.attention, torch.device(settings.device), DTYPES[settings.dtype], is_here=hardware.is_here)


def check_modes(config: TrainerConfig, *, learns: bool = True) -> None:
    """Raise ModelError inside a torch context that would change the results in this process. learns: whether gradients
    are needed."""
    if isinstance(config.controller, RayControllerConfig):
        return  # such contexts hold only for the thread that entered them
    if torch.is_autocast_enabled(config.model.device):
        raise ModelError(
            f"torch.autocast({config.model.device!r}) is active, so engine and trainer would compute in another dtype "
            "than configured: leave that block; dtype=bfloat16 computes in bfloat16, with fp32 masters"
        )
    if learns and torch.is_inference_mode_enabled():
        raise ModelError(
            "torch.inference_mode() is active, which allows no gradients: make the Trainer and train outside of that "
            "block"
        )


def check_module(module: PreTrainedModel) -> None:
    """Raise ModelError for a module whose parameters cannot be trained, or cannot be saved in the form of its class."""
    quantised = getattr(module.config, "quantization_config", None)
    if getattr(quantised, "dequantize", False):
        raise ModelError(
            "the module's weights are plain numbers, as they were dequantised when it was loaded, but its config still "
            "says that they are quantised, and so would every checkpoint; clear that first: module.hf_quantizer = "
            "None; module.is_quantized = False; del module.config.quantization_config"
        )
    if quantised is not None:
        raise ModelError(
            "the module's weights are quantised: neither they nor adapters on them (QLoRA) can be trained, because the "
            "engine would compute with other weights than the trainer; load it in bfloat16 (from a GGUF file with "
            "GgufConfig(dequantize=True)), and set lora.r for adapters"
        )
    made = [name for name, parameter in module.named_parameters() if parameter.is_inference()]
    if made:
        raise ModelError(
            f"the module was made or loaded inside torch.inference_mode(), so its parameters ({made[0]}, ...) "
            "cannot be trained: make it outside of that block"
        )
    for name, child in module.named_modules():
        hooks = [hook for hook in forward_pre_hooks(child) if isinstance(hook, (WeightNorm, SpectralNorm))]
        if hooks or is_parametrized(child):
            raise ModelError(
                f"{name} of the module computes its weight from other parameters (torch.nn.utils: weight_norm, "
                "spectral_norm, parametrize), which checkpoints of its class cannot hold; make it a plain weight with "
                "remove_parametrizations() or remove_weight_norm()"
            )


def check_module_dtype(module: PreTrainedModel) -> None:
    """Raise ModelError for a module whose parameters have several dtypes, or one that cannot be trained. Parameters
    that transformers itself keeps in float32 do not count, nor adapters, which are converted."""
    kept = fp32_name_parts(module)
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, parameter in module.named_parameters():
        if not is_adapter_name(name) and parameter.is_floating_point() and not any(part in name for part in kept):
            by_dtype.setdefault(parameter.dtype, []).append(name)
    held = [str(dtype).removeprefix("torch.") for dtype in by_dtype]
    if len(by_dtype) > 1:
        few = min(by_dtype.values(), key=len)
        raise ModelError(
            f"the module's parameters are {' and '.join(held)} ({few[0]}{', ...' if len(few) > 1 else ''}); convert it "
            "to one dtype with .to(torch.bfloat16) or .float()"
        )
    if held and held[0] not in DTYPES:
        raise ModelError(
            f"the module holds {held[0]}, which cannot be trained; convert it with .to(torch.bfloat16) or .float()"
        )


def check_saving(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: TrainerConfig) -> None:
    """Raise ModelError or ConfigError for what a run has and its checkpoints could not hold. module: the model, which
    needs no weights."""
    check_saved(module, tokenizer, DTYPES[config.model.dtype])
    for path, value in by_path([to_dict(config)]).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}={value!r} cannot be written into a checkpoint ({error}): give text, numbers, lists and "
                "mappings of these; in YAML a date is text only in quotes"
            ) from error


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """The reward of a run without reward functions: 0 for every completion."""
    return [0.0] * len(completions)


def check_rewards(
    reward_funcs: Any,
    config: TrainerConfig,
    columns: tuple[str, ...] | None,
    *,
    has_eval: bool,
    processing_classes: Any = None,
    sources: Sequence[Any] = (),
    has_environments: bool = False,
) -> RewardSetup:
    """Return the reward functions as the workers get them: the user's, then the sources that come with samples, then
    those that the configuration adds. columns: of the dataset, None if unknown. has_environments: whether
    functions can be given environments. Raises ConfigError for unusable ones."""
    functions = with_model_entries([] if reward_funcs is None else reward_funcs, processing_classes)
    is_rewarded = bool(functions or sources)
    if not is_rewarded and config.advantage.needs_rewards:
        hint = ", or give the environment a method get_reward()" if has_environments else ""
        raise ConfigError(f"there is no reward: pass reward_funcs= (a function or a list of functions){hint}")
    if not is_rewarded and has_eval:
        raise ConfigError(
            "evaluation needs a reward function: pass reward_funcs=, or leave out eval_dataset (eval_path)"
        )
    if not is_rewarded:
        _refuse_what_rewards_would_feed(config)
    added: list[Any] = [] if is_rewarded else [no_reward]
    if config.rewards.overlong_buffer is not None:
        added.append(overlong_penalty(config.rollout.max_completion_length, config.rewards.overlong_buffer))
    for place, entry in enumerate(functions):
        if isinstance(entry, RewardModelEntry):
            if isinstance(entry.model, (str, Path)):
                load_settings(str(entry.model), config)
            tokenizer = usable_tokenizer(
                entry.tokenizer, "reward_processing_classes", trust_remote_code=config.model.trust_remote_code
            )
            functions[place] = dataclasses.replace(entry, tokenizer=tokenizer)
    setup = RewardSetup([*functions, *sources, *added], columns, len(added), len(sources), has_environments)
    with setup.runner(config) as runner:
        entries = runner.entries
        _check_environments(runner, config)
        check_rollout_rewards(config, has_models=bool(entries.models), has_judges=bool(entries.judges))
        is_own_dense = any(entry.is_dense for entry in runner.entries.functions.values())
        _check_step_rewards(config, is_dense=runner.is_dense, is_own_dense=is_own_dense)
        return setup


def _check_environments(runner: RewardRunner, config: TrainerConfig) -> None:
    """Raise ConfigError if a group is to be scored with its environments, and cannot have one each at once."""
    limit = config.agents.max_environments
    size = max(config.algorithm.num_generations, config.eval.num_generations_eval)
    if limit is not None and limit < size and runner.score_by == "group" and runner.reads_environments:
        raise ConfigError(
            f"max_environments={limit}, but score_by=group scores {size} trajectories at once with their environments; "
            f"set it to at least {size}, or have the reward functions take neither `environments` nor **kwargs"
        )


def _refuse_what_rewards_would_feed(config: TrainerConfig) -> None:
    """Raise ConfigError for options that do nothing, or end the first step, if every completion has the reward 0."""
    algorithm = config.algorithm
    if algorithm.max_refills:
        raise ConfigError(
            f"max_refills={algorithm.max_refills} replaces groups whose rewards are all equal, but there is no reward; "
            "pass reward_funcs=, or leave it out"
        )
    if algorithm.positive_nll_coef and not learns_from_demonstrations(config):
        raise ConfigError(
            f"positive_nll_coef={algorithm.positive_nll_coef} is for samples with a positive reward, but there is no "
            "reward; pass reward_funcs=, or leave it out"
        )


def _check_step_rewards(config: TrainerConfig, *, is_dense: bool, is_own_dense: bool) -> None:
    """Raise ConfigError if an estimator needs rewards per token and gets none, or cannot use those that it gets.
    is_dense: whether there may be any; is_own_dense: whether a function gives some. An agent may reward its turns or
    not, so that it is told when it does (`rollout/trajectory_stream.py`)."""
    if config.advantage.needs_step_rewards and not is_dense:
        raise ConfigError(
            "token_level=true normalises rewards per token, but no reward function returns any, so it would do "
            "nothing; decorate one with hybrid_rl.rewards.dense_reward, or leave it out"
        )
    if is_own_dense and (problem := token_rewards_problem(config)):
        raise ConfigError(f"a reward function returns a number per token, which {problem}")


def load_settings(path: str, config: TrainerConfig) -> Any:
    """Load the config of a model by name or folder. Raises ModelError if it cannot be read, CheckpointError for the
    model of a damaged checkpoint."""
    path = model_folder(path)
    _refuse_adapter(path)
    check_model(Path(path))
    with loading("the config of model", path):
        return AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)


def _refuse_adapter(path: str) -> None:
    if is_adapter_folder(path):
        raise ModelError(
            f"{path!r} is an adapter, and only the policy can begin with one; merge it into its model first: "
            "trainer.save(folder, merged=True), or merge_and_unload() of peft"
        )


def check_teacher(config: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the algorithm needs a teacher that is not named, or has another vocabulary."""
    path = teacher_path(config)
    if path is None:
        return
    _refuse_adapter(path)
    check_model(Path(path))
    theirs = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"teacher_path={path!r} has another vocabulary ({len(theirs)} tokens) than the model ({len(tokenizer)}), "
            "so its logprobs are of other tokens; choose a teacher of the same family"
        )


def check_demonstrations_of(
    source: SizedSource | StreamSource,
    config: TrainerConfig,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    room: PromptRoom | None,
) -> None:
    """Raise DataError if the algorithm learns from the dataset's own completions and they cannot be used. room: tokens
    left for a prompt in addition to the longest completion."""
    if Needs.DEMONSTRATIONS in config.advantage.needs:
        max_length = None if room is None else room.num_tokens + params.max_tokens
        check_demonstrations(source, demonstration_encoder(tokenizer, config), params, max_length=max_length)
