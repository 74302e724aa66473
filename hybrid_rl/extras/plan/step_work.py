"""The work of a training step, read from a run's config, its models and its memory plan."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from hybrid_rl.algos import Needs
from hybrid_rl.config import TrainerConfig, ValueHeadConfig, optimizer_steps_per_training_step
from hybrid_rl.config.algorithm import learns_from_demonstrations, needs_reference, reference_ranks
from hybrid_rl.extras.plan.step_time import Generation, Lengths, ModelWork, StepWork
from hybrid_rl.memory.cycle import CRITIC, KV_CACHE, REFERENCE, TEACHER, Cycle
from hybrid_rl.models.lora.model_weights import weights_of
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.planning.ledger import MemoryPlan

POLICY = "policy"
UNUSUAL = frozenset({"check", "save"})  # phases that most steps do without


def num_trips(cycle: Cycle, tag: str) -> int:
    """Count how often a resident that may sleep is put to sleep, and woken again, in a step."""
    phases = [phase for phase in cycle if phase.is_taken and phase.name not in UNUSUAL]
    return sum(
        tag in phase.tags and tag not in after.tags
        for phase, after in zip(phases, [*phases[1:], *phases[:1]], strict=True)
    )


def moved_bytes(cycle: Cycle, memory: MemoryPlan) -> int:
    """Return the bytes of a rank that go to the host and come back in a step, each way counted."""
    return sum(2 * num_trips(cycle, tag) * memory.resident_bytes(tag) for tag in memory.choices.offload)


def step_work(
    config: TrainerConfig,
    policy: PreTrainedModel,
    cycle: Cycle,
    memory: MemoryPlan,
    *,
    prompt_tokens: int,
    handoff_bytes: Mapping[str, int] | None,
    kv_bytes_per_token: int,
    others: Mapping[str, PreTrainedModel],
) -> StepWork:
    """Return the work of a step of a resolved config.

    policy: with its adapters, may be on meta. prompt_tokens: of the longest prompt. kv_bytes_per_token: of the whole
    model. others: teacher and critic, by tag, if the run has them.
    """
    assert config.num_ranks != "auto"
    work = ModelWork.of(policy)
    num_shards = config.num_ranks // config.fsdp.dp_replicate

    def trained(module: PreTrainedModel) -> int:
        return sum(p.numel() for p in module.parameters() if p.requires_grad) // num_shards

    scored = {POLICY: work} if config.algorithm.old_logprobs == "recompute" else {}
    if needs_reference(config) and not reference_ranks(config):
        scored[REFERENCE] = work
    if Needs.TEACHER_LOGPROBS in config.advantage.needs:
        scored[TEACHER] = ModelWork.of(others[TEACHER])
    learners, modules = {POLICY: (work, trained(policy))}, {POLICY: policy, **others}
    if isinstance(config.critic, ValueHeadConfig):
        critic = others[CRITIC]
        scored[CRITIC] = ModelWork.of(critic).without_head()
        learners[CRITIC] = (scored[CRITIC], trained(critic))
    on_host = {POLICY} if memory.choices.optimizer_on_host else set()
    if config.memory.keeps_on_host("shards"):
        on_host = set(learners)
    return StepWork(
        num_ranks=config.num_ranks,
        ranks_per_host=memory.budget.ranks_per_host,
        lengths=_lengths(config, prompt_tokens),
        policy=work,
        generation=_generation(config, memory, kv_bytes_per_token),
        scored=scored,
        trained={} if config.mode == "rollout" else learners,
        frozen=frozenset(name for name, module in modules.items() if weights_of(module).is_frozen),
        passes=config.algorithm.num_iterations,
        forward_passes=2 if config.model.gradient_checkpointing else 1,
        optimizer_steps=optimizer_steps_per_training_step(config),
        host_optimizers=frozenset(on_host),
        handoff_bytes=handoff_bytes,
        moved_bytes=moved_bytes(cycle, memory),
    )


def _lengths(config: TrainerConfig, prompt_tokens: int) -> Lengths:
    return Lengths(
        config.data.prompts_per_step,
        config.algorithm.num_generations,
        prompt_tokens,
        config.rollout.max_completion_length,
        is_shared=config.is_packed,
    )


def _generation(config: TrainerConfig, memory: MemoryPlan, kv_bytes_per_token: int) -> Generation | None:
    """Return how a step generates; None if its samples are given."""
    if learns_from_demonstrations(config) or config.mode == "train":
        return None
    size = config.rollout.ranks_per_engine
    cache = memory.resident_bytes(KV_CACHE) * size if KV_CACHE in memory.residents else 0
    has_baseline = Needs.BASELINE_REWARDS in config.advantage.needs
    return Generation(
        size,
        config.rollout.max_num_seqs,
        cache // kv_bytes_per_token if cache else None,
        kv_bytes_per_token,
        DTYPES[config.model.dtype].itemsize,
        extra_samples=config.data.prompts_per_step if has_baseline else 0,
        is_shared=getattr(config.rollout.engine_args, "enable_prefix_caching", False),
    )
