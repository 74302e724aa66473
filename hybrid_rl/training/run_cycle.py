"""The residents and the cycle of a run, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rl.algos import KLInLoss, KLInReward, Needs
from hybrid_rl.config import TrainerConfig, ValueHeadConfig
from hybrid_rl.config.algorithm import has_reference_model, is_rounded, reference_is_policy, reference_ranks
from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.cycle import (
    ACTOR,
    CRITIC,
    CRITIC_OPTIMIZER,
    ENGINE_WEIGHTS,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    RESIDENTS,
    REWARD_MODELS,
    TEACHER,
    Cycle,
    cycle_table,
)
from hybrid_rl.training.spec import LossSpec


@dataclass(frozen=True)
class MemoryPhases:
    """What a rank of the policy holds, and when. residents: tags of all of it. offload: of what goes to host memory.
    movable: of what is in memory only in phases that need it; the rest is always there."""

    cycle: Cycle
    residents: frozenset[str]
    offload: frozenset[str]
    movable: frozenset[str]

    def table(self) -> str:
        """Return the table of the cycle."""
        return cycle_table(self.cycle, self.residents, self.movable)

    @property
    def notes(self) -> list[str]:
        """What to say before a run: the table, if anything of it is to leave memory."""
        return [f"memory in the phases of a step:\n{self.table()}"] if self.offload else []


def memory_phases(
    config: TrainerConfig, *, has_reward_models: bool, trains: bool = True, generates: bool = True
) -> MemoryPhases:
    """Return the residents and the cycle of a resolved configuration. has_reward_models: whether models are among the
    reward functions. trains, generates: whether these ranks do; with rollout_ranks, each does one of both.

    Raises ConfigError if memory.offload names what the run does not have, or what cannot leave.
    """
    is_embedded = config.rollout.placement == "embedded"
    is_actor = is_embedded and config.num_ranks == 1
    adopts = config.rollout.handoff.adopt_weights
    engine_is_actor = generates and (adopts or is_actor)
    has = {
        ACTOR: trains or is_embedded,
        OPTIMIZER: trains,
        REFERENCE: has_reference_model(config),
        TEACHER: Needs.TEACHER_LOGPROBS in config.advantage.needs,
        CRITIC: isinstance(config.critic, ValueHeadConfig),
        CRITIC_OPTIMIZER: isinstance(config.critic, ValueHeadConfig),
        REWARD_MODELS: has_reward_models,
        ENGINE_WEIGHTS: generates and (not is_actor or is_rounded(config.rollout)),
        KV_CACHE: generates,
    }
    residents = frozenset(tag for tag, is_there in has.items() if is_there)
    offload = frozenset(config.memory.offload or ())
    _check(config, residents, offload, engine_is_actor=engine_is_actor)
    kl, spec = config.kl, LossSpec.of(config)
    cycle = Cycle.of(
        residents=residents,
        engine_is_actor=engine_is_actor,
        update_reads_reference=spec.is_exact_kl,
        moves_reference=isinstance(kl, (KLInLoss, KLInReward)) and bool(kl.moves_reference),
        scores_actor=scores_actor(config, spec),
        rewards_beside_engine=REWARD_MODELS not in offload,
        reference_is_actor=reference_is_policy(config),
    ).of_ranks(trains=trains, generates=generates)
    engine = frozenset({ENGINE_WEIGHTS, KV_CACHE}) & residents
    # vLLM sleeps on GPUs only, and for others that need the room; adopted memory is the trainer's.
    engine_stays = adopts or (config.rollout.engine == "vllm" and (config.model.device == "cpu" or not trains))
    if engine_stays:
        engine = frozenset()
    elif is_rounded(config.rollout):
        engine -= {ENGINE_WEIGHTS}
    return MemoryPhases(cycle, residents, offload, offload | engine)


def scores_actor(config: TrainerConfig, spec: LossSpec) -> bool:
    """Return whether the policy computes anything of a batch before the advantages (`Actor.columns`)."""
    needs_distribution = spec.num_top or Needs.SUM_PI_SQUARED in config.advantage.needs
    return bool(needs_distribution or spec.reads_routers or config.algorithm.old_logprobs == "recompute")


def _check(config: TrainerConfig, residents: frozenset[str], offload: frozenset[str], *, engine_is_actor: bool) -> None:
    """Raise ConfigError unless all of offload can leave."""
    missing = [tag for tag in RESIDENTS if tag in offload - residents]
    if missing:
        stays = {ENGINE_WEIGHTS, KV_CACHE} | ({ACTOR} if engine_is_actor else set())
        stays |= {OPTIMIZER} if config.memory.keeps_on_host("optimizer") else set()
        movable = ", ".join(tag for tag in RESIDENTS if tag in residents - stays)
        without = "; ".join(f"this run has no {tag} ({_why_not(config, tag)})" for tag in missing)
        raise ConfigError(f"{without}; memory.offload can name {movable or 'nothing'}")
    if ACTOR in offload and engine_is_actor:
        is_embedded = config.rollout.placement == "embedded"
        engine = f"engine={config.rollout.engine}" if is_embedded else "handoff.adopt_weights=true"
        raise ConfigError(
            f"memory.offload names actor, but with rollout.{engine} on one rank the engine generates from the actor's "
            "own memory, which cannot leave; take actor out"
        )


def _why_not(config: TrainerConfig, tag: str) -> str:
    """Return why the ranks of the policy do not hold this resident."""
    if tag == REFERENCE and (count := reference_ranks(config)):
        return f"controller.reference_ranks={count} puts it on ranks of its own"
    return {
        REFERENCE: "beta=0",
        TEACHER: "algorithm=distillation has one",
        CRITIC: "algorithm=ppo, vapo and impala have one",
        CRITIC_OPTIMIZER: "algorithm=ppo, vapo and impala have one",
        REWARD_MODELS: "all its rewards are functions",
    }[tag]
