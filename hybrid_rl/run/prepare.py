"""Preparation of a run from the user's arguments, cheapest checks first, so that nothing is loaded in vain."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.agents.agent_setup import AgentSetup
from hybrid_rl.batch.rollout_files import rollout_steps
from hybrid_rl.checkpoint.finding import check_resumed, find_checkpoint, resumed_folder
from hybrid_rl.checkpoint.owners import FolderLock
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.config import (
    TrainerConfig,
    load_config,
    num_training_steps,
    optimizer_steps_per_training_step,
    resolve,
    to_dict,
)
from hybrid_rl.config.algorithm import critic_path, rollout_ranks
from hybrid_rl.config.changes import changed_keys
from hybrid_rl.config.hardware import Device, Hardware
from hybrid_rl.config.rank_keys import RayControllerConfig
from hybrid_rl.config.schema import ValueHeadConfig
from hybrid_rl.config.validate import notices
from hybrid_rl.data.source import SizedSource
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import ConfigError, DataError, ModelError
from hybrid_rl.models import check_tokenizer, stop_token_ids
from hybrid_rl.models.lora.adapter_size import AdapterSize
from hybrid_rl.planning.ledger import MemoryPlan
from hybrid_rl.process.hooks import extra
from hybrid_rl.process.stopping import note_checkpoint
from hybrid_rl.rollout.successes import Grades, SuccessRule
from hybrid_rl.run.adapters import (
    check_adapters,
    check_resumed_adapters,
    checked_adapters,
    record_adapters,
    tell_of_reference,
)
from hybrid_rl.run.agent_checks import AgentArguments, check_agents, reward_sources
from hybrid_rl.run.best import check_metric
from hybrid_rl.run.cautions import caution
from hybrid_rl.run.checks import (
    check_attention,
    check_demonstrations_of,
    check_modes,
    check_module,
    check_module_dtype,
    check_rewards,
    check_saving,
    check_teacher,
    load_settings,
)
from hybrid_rl.run.choice import ModelChoice, choose_model
from hybrid_rl.run.evaluation import success_rule
from hybrid_rl.run.gpus import without_gpu
from hybrid_rl.run.inputs import Data, load_data, paths_of
from hybrid_rl.run.tenancy import has_folder
from hybrid_rl.training.balance import assign_mini_batches
from hybrid_rl.training.run_cycle import MemoryPhases, memory_phases
from hybrid_rl.workers.setup import RewardSetup

logger = logging.getLogger("hybrid_rl")


def record_arguments(
    config: TrainerConfig, given: frozenset[str], model: Any, train: Any, evaluation: Any
) -> TrainerConfig:
    """Return the config with the values passed as arguments, which the run folder records: paths, a module's dtype.

    Raises ConfigError if argument and key disagree, and ModelError for a module whose dtype cannot be trained.
    """
    named = {"model.path": model, "data.train_path": train, "data.eval_path": evaluation}
    record: dict[str, Any] = {key: paths_of(value) for key, value in named.items() if paths_of(value) is not None}
    configured: dict[str, Any] = {"model.path": config.model.path, "data.train_path": config.data.train_path}
    configured["data.eval_path"] = config.data.eval_path
    for key, value in named.items():
        if value is not None and configured[key] is not None and configured[key] != record.get(key):
            argument = record.get(key, f"a {type(value).__name__}")
            raise ConfigError(
                f"{key}={configured[key]!r} is set, but {argument} was passed as an argument; give only one of them"
            )
    if isinstance(model, PreTrainedModel):
        check_module(model)
        check_module_dtype(model)
        dtype = str(model.dtype).removeprefix("torch.")
        if "model.dtype" in given and config.model.dtype not in ("auto", dtype):
            raise ConfigError(
                f"model.dtype={config.model.dtype}, but the module holds {dtype}; convert it with .to(...), or leave "
                "dtype out"
            )
        record["model.dtype"] = dtype
    return load_config(config, record)[0]


def find_hardware(config: TrainerConfig, module_device: Device | None = None) -> Hardware:
    """Find the GPUs that the ranks of this config can use: those of the Ray cluster that they join, or of this process.
    module_device: the device of a module that was passed.

    Raises ConfigError if the cluster cannot be reached.
    """
    if config.model.device == "cpu":
        return Hardware()
    if isinstance(config.controller, RayControllerConfig) and importlib.util.find_spec("ray") is not None:
        from hybrid_rl.controller.ray_backend import RayCluster, joins

        if joins(config.controller.address):
            with contextlib.closing(RayCluster(config.controller.address)) as cluster:
                num_gpus = sum(int(node.resources.get("GPU", 0)) for node in cluster.nodes())
            return Hardware(num_gpus, missing="no node of the Ray cluster has one", is_here=False)
    if not torch.cuda.is_available():
        return without_gpu()
    if module_device == "cpu" and not isinstance(config.controller, RayControllerConfig):
        return Hardware(torch.cuda.device_count())  # nothing runs on them: do not initialise CUDA
    return Hardware(
        torch.cuda.device_count(),
        torch.cuda.get_device_name(),
        has_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
    )


def device_of(model: Any) -> Device | None:
    """Return the kind of device that a module is on, None for anything else. Raises ModelError for other kinds."""
    if not isinstance(model, PreTrainedModel):
        return None
    if model.device.type not in ("cpu", "cuda"):
        raise ModelError(f"the module is on {model.device}; move it to the CPU or to a CUDA device")
    return "cuda" if model.device.type == "cuda" else "cpu"


def warn_of_devices(config: TrainerConfig, hardware: Hardware, module_device: Device | None) -> None:
    """Warn of choices that may surprise a user with a GPU."""
    is_local = not isinstance(config.controller, RayControllerConfig)
    if module_device == "cpu" and is_local and hardware.num_gpus:
        logger.warning(
            'the module is on the CPU and is trained there, although there is a GPU; pass module.to("cuda") to use it, '
            "or device=cpu if that is intended"
        )
    if module_device is None and config.model.device == "cpu" and hardware.is_overlooked:
        logger.warning("the run takes the CPU: %s; device=cpu if that is intended", hardware.missing)
    if module_device is None and config.model.device == "cuda" and not hardware.has_bfloat16:
        logger.warning("dtype=%s: %s has no hardware support for bfloat16", config.model.dtype, hardware.name)


def check_stop_strings(
    stop_strings: Sequence[str] | str | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...] | None:
    """Return stop strings as a tuple, None for None. Raises ConfigError for a special token: decoded text has none."""
    if stop_strings is None:
        return None
    if not isinstance(stop_strings, Sequence | Set):
        raise ConfigError(f"stop_strings={stop_strings!r} must be a string or a list of strings")
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    for string in strings:
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special and token.content in str(string):
                raise ConfigError(
                    f"stop_strings: {string!r} contains the special token {token.content!r}, which the text of a "
                    f"completion leaves out; set stop_token_ids=[{token_id}]"
                )
    return strings


def mini_batches(group: Tensor, config: TrainerConfig, step: int) -> Tensor:
    """Assign each sample of a training step to a mini-batch by its group. Returns int64 [N]."""
    size = config.optimizer.prompts_per_mini_batch or config.data.prompts_per_step
    return assign_mini_batches(group, size, config.seed + step)


def check_rollouts(config: TrainerConfig, max_steps: int, steps_done: int) -> None:
    """Raise DataError if mode=train will need rollouts that were not saved."""
    if config.rollouts_path is None:
        return
    missing = sorted(set(range(steps_done + 1, max_steps + 1)) - set(rollout_steps(Path(config.rollouts_path))))
    if missing:
        raise DataError(
            f"rollouts_path={config.rollouts_path} lacks {len(missing)} of the steps {steps_done + 1} to {max_steps}, "
            f"the first is step {missing[0]}; lower max_steps, or give the folder that has them"
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of a run, checked, before any weights are loaded."""

    config: TrainerConfig
    given: frozenset[str]  # paths of the keys that were set
    hardware: Hardware
    choice: ModelChoice
    skeleton: PreTrainedModel  # the module; without weights if it was given by path
    adapters: AdapterSize | None  # if only adapters are trained
    stop_ids: tuple[int, ...]  # tokens that end completions
    data: Data
    rewards: RewardSetup
    agents: AgentSetup | None  # what makes trajectories of many turns
    max_steps: int
    checkpoint: Checkpoint | None  # from which it goes on
    lock: FolderLock | None  # on the folder of a resumed run
    memory: MemoryPhases
    plan: MemoryPlan | None = None  # of memory, if one was made
    grades: Grades = field(default_factory=Grades)

    @property
    def module(self) -> PreTrainedModel | None:
        """The user's own module if it is trained in place."""
        return None if isinstance(self.config.controller, RayControllerConfig) else self.choice.module

    @property
    def success(self) -> SuccessRule | None:
        """What counts as a success."""
        return success_rule(self.config, self.rewards, self.grades)

    @property
    def train_params(self) -> SamplingParams:
        """How the tokens of training are chosen."""
        return sampling_params(self.config, self.stop_ids)[0]

    @property
    def eval_params(self) -> SamplingParams:
        """How those of evaluation are."""
        return sampling_params(self.config, self.stop_ids)[1]

    @property
    def about(self) -> dict[str, Any]:
        """What environment.json says of the run itself: the keys that were set to something else than their default,
        the model, the reward functions."""
        model = {
            "path": self.config.model.path,
            "class": type(self.skeleton).__name__,
            "num_parameters": self.num_parameters,
        }
        if self.adapters is not None:
            model |= {"adapter_rank": self.adapters.rank, "num_trained_parameters": self.adapters.num_trained}
        default, _ = load_config(None, {"algorithm": {"name": self.config.algorithm.name}})
        changed = self.given & {*changed_keys(to_dict(default), to_dict(self.config))}
        names = self.rewards.entries.names
        return {"given": sorted(changed), "model": model, "reward_functions": names, "max_steps": self.max_steps}

    @property
    def num_parameters(self) -> int:
        """Parameters of the policy, without adapters."""
        if self.adapters is not None:
            return self.adapters.num_base
        return sum(parameter.numel() for parameter in self.skeleton.parameters())

    @property
    def is_chat(self) -> bool:
        """Whether prompts, and so completions, are lists of messages."""
        return not isinstance(self.data.first.prompt, str)

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and completion, in tokens."""
        prompt = self.data.longest_prompt or self.data.encoder.max_prompt_length or 0
        return prompt + self.config.rollout.max_completion_length

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        critic = self.config.critic
        warmup = critic.critic_warmup_steps if isinstance(critic, ValueHeadConfig) else 0
        return max(self.max_steps - warmup, 0) * optimizer_steps_per_training_step(self.config)

    @property
    def num_critic_steps(self) -> int:
        """Optimizer steps of the critic in the whole run."""
        return self.max_steps * optimizer_steps_per_training_step(self.config)


def prepare(
    model: Any,
    tokenizer: Any,
    reward_funcs: Any,
    train: Any,
    evaluation: Any,
    config: Any,
    overrides: Mapping[str, Any],
    processing_classes: Any = None,
    agents: AgentArguments | None = None,
    *,
    closing: contextlib.ExitStack,
) -> Run:
    """Check the user's arguments, cheapest checks first. closing: releases the run folder, and closes environments that
    were made to look at them, when it is closed. Raises ConfigError, DataError, ModelError or CheckpointError."""
    loaded, given_keys = load_config(config, overrides)
    loaded = record_arguments(loaded, given_keys, model, train, evaluation)
    loaded, given_keys, brought = record_adapters(loaded, given_keys, model)
    module_device = device_of(model)
    hardware = find_hardware(loaded, module_device)
    has_eval = evaluation is not None or loaded.data.eval_path is not None
    resolved = resolve(loaded, given_keys, has_eval=has_eval, hardware=hardware, module_device=module_device)
    check_modes(resolved)
    check_attention(resolved, hardware)
    warn_of_devices(resolved, hardware, module_device)
    for notice in notices(resolved, given_keys):
        logger.warning(notice)
    extra("check_trackers")(resolved.report_to)
    library = resolved.rollout.library
    if library is not None and importlib.util.find_spec(library[0]) is None:
        raise ConfigError(
            f"rollout.engine={resolved.rollout.engine} needs {library[0]}, which is not installed: {library[1]}"
        )
    checkpoint, lock = to_resume(resolved, closing)
    choice = choose_model(model, tokenizer, resolved)
    check_stop_strings(resolved.rollout.stop_strings, choice.tokenizer)
    check_teacher(resolved, choice.tokenizer)
    if (critic := critic_path(resolved)) is not None:
        load_settings(critic, resolved)  # or it cannot be found
    made_by = check_agents(agents or AgentArguments(), resolved, choice.tokenizer, closing)
    data = load_data(train, evaluation, resolved, choice.tokenizer, choice.max_positions, made_by)
    max_steps = num_training_steps(resolved, len(data.train) if isinstance(data.train, SizedSource) else None)
    check_rollouts(resolved, max_steps, 0 if checkpoint is None else checkpoint.step)
    columns = tuple(data.train.column_names) if isinstance(data.train, SizedSource) else None
    sources = reward_sources(made_by)
    rewards = check_rewards(
        data.own_reward if reward_funcs is None and not sources else reward_funcs,
        resolved,
        columns,
        has_eval=bool(data.eval),
        processing_classes=processing_classes,
        sources=sources,
        has_environments=made_by is not None and bool(made_by.kinds),
    )
    success_rule(resolved, rewards)  # or an unknown name is refused
    check_metric(resolved.eval, data.eval, rewards.entries.names)
    phases = phases_of(resolved, rewards)
    skeleton = choice.skeleton(resolved)
    if brought is not None:
        check_adapters(choice.module or choice.recipe(resolved), brought, resolved)
        if checkpoint is None:
            tell_of_reference(resolved)
    check_tokenizer(choice.tokenizer, skeleton)
    adapters = checked_adapters(skeleton, resolved)
    check_saving(skeleton, choice.tokenizer, resolved)
    stop_ids = stop_token_ids(skeleton, choice.tokenizer, resolved.rollout.stop_token_ids)
    training, _ = sampling_params(resolved, stop_ids)
    check_demonstrations_of(data.train, resolved, choice.tokenizer, training, data.encoder.room)
    caution(data, choice.tokenizer, skeleton, stop_ids, resolved.rollout.stop_token_ids)
    if checkpoint is not None:
        checkpoint = check_resumed(checkpoint, is_auto=resolved.resume == "auto")
        check_rollouts(resolved, max_steps, checkpoint.step)  # it may be an earlier one
        check_resumed_adapters(choice.module or choice.recipe(resolved), checkpoint.folder, resolved)
    return Run(
        config=resolved,
        given=given_keys,
        hardware=hardware,
        choice=choice,
        skeleton=skeleton,
        adapters=adapters,
        stop_ids=stop_ids,
        data=data,
        rewards=rewards,
        agents=made_by,
        max_steps=max_steps,
        checkpoint=checkpoint,
        lock=lock,
        memory=phases,
    )


def to_resume(config: TrainerConfig, closing: contextlib.ExitStack) -> tuple[Checkpoint | None, FolderLock | None]:
    """Return the checkpoint to go on from, and the lock on its run folder, if this process has no Trainer of that.
    closing: releases it. Raises CheckpointError."""
    # Locked before it is read: a run that is just ending may still write a checkpoint.
    folder = resumed_folder(config.resume, config.output_dir, config.run_name)
    is_ours, lock = folder is not None and has_folder(folder), None
    if folder is not None and folder.is_dir() and not is_ours:
        lock, is_ours = FolderLock(folder), True
        closing.callback(lock.release)
    checkpoint = find_checkpoint(config.resume, config.output_dir, config.run_name, is_ours=is_ours)
    if checkpoint is not None:
        note_checkpoint()
    elif config.resume == "auto" and config.save_steps is None:
        logger.warning(
            "resume=auto finds no checkpoint, and save_steps is not set, so this run writes none%s, and a later resume "
            "will not find one either; set save_steps, or call trainer.save()",
            "" if config.save_before is None else " (unless save_before ends it early)",
        )
    return checkpoint, lock


def phases_of(config: TrainerConfig, rewards: RewardSetup) -> MemoryPhases:
    """Return what a rank that trains holds, and when. Raises ConfigError as `memory_phases`."""
    has_models, generates = bool(rewards.entries.models), not rollout_ranks(config)
    return memory_phases(config, has_reward_models=has_models, generates=generates)


def sampling_params(config: TrainerConfig, stop_ids: tuple[int, ...]) -> tuple[SamplingParams, SamplingParams]:
    """Return the sampling parameters of training and of evaluation."""
    training = SamplingParams(
        max_tokens=config.rollout.max_completion_length,
        temperature=config.rollout.temperature,
        stop_token_ids=stop_ids,
        stop_strings=tuple(config.rollout.stop_strings),
    )
    settings = config.eval
    evaluation = dataclasses.replace(
        training,
        temperature=settings.eval_temperature,
        top_p=settings.eval_top_p,
        top_k=settings.eval_top_k,
        min_p=settings.eval_min_p,
        repetition_penalty=settings.eval_repetition_penalty,
    )
    return training, evaluation
