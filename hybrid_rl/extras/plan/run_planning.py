"""The plan of a run: of one that words describe, or of one that is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import critic_path, ranks_apart, rollout_ranks, teacher_path
from hybrid_rl.config.sizes import memory_bytes
from hybrid_rl.errors import ModelError
from hybrid_rl.extras.plan.handoff_plan import HandoffPlan, adapter_handoff, plan_handoff, trace_files
from hybrid_rl.extras.plan.rates import GPUS, Rates, rates_of_device
from hybrid_rl.extras.plan.request import Machine, planned_config
from hybrid_rl.extras.plan.run_plan import RunPlan
from hybrid_rl.extras.plan.step_time import StepTime, step_time
from hybrid_rl.extras.plan.step_work import step_work
from hybrid_rl.memory.cycle import CRITIC, TEACHER
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.planning.adapter_memory import has_slot
from hybrid_rl.planning.auto import plan_memory, with_choices
from hybrid_rl.planning.ledger import Budget, MemoryPlan
from hybrid_rl.planning.models import RunModels
from hybrid_rl.planning.passes import Passes, RunShape
from hybrid_rl.planning.remedies import HOST_MEMORY, Remedy, find_remedies
from hybrid_rl.planning.shapes import trained_numel
from hybrid_rl.planning.size_text import count_text
from hybrid_rl.run.checks import load_settings
from hybrid_rl.run.inputs import prompt_room
from hybrid_rl.run.memory_plan import budget_of, run_shape
from hybrid_rl.run.prepare import Run
from hybrid_rl.training.run_cycle import memory_phases

PROMPT_TOKENS = 1024  # of the longest prompt, if neither the config nor the data tells
SHARED_MEMORY = "ranks that train write the weights into shared memory, and those that only generate read them there"
UNKNOWN_REWARDS = "reward functions are not known here: reward models and judges would come on top"


def plan_words(words: Sequence[str], machine: Machine, *, layouts: Path | None = None) -> RunPlan:
    """Plan the run that words describe (`planned_config`) on a machine. layouts: a folder of traces of vLLM's loader.

    Only config.json of the models is read. Raises ConfigError or ModelError for what cannot be planned.
    """
    config = planned_config(words, machine)
    if layouts is not None:
        trace_files(layouts)  # also for engines that need none: a path that is wrong is an error now, not with vLLM
    teacher, critic = teacher_path(config), critic_path(config)
    for path in (config.model.path, teacher, critic):
        if path is not None:
            _check_settings(path, config)
    recipe = ModelRecipe.of_folder(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
    models = RunModels.of(recipe, config, teacher=teacher, critic=critic)
    prompt, note = _longest_prompt(config, models)
    length = prompt + config.rollout.max_completion_length
    budget, passes = _budget(config, machine), Passes(RunShape(models, length, length))
    memory = plan_memory(passes, config, budget)
    remedies = (
        ()
        if memory.fits
        else tuple(_with_gpus(remedy, config, machine) for remedy in find_remedies(passes, config, budget))
    )
    notes = (*memory.notes, *([note] if note else []), UNKNOWN_REWARDS)
    decided = with_choices(config, memory.choices)
    plan = _assembled(decided, passes, replace(memory, notes=notes), machine.rates, layouts, may_trace=True)
    return replace(plan, remedies=remedies)


def _check_settings(path: str, config: TrainerConfig) -> None:
    """Raise ModelError if the config of a model cannot be read, with what a plan needs of it."""
    try:
        load_settings(path, config)
    except ModelError as error:
        if Path(path).is_dir():
            raise
        raise ModelError(f"{error}; for a plan a folder with nothing but its config.json suffices") from error


def plan_prepared(run: Run, layouts: Path | None = None) -> RunPlan:
    """Return the plan of a run that is prepared. layouts: a folder of traces of vLLM's loader.

    Raises ModelError for a model whose memory cannot be counted.
    """
    if layouts is not None:
        trace_files(layouts)
    passes, memory = Passes(run_shape(run)), run.plan
    if memory is None:
        assert run.config.num_ranks != "auto"
        budget = budget_of(run.config, run.hardware) or Budget(None, None, run.config.num_ranks)
        memory = plan_memory(passes, run.config, budget)
    rates = rates_of_device(run.hardware.name)
    # A process that runs vLLM may not trace another model of it.
    return _assembled(run.config, passes, memory, rates, layouts, may_trace=False)


def _assembled(
    config: TrainerConfig,
    passes: Passes,
    memory: MemoryPlan,
    rates: Rates | None,
    layouts: Path | None,
    *,
    may_trace: bool,
) -> RunPlan:
    """Return the plan of a run whose memory is planned. config: with what was chosen."""
    models = passes.shape.models
    is_apart = bool(rollout_ranks(config))
    cycle = memory_phases(config, has_reward_models=bool(models.rewards), generates=not is_apart).cycle
    ranks = memory.budget.ranks_per_host
    skeleton = models.policy if config.rollout.placement == "colocated" else passes.module("policy", config)
    if is_apart:
        handoff = HandoffPlan(SHARED_MEMORY, {})
    elif has_slot(config):
        handoff = adapter_handoff(config, passes.module("policy", config), ranks_per_host=ranks)
    else:
        handoff = plan_handoff(config, skeleton, ranks_per_host=ranks, layouts=layouts, may_trace=may_trace)
    workload = _workload(config, passes.shape.max_length)
    plan = RunPlan(_title(config, passes), cycle, memory, (), handoff, workload=workload)
    missing = ""
    if not memory.fits:
        missing = "not estimated for a run that does not fit"
    elif is_apart:
        missing = "not estimated with rollout_ranks, where both sides work at the same time"
    elif config.model.device == "cpu":
        missing = "the rates of CPUs are not known"
    elif rates is None:
        missing = f"the rates of its GPU are not known; hybrid-rl plan knows those of {', '.join(GPUS)} (--gpu)"
    if missing or rates is None:
        return replace(plan, time_missing=missing)
    return replace(plan, time=_time(plan, config, passes, rates))


def _time(plan: RunPlan, config: TrainerConfig, passes: Passes, rates: Rates) -> StepTime:
    """Estimate the time of a step of a run."""
    models = passes.shape.models
    critic = None if models.critic is None else passes.module("critic", config)
    others = {TEACHER: models.teacher, CRITIC: critic}
    if config.rollout.is_packed:
        token = sum(layer.bytes_per_token for layer in passes.layer_shapes(config).values())
    else:
        token = passes.cache_size(config).token_bytes
    work = step_work(
        config,
        passes.module("policy", config),
        plan.cycle,
        plan.memory,
        prompt_tokens=passes.shape.max_length - config.rollout.max_completion_length,
        handoff_bytes=plan.handoff.bytes_by_link,
        kv_bytes_per_token=token,
        others={tag: model for tag, model in others.items() if model is not None},
    )
    return step_time(work, rates)


def _budget(config: TrainerConfig, machine: Machine) -> Budget:
    """Return the memory that the machine of a plan has."""
    assert config.num_ranks != "auto"
    sizes: list[tuple[int | None, str]] = []
    for name, there, option in (
        ("device_memory", machine.device_memory, machine.device_option),
        ("host_memory", machine.host_memory, f"--host-memory {machine.host_memory}"),
    ):
        text = getattr(config.memory, name)
        size = None if text is None else memory_bytes(text, f"memory.{name}")
        source = "not given" if text is None else option if text == there else f"memory.{name}={text}"
        sizes.append((size, source))
    (device, device_source), (host, host_source) = sizes
    return Budget(device, host, 1, device_source, host_source, machine.gpus_per_host).for_ranks(config.num_ranks)


def _with_gpus(remedy: Remedy, config: TrainerConfig, machine: Machine) -> str:
    """Return a remedy as it is to be followed here, where the machine is given by options."""
    number = remedy.num_ranks
    if number is None or machine.num_gpus is None:
        return (
            remedy.words if machine.host_memory is None else remedy.words.replace(f"{HOST_MEMORY}=", "--host-memory ")
        )
    option = f"--gpus {number + sum(ranks_apart(config).values())}"
    return replace(remedy, note=f"{option}; {remedy.note}" if remedy.note else option).words


def _longest_prompt(config: TrainerConfig, models: RunModels) -> tuple[int, str]:
    """Return the tokens that a prompt may have, and a note if that is assumed."""
    limit = getattr(models.policy.config.get_text_config(), "max_position_embeddings", None)
    room = prompt_room(config, limit)
    max_prompt_length = config.data.max_prompt_length
    if max_prompt_length is not None:
        return max_prompt_length, ""
    tokens = PROMPT_TOKENS if room is None else min(PROMPT_TOKENS, room.num_tokens)
    return tokens, f"prompts of up to {tokens:,} tokens are assumed, because data.max_prompt_length is not given"


def _workload(config: TrainerConfig, max_length: int) -> str:
    """Return the samples of a step in a line. max_length: tokens of the longest."""
    completion = config.rollout.max_completion_length
    prompts, generations = (
        f"{number} {word}" + ("s" if number > 1 else "")
        for number, word in (
            (config.data.prompts_per_step, "prompt"),
            (config.algorithm.num_generations, "completion"),
        )
    )
    return f"{prompts} x {generations} a step, up to {max_length - completion:,} + {completion:,} tokens"


def _title(config: TrainerConfig, passes: Passes) -> str:
    """Return the run in a line."""
    policy, module = passes.shape.models.policy, passes.module("policy", config)
    size = sum(parameter.numel() for parameter in policy.parameters())
    share = trained_numel(module) / size
    adapters = f" (adapter r={config.lora.r}, {100 * share:.2g} % trained)" if config.lora.is_on else ""
    name = Path(config.model.path).name if config.model.path else type(policy).__name__
    replicas = f", {config.rollout.ranks_per_engine} to a replica" if config.rollout.ranks_per_engine > 1 else ""
    where = "GPU" if config.model.device == "cuda" else "CPU"
    ranks = f"1 rank on a {where}" if config.num_ranks == 1 else f"{config.num_ranks} ranks on {where}s"
    if number := rollout_ranks(config):
        ranks += f", and {number} that only generate{'s' if number == 1 else ''}"
    return (
        f"{name}, {count_text(size)} parameters{adapters}, {config.model.dtype}: {config.algorithm.name} with "
        f"rollout.engine={config.rollout.engine}, {ranks}{replicas}"
    )
