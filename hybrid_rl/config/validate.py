"""Checks over several keys, the values of `None` and `auto`, and notices about consequences that a user may not expect.
All of it runs before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

from hybrid_rl.algos import Needs
from hybrid_rl.config.algorithm import (
    inert_keys,
    learns_from_demonstrations,
    needs_reference,
    resolve_algorithm,
    rollout_ranks,
    steps_ahead,
)
from hybrid_rl.config.buffer_keys import BufferConfig, HeldConfig
from hybrid_rl.config.eval_keys import EvalConfig
from hybrid_rl.config.exact_logprobs import check_exact
from hybrid_rl.config.hardware import NO_GPU, Device, Hardware, settled
from hybrid_rl.config.lasting_keys import check_lasting
from hybrid_rl.config.quantised_weights import rounding_choices
from hybrid_rl.config.rank_keys import FSDPConfig, RayControllerConfig
from hybrid_rl.config.rollout_ranks import with_rollout_ranks
from hybrid_rl.config.schema import TrainerConfig, ValueHeadConfig
from hybrid_rl.errors import CheckpointError, ConfigError

NUM_SHOWN = 5  # checkpoints of a run folder, in an error
CLIP_KEYS = ("epsilon", "epsilon_high", "delta", "dual_clip")
LARGE_RATE = 0.1
SMALL_ADAPTER_RATE = 5e-6
# At a ratio of 1 their loss is -A ln p.
LIKELIHOODS = ("reinforce", "cispo")


def resolve(
    config: TrainerConfig,
    given: frozenset[str] = frozenset(),
    *,
    has_eval: bool = True,
    hardware: Hardware = NO_GPU,
    module_device: Device | None = None,
) -> TrainerConfig:
    """Check a config and replace what is derived. given: the paths that the user set (for inert keys). hardware: the
    GPUs that are available. module_device: "cpu" or "cuda", the device of a module that was passed.

    Raises ConfigError for sizes that cannot work together, GPUs that are missing, and keys that would have no effect;
    CheckpointError if `resume` names no checkpoint.
    """
    config = with_rollout_ranks(settled(config, given, hardware, module_device))
    algorithm, data, optimizer = config.algorithm, config.data, config.optimizer
    _check_ranks(config, _number_of(config))
    config.rollout.check(config, rollout_ranks(config) or _number_of(config))
    _check_unpacked(config)
    check_exact(config)
    _check_mode(config)
    check_lasting(config, config.save_steps)
    config.memory.check(_number_of(config), config.model.device)
    if config.run_name is not None and not re.fullmatch(r"[\w.+=-]+", config.run_name):
        raise ConfigError(f"run_name={config.run_name!r} names a folder: use letters, digits and . _ + = - only")
    if config.run_name in (".", ".."):
        raise ConfigError(f"run_name={config.run_name!r} names a folder; choose another name")
    _check_resume(config)
    _check_inert(config, given, has_eval)
    mini_batch = optimizer.prompts_per_mini_batch or data.prompts_per_step
    if data.prompts_per_step % mini_batch:
        raise ConfigError(
            f"prompts_per_mini_batch={mini_batch} does not divide prompts_per_step={data.prompts_per_step}; use "
            f"{_divisors(data.prompts_per_step)}"
        )
    algorithm = resolve_algorithm(config, updates=data.prompts_per_step // mini_batch * algorithm.num_iterations)
    cap = optimizer.tokens_per_micro_batch
    if cap is not None and config.rollout.max_completion_length > cap:
        raise ConfigError(
            f"tokens_per_micro_batch={cap} cannot hold one completion of "
            f"max_completion_length={config.rollout.max_completion_length}; raise it"
        )
    buffer, longest = config.rewards.overlong_buffer, config.rollout.max_completion_length
    if buffer is not None and buffer >= longest:
        raise ConfigError(
            f"overlong_buffer={buffer} is the last part of max_completion_length={longest}; choose one below it"
        )
    if not all(config.rollout.stop_strings):
        raise ConfigError(
            f"stop_strings={config.rollout.stop_strings!r} has an empty text, which ends every completion; remove it"
        )
    _check_learns(config)
    config = replace(config, buffer=_settled_buffer(config))
    return replace(config, algorithm=algorithm, optimizer=replace(optimizer, prompts_per_mini_batch=mini_batch))


def _settled_buffer(config: TrainerConfig) -> BufferConfig:
    """Return the section of the buffer as it is used. Raises ConfigError for what held groups cannot be joined with."""
    buffer, size, ahead = config.buffer, config.data.prompts_per_step, steps_ahead(config)
    if not isinstance(buffer, HeldConfig):
        return buffer
    name = "rollout.partial=true" if config.rollout.partial else f"rollout.async_level={ahead}"
    name = f"rollout_ranks={rollout_ranks(config)}" if rollout_ranks(config) else name
    if learns_from_demonstrations(config):
        raise ConfigError(
            f"{name} cannot be combined with demonstrations, which nothing generates; leave one of them out"
        )
    if buffer.oversample is not None and not config.rollout.partial:
        raise ConfigError(f"oversample={buffer.oversample} would do nothing without rollout.partial=true; set both")
    if buffer.unfinished == "drop":
        return _dropping(config, buffer)
    # As many as a step takes, with two versions more than they need, win most of what holding more and for longer could
    # (benchmarks/simulate_time.py), with tokens that are about one version old on average.
    oversample = (size if buffer.oversample is None else buffer.oversample) if config.rollout.partial else None
    # Each step takes as many groups as it begins, so the extra ones of the first step decide how old groups become.
    least = ahead + math.ceil((oversample or 0) / size)
    longest = least + 2 * bool(oversample)
    if buffer.max_staleness is not None and buffer.max_staleness < least:
        raise ConfigError(
            f"max_staleness={buffer.max_staleness} is too small for async_level={ahead} with "
            f"oversample={oversample or 0}: a step has room for prompts_per_step={size} groups; set it to at least "
            f"{least}, or leave it out"
        )
    if buffer.buffer_order == "freshest" and ahead:
        raise ConfigError(
            f"buffer_order=freshest would never train on what async_level={ahead} generates ahead; use fifo"
        )
    return replace(
        buffer, oversample=oversample, max_staleness=longest if buffer.max_staleness is None else buffer.max_staleness
    )


def _dropping(config: TrainerConfig, buffer: HeldConfig) -> HeldConfig:
    """Return a section that holds nothing. Raises ConfigError for keys that say what becomes of held groups."""
    if not config.rollout.partial:
        raise ConfigError("unfinished=drop would do nothing without rollout.partial=true; set both")
    if ahead := steps_ahead(config):
        raise ConfigError(
            f"unfinished=drop holds no groups, but async_level={ahead} trains on groups that are held; leave one of "
            "them out"
        )
    settings = {
        f"max_staleness={buffer.max_staleness}": buffer.max_staleness is not None,
        f"buffer_order={buffer.buffer_order}": buffer.buffer_order != "fifo",
    }
    if inert_settings := [setting for setting, is_so in settings.items() if is_so]:
        raise ConfigError(
            f"{inert_settings[0]} would do nothing with unfinished=drop, which holds no groups; leave it out"
        )
    # A sixteenth halves the tail already, and leaves out half of the longest tenth (benchmarks/simulate_tail.py).
    sixteenth = max(1, config.data.prompts_per_step // 16)
    return replace(buffer, oversample=sixteenth if buffer.oversample is None else buffer.oversample)


def prompts_begun(config: TrainerConfig) -> int:
    """Return the number of prompts that a step of a resolved configuration takes from the dataset. With groups that are
    held the first step takes more."""
    buffer, size = config.buffer, config.data.prompts_per_step
    if isinstance(buffer, HeldConfig) and buffer.unfinished == "drop":
        return size + (buffer.oversample or 0)
    return size


def _check_resume(config: TrainerConfig) -> None:
    """Refuse a path that is not a checkpoint. Whether a checkpoint can be used is checked when it is read."""
    if config.resume == "auto" and config.run_name is None:
        raise ConfigError("resume=auto looks for checkpoints of the run named run_name; set run_name")
    if config.resume in (None, "auto"):
        return
    folder = Path(config.resume or "")
    if not folder.is_dir():
        raise CheckpointError(
            f"resume={config.resume!r} is not a checkpoint: there is no such folder; give that of a checkpoint, or set "
            f"resume=auto, with run_name, for the newest of that run"
        )
    names = (path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir())
    steps = sorted(int(name) for name in names if name.isdecimal())
    if steps:
        shown = ", ".join(f"checkpoint-{step}" for step in steps[-NUM_SHOWN:])
        raise CheckpointError(
            f"resume={config.resume!r} is the folder of a run, not a checkpoint; it has "
            f"{'..., ' * (len(steps) > NUM_SHOWN)}{shown}: give one of them, or set resume=auto with "
            f"run_name={folder.resolve().name} for the newest"
        )
    if any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise CheckpointError(
            f"resume={config.resume!r} is the folder of a run, not a checkpoint, and has none yet; leave resume out"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _number_of(config: TrainerConfig) -> int:
    """Return num_ranks of a config without `auto`."""
    assert config.num_ranks != "auto"
    return config.num_ranks


def _check_learns(config: TrainerConfig) -> None:
    """Refuse settings from which nothing can be learned, whatever the data and the rewards are."""
    rate, critic, weights = config.optimizer.learning_rate, config.critic, config.rewards.reward_weights
    has_critic = isinstance(critic, ValueHeadConfig) and critic.critic_learning_rate > 0
    if config.mode != "rollout" and rate == 0 and not has_critic:
        raise ConfigError(
            f"learning_rate={rate} trains nothing; set it above 0, or mode=rollout to sample and score without training"
        )
    has_others = config.rewards.overlong_buffer is not None or config.kl.in_reward
    if weights and not any(weights) and config.advantage.needs_rewards and not has_others:
        raise ConfigError(
            f"reward_weights={weights} makes every reward 0, from which nothing is learned; give one function another "
            "weight, or leave reward_weights out"
        )


def _check_ranks(config: TrainerConfig, num_ranks: int) -> None:
    if num_ranks > 1 and config.controller.backend == "local":
        raise ConfigError(
            f"controller.backend=local runs one rank, but num_ranks={num_ranks}; leave backend out, or set ray"
        )
    if isinstance(config.controller, RayControllerConfig) and "CUDA_VISIBLE_DEVICES" in config.controller.ray.env_vars:
        raise ConfigError(
            "controller.ray.env_vars sets CUDA_VISIBLE_DEVICES, but Ray deals out the GPUs, and every rank sees all of "
            "its node; set it for the program that starts Ray (this one, without controller.address) instead"
        )
    if num_ranks % config.fsdp.dp_replicate:
        raise ConfigError(
            f"fsdp.dp_replicate={config.fsdp.dp_replicate} does not divide num_ranks={num_ranks}; use "
            f"{_divisors(num_ranks)}"
        )


def _check_mode(config: TrainerConfig) -> None:
    if config.mode == "train" and config.rollouts_path is None:
        raise ConfigError("mode=train trains on saved rollouts: set rollouts_path to their folder")
    if config.mode == "rollout" and config.save_steps is not None:
        raise ConfigError(
            f"save_steps={config.save_steps} would save a model that mode=rollout does not train; leave it out"
        )


def _check_unpacked(config: TrainerConfig) -> None:
    """Refuse what only packed rows can do if the model's own forward runs in their place."""
    if config.is_packed:
        return
    engine = config.rollout.engine
    cause = "model.attention=unpacked" if config.rollout.is_packed else f"rollout.engine={engine}"
    if engine == "inplace":
        raise ConfigError(
            "model.attention=unpacked trains through the model's own forward, and rollout.engine=inplace decodes "
            "packed rows; set rollout.engine=vllm, or rollout.engine=hf without it"
        )
    if config.model.torch_compile:
        raise ConfigError(
            f"model.torch_compile=true compiles packed blocks, and {cause} runs the model's own forward; leave it out"
        )
    if Needs.ROUTER_SCORES in config.policy_loss.needs:
        raise ConfigError(
            f"policy_loss={type(config.policy_loss).__name__} reads the model's routers from packed rows, which "
            f"{cause} does not make; choose another policy_loss (gmpo), or rollout.engine=inplace"
        )


def _check_inert(config: TrainerConfig, given: frozenset[str], has_eval: bool) -> None:
    """Refuse keys that the user set but that this configuration never reads."""
    for path, reason in (*_inert_keys(config, has_eval), *inert_keys(config, has_eval=has_eval)):
        section, _, name = path.rpartition(".")
        holder = attrgetter(section)(config) if section else config
        # A full config read back from a run folder gives every key: only a value that differs was meant.
        if path in given and getattr(holder, name, None) != getattr(type(holder)(), name, None):
            raise ConfigError(f"{path}={getattr(holder, name)!r} would do nothing: {reason}")


def _inert_keys(config: TrainerConfig, has_eval: bool) -> Iterator[tuple[str, str]]:
    """Yield keys outside the algorithm that other keys leave without effect: the path and the reason."""
    mode, engine = config.mode, config.rollout.engine
    if config.max_steps is not None:
        yield "num_train_epochs", f"max_steps={config.max_steps} decides the length of the run"
    if config.optimizer.lr_scheduler_type == "constant":
        yield "optimizer.warmup_steps", "use lr_scheduler_type=constant_with_warmup"
    if config.model.dtype != "bfloat16":  # an argument of vLLM is called dtype as well, and brings the key too
        yield "model.cast_lm_head_to_fp32", "it exists with dtype=bfloat16"
    if config.rollout.handoff.probe_steps == 0:
        yield "rollout.handoff.probe_tolerance", "probe_steps=0 switches the probe off"
    if mode == "train":
        yield "save_rollouts", "mode=train makes no rollouts"
    else:
        yield "rollouts_path", f"mode={mode} makes its own rollouts"
    if mode == "rollout":
        yield from ((name, "mode=rollout trains nothing to save") for name in ("save_before", "enable_jit_checkpoint"))
    if not config.rollout.is_packed:
        yield "model.attention", f"rollout.engine={engine} runs the attention that the model's own config names"
    if not needs_reference(config):
        yield "controller.reference_ranks", "there is no reference model while beta=0"
    if config.num_ranks == 1:
        yield from ((f"fsdp.{item.name}", "one rank shards nothing; set num_ranks") for item in fields(FSDPConfig))
    if not isinstance(config.critic, ValueHeadConfig):
        yield "lora.lora_critic", "there is no critic; an advantage such as gae has one"
    if not has_eval:
        for item in fields(EvalConfig):
            yield f"eval.{item.name}", "there is no eval_dataset (or eval_path)"
    if config.eval.metric_for_best_model is None:
        for name in ("greater_is_better", "load_best_model_at_end", "early_stopping.patience"):
            yield f"eval.{name}", "set metric_for_best_model, for example to eval/accuracy"
    elif config.eval.eval_steps is None:
        for name in ("load_best_model_at_end", "early_stopping.patience"):
            yield f"eval.{name}", "the only evaluation after a step is that of the last; set eval_steps"
    if config.eval.early_stopping.patience is None:
        yield "eval.early_stopping.threshold", "set early_stopping.patience"
    if config.save_steps is None:
        yield "eval.load_best_model_at_end", "no checkpoint is written; set save_steps"
        for name in ("save_total_limit", "async_save"):
            yield f"checkpoints.{name}", "it is about the checkpoints of save_steps, and none is set"


def num_training_steps(config: TrainerConfig, num_prompts: int | None) -> int:
    """Compute the number of training steps of a run. num_prompts: size of the training set, None for a stream.

    The epochs' prompts form one continuous sequence; what is left over at its end does not fill a step and is not used.
    """
    if config.max_steps is not None:
        return _check_warmup(config, config.max_steps)
    if num_prompts is None:
        raise ConfigError("a streaming train_dataset has no length: set max_steps")
    size = prompts_begun(config)
    num_extra = size - config.data.prompts_per_step
    steps = math.floor(config.num_train_epochs * num_prompts / size + 1e-9)
    if steps == 0:
        raise ConfigError(
            f"{num_prompts} prompts times num_train_epochs={config.num_train_epochs} do not fill one step of "
            f"prompts_per_step={config.data.prompts_per_step}{f' and oversample={num_extra}' if num_extra else ''}; "
            f"set max_steps, raise num_train_epochs or lower prompts_per_step"
        )
    return _check_warmup(config, steps)


def _check_warmup(config: TrainerConfig, steps: int) -> int:
    updates, warmup = steps * optimizer_steps_per_training_step(config), config.optimizer.warmup_steps
    if warmup >= updates:
        raise ConfigError(f"warmup_steps={warmup} is not below the {updates} optimizer steps of this run; lower it")
    critic = config.critic
    if isinstance(critic, ValueHeadConfig) and critic.critic_warmup_steps >= steps:
        raise ConfigError(
            f"critic_warmup_steps={critic.critic_warmup_steps} is not below the {steps} training steps of this run: "
            f"the policy would never learn; lower it"
        )
    return steps


def optimizer_steps_per_training_step(config: TrainerConfig) -> int:
    """Compute the number of updates of the weights in one training step of a resolved config."""
    mini_batch = config.optimizer.prompts_per_mini_batch or config.data.prompts_per_step
    return config.data.prompts_per_step // mini_batch * config.algorithm.num_iterations


def notices(config: TrainerConfig, given: Collection[str]) -> Iterator[str]:
    """Yield sentences about a resolved config. given: the paths that the user set."""
    if config.model.cast_lm_head_to_fp32 and config.rollout.placement != "embedded":
        yield (
            f"cast_lm_head_to_fp32=True applies only to the trainer's models: {config.rollout.engine} rounds its "
            "logits to bfloat16, so engine and trainer differ more than with an embedded engine (see mismatch/*); "
            "rollout.engine=inplace has the same head in both"
        )
    rounding = ", ".join(rounding_choices(config))
    if rounding and config.correction.is_active and "correction.correction_mode" not in given:
        yield (
            f"{rounding}: correction={config.correction.correction_mode} is chosen, which weighs tokens by how likely "
            "the trainer itself makes them; correction=none leaves it out"
        )
    if config.optimizer.learning_rate > LARGE_RATE:
        yield (
            f"learning_rate={config.optimizer.learning_rate:g}: AdamW moves each weight by about this much in an "
            "update, and most weights are far smaller, so one update may ruin the model; 1e-6 to 1e-4 are usual"
        )
    if config.lora.is_on and 0 < config.optimizer.learning_rate < SMALL_ADAPTER_RATE and config.mode != "rollout":
        yield (
            f"learning_rate={config.optimizer.learning_rate:g} is low for adapters, which learn slowly at the rates of "
            "all weights; about ten times that is usual: 1e-5 to 1e-4"
        )
    loss, old = config.policy_loss, config.algorithm.old_logprobs
    objective: str = loss.objective
    if learns_from_demonstrations(config) and objective not in LIKELIHOODS:
        yield (
            f"policy_loss={objective} holds ratios: the metric loss is not the negative log-likelihood of the "
            "demonstrations (of clip it is -1), though the first update of a batch learns from it; "
            "policy_loss=reinforce shows it"
        )
    has_ratio = loss.uses_old_logprobs and old != "rollout"
    if not has_ratio or optimizer_steps_per_training_step(config) > 1:
        return
    defaults = {item.name: item.default for item in fields(loss)}
    inert = [
        f"{name}={getattr(loss, name)}"
        for name in CLIP_KEYS
        if f"policy_loss.{name}" in given and getattr(loss, name) != defaults[name]
    ]
    if inert:
        yield (
            f"{', '.join(inert)}: nothing is clipped, because each batch is used by one optimizer step, at which every "
            "ratio is 1; set num_iterations above 1, or prompts_per_mini_batch below prompts_per_step"
        )
