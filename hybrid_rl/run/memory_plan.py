"""The memory of a run, planned before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging

import psutil
import torch

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import critic_path, teacher_path
from hybrid_rl.config.hardware import Hardware
from hybrid_rl.config.sizes import memory_bytes
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.planning.auto import plan_memory, with_choices
from hybrid_rl.planning.ledger import Budget, MemoryPlan
from hybrid_rl.planning.models import RunModels
from hybrid_rl.planning.passes import Passes, RunShape
from hybrid_rl.planning.remedies import check_fits
from hybrid_rl.planning.size_text import size_text
from hybrid_rl.run.prepare import Run, phases_of

USABLE_SHARE = 0.95  # of a GPU; gaps between tensors take the rest
MOST_GPUS_OF_HOST = 8
logger = logging.getLogger("hybrid_rl")


def planned(run: Run) -> Run:
    """Return the run with its memory planned and what is `auto` decided: on GPUs, and wherever memory.device_memory
    says how much there is. Other runs stay as they are, and nothing is counted.

    Raises ConfigError for a run that cannot fit, ModelError with memory.device_memory for a model that cannot be
    counted; without it, that is only a warning.
    """
    config = run.config
    budget = budget_of(config, run.hardware)
    if budget is None:
        return run
    try:
        passes = Passes(run_shape(run))
        plan = plan_memory(passes, config, budget)
    except ModelError as error:  # of a module that was changed by hand, say: it may run all the same
        if config.memory.device_memory is not None:
            raise
        logger.warning("there is no plan of memory, and nothing of it is decided in advance: %s", error)
        return run
    check_fits(plan, passes, config)
    _tell(plan)
    chosen = with_choices(config, plan.choices)
    return dataclasses.replace(run, config=chosen, memory=phases_of(chosen, run.rewards), plan=plan)


def budget_of(config: TrainerConfig, hardware: Hardware) -> Budget | None:
    """Return the memory that a run may take; None if nothing is to be planned: on CPUs without memory.device_memory,
    and on GPUs of other machines, whose size is not known here.

    Raises ConfigError if the run is given more than a GPU has."""
    device_memory, host = config.memory.device_memory, config.memory.host_memory
    is_cuda = config.model.device == "cuda"
    if device_memory is None and (not is_cuda or not hardware.is_here or not torch.cuda.is_available()):
        return None
    total = 0
    if is_cuda and hardware.is_here and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if device_memory is not None:
        device_bytes = memory_bytes(device_memory, "memory.device_memory")
        words = f"memory.device_memory={device_memory}"
        if total and device_bytes > total:
            raise ConfigError(
                f"memory.device_memory={device_memory} is more than the {size_text(total)} of {hardware.name}; leave "
                "it out, or make it smaller"
            )
    else:
        device_bytes = int(USABLE_SHARE * total)
        words = f"{USABLE_SHARE:.0%} of the {size_text(total)} of {hardware.name}"
    assert config.num_ranks != "auto"
    # Ranks on CPUs are all on this machine.
    most = max(hardware.num_gpus, 1) if hardware.is_here else MOST_GPUS_OF_HOST
    ranks_per_host = min(config.num_ranks, most) if is_cuda else config.num_ranks
    if host is not None:
        return Budget(
            device_bytes, memory_bytes(host, "memory.host_memory"), ranks_per_host, words, f"memory.host_memory={host}"
        )
    if not hardware.is_here:
        return Budget(device_bytes, None, ranks_per_host, words)
    return Budget(device_bytes, psutil.virtual_memory().available, ranks_per_host, words, "what is available now")


def run_shape(run: Run) -> RunShape:
    """Return what decides the memory of a run besides its configuration."""
    config, rewards = run.config, run.rewards.entries
    models = RunModels.of(
        run.choice.module or run.choice.recipe(config),
        config,
        teacher=teacher_path(config),
        critic=critic_path(config),
        rewards=[entry.model for entry in rewards.models.values()],
    )
    return RunShape(models, run.max_length, rewards.max_length(run.max_length))


def _tell(plan: MemoryPlan) -> None:
    """Log what was decided."""
    choices, there = plan.choices, plan.budget.device_bytes
    decided = [f"memory.offload={list(choices.offload)}"] if "memory.offload" in choices.reasons else []
    if "memory.on_host" in choices.reasons:
        decided.append("memory.on_host=['optimizer']")
    if "optimizer.tokens_per_micro_batch" in choices.reasons:
        decided.append(f"tokens_per_micro_batch={choices.tokens_per_micro_batch}")
    if "kv_cache_memory_bytes" in choices.reasons:
        decided.append(f"KV cache {size_text(choices.kv_cache_memory_bytes or 0)}")
    logger.info(
        'memory: at most %s of %s, in phase "%s"; chosen: %s',
        *(size_text(plan.peak.device_bytes), size_text(there or 0), plan.peak.name, ", ".join(decided) or "nothing"),
    )
