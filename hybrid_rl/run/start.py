"""Start of a run's workers: in this process, or one process per rank."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_rl.agents.turn_record import TurnFiles
from hybrid_rl.algos import Needs
from hybrid_rl.checkpoint.base_model import base_record
from hybrid_rl.config import FSDPConfig, RayControllerConfig, TrainerConfig
from hybrid_rl.config.algorithm import critic_path, ranks_apart, rollout_ranks, steps_ahead, teacher_path
from hybrid_rl.config.buffer_keys import HeldConfig
from hybrid_rl.config.validate import prompts_begun
from hybrid_rl.controller import Backend, LocalBackend, RankContext, RankMesh
from hybrid_rl.controller.exchange import Splitter
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.controller.remote import RemoteBackend
from hybrid_rl.controller.session import shared_memory, temporary_folder
from hybrid_rl.data.mixture import sampler_of
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.data.source import SizedSource
from hybrid_rl.errors import REPORT_EXTRA, ConfigError, counted
from hybrid_rl.logging.progress_display import ProgressDisplay
from hybrid_rl.models import load_model
from hybrid_rl.models.lora.model_weights import weights_of
from hybrid_rl.models.packed.likeness import fingerprint
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.process.hooks import extra
from hybrid_rl.rollout.collector import Collector, StepPlan
from hybrid_rl.rollout.hold_rule import HoldRule
from hybrid_rl.run.prepare import Run
from hybrid_rl.training.balance import TokenCost, attention_pair_cost, split_over_ranks
from hybrid_rl.workers.apart import RolloutGroup, RolloutWorker, rollout_setup, training_setup
from hybrid_rl.workers.groups import GeneratingGroup, HybridGroup, PolicyGroup, ReferenceGroup
from hybrid_rl.workers.hybrid import HybridWorker
from hybrid_rl.workers.preflight import preflight
from hybrid_rl.workers.reference import ReferenceWorker
from hybrid_rl.workers.setup import WorkerSetup


def start_workers(
    run: Run,
    log_folder: Path,
    closing: contextlib.ExitStack,
    *,
    is_trained: bool = True,
    turn_files: TurnFiles | None = None,
) -> tuple[PolicyGroup, GeneratingGroup]:
    """Start the ranks of a run. Returns those that train and those that generate, which may be the same.

    log_folder: where ranks in other processes write their logs.
    closing: ends them when it is closed.
    is_trained: False for ranks that only generate, which have no optimizer.
    turn_files: where turns of agents that have ended are written; None = nowhere.

    Raises ConfigError if they cannot run here, and whatever a rank raised while it made its worker.
    """
    setup = WorkerSetup(
        model=run.choice.module or run.choice.recipe(run.config),
        tokenizer=run.choice.tokenizer,
        rewards=run.rewards,
        config=run.config,
        num_optimizer_steps=run.num_optimizer_steps,
        num_critic_steps=run.num_critic_steps,
        max_length=run.max_length,
        probe_ids=run.data.probe_ids,
        first_prompt=run.data.first.prompt,
        teacher=_recipe(teacher_path(run.config), run.config),
        expected=None if run.plan is None else run.plan.expected(),
        agents=run.agents,
        is_trained=is_trained,
        turn_files=turn_files,
        # On one rank too: its head is not that of a language model.
        critic=_recipe(critic_path(run.config), run.config),
    )
    if isinstance(run.config.controller, RayControllerConfig):
        if run.agents is not None:
            run.agents.close()  # ranks make their own environments
        policy, generating = _start_on_ray(run, setup, log_folder, closing)
    else:
        # A module of this process is trained in place; a named one is loaded here. All other models go to its device.
        module = run.choice.load(run.config, local_device(run.config.model.device))
        device, teacher = module.device, _loaded(teacher_path(run.config), run.config, module.device)
        make_worker = partial(HybridWorker, replace(setup, model=module, teacher=teacher))
        policy = generating = HybridGroup(LocalBackend("policy", make_worker, device), has_scores=setup.has_scores)
        closing.callback(generating.close)
    if run.choice.adapter is not None and (record := base_record(run.choice.adapter)) is not None:
        policy.check_base(record, f"the adapter {run.choice.adapter}")
    return policy, generating


def starting(display: ProgressDisplay, config: TrainerConfig, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Show inside the block that a run starts, and with what it is busy. folder: of the run."""
    if isinstance(config.controller, RayControllerConfig):
        hint = f"each imports PyTorch and transformers and loads its part of the model; {folder / 'logs'}"
        assert config.num_ranks != "auto"
        number = counted(config.num_ranks + sum(ranks_apart(config).values()), "rank")
        return display.starting(f"starting {number}", hint, is_long=True)
    return display.starting("starting", is_long=config.rollout.library is not None)


def local_device(kind: str) -> torch.device:
    """Return the device of a rank in this process for a resolved `model.device`: the CPU, or the current GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def _recipe(path: str | None, config: TrainerConfig) -> ModelRecipe | None:
    """Return the recipe with which ranks build a frozen model that is named by path."""
    return None if path is None else ModelRecipe.of_folder(path, trust_remote_code=config.model.trust_remote_code)


def _loaded(path: str | None, config: TrainerConfig, device: torch.device) -> PreTrainedModel | None:
    """Load a frozen model that is named by path in this process."""
    if path is None:
        return None
    settings = config.model
    module = load_model(path, dtype=settings.dtype, device=device, trust_remote_code=settings.trust_remote_code)
    return module.requires_grad_(False)


def _start_on_ray(
    run: Run, setup: WorkerSetup, log_folder: Path, closing: contextlib.ExitStack
) -> tuple[PolicyGroup, GeneratingGroup]:
    config, controller = run.config, run.config.controller
    assert isinstance(controller, RayControllerConfig) and config.num_ranks != "auto"
    ray = RayRanks(config, log_folder / "logs", closing)
    if not isinstance(setup.model, ModelRecipe):
        # A live module goes once into the object store, from which each rank reads its part.
        module = setup.model
        recipe = weights_of(module).shared(ray.cluster.put)
        setup = replace(setup, model=recipe, fingerprint=fingerprint(module))
    splitter = partial(split_over_ranks, pair_cost=token_cost(run.skeleton).pair_cost)
    generates_apart = bool(controller.rollout_ranks) and setup.is_trained
    trained = training_setup(setup) if generates_apart else setup
    ranks = ray.start("policy", partial(HybridWorker, trained), config.num_ranks, splitter, config.fsdp)
    reference = None
    if setup.needs_reference and controller.reference_ranks:
        make_worker = partial(ReferenceWorker, setup)
        reference = ReferenceGroup(ray.start("reference", make_worker, controller.reference_ranks, splitter))
        closing.callback(reference.close)
    policy: PolicyGroup
    generating: GeneratingGroup
    if generates_apart:
        root = closing.enter_context(temporary_folder("hrl-weights-", shared_memory()))
        others = ray.start("rollout", partial(RolloutWorker, rollout_setup(setup)), controller.rollout_ranks, splitter)
        apart = RolloutGroup(others, ranks, reference, has_scores=setup.has_scores, root=root)
        policy, generating = apart.policy, apart
    else:
        policy = generating = HybridGroup(ranks, reference, has_scores=setup.has_scores)
    closing.callback(policy.close)
    for group in dict.fromkeys((policy, reference, generating)):
        if group is not None and group.num_ranks > 1:
            preflight(group.probe_rank)
    return policy, generating


def make_sampler(run: Run) -> PromptSampler:
    """Make the sampler of the training data. Raises ConfigError or DataError for options that the data cannot use."""
    data = run.config.data
    return sampler_of(
        run.data.train,
        shuffle=data.shuffle,
        seed=run.config.seed,
        weights=data.dataset_weights,
        floor=data.curriculum_floor,
    )


def notes_of(run: Run) -> list[str]:
    """Return what to say before a run: how much of the model is trained if that is not all of it, how the data is read,
    that there will be no pictures, and whether the last prompts of its epochs are never used."""
    source, config = run.data.train, run.config
    notes = [*([] if run.adapters is None else [str(run.adapters)]), *run.data.notes]
    if not extra("can_draw")():
        notes.append(f"no curves.png and memory.png, for matplotlib is not installed: {REPORT_EXTRA}")
    if not isinstance(source, SizedSource) or type(make_sampler(run)) is not PromptSampler:
        return notes
    num_unused = len(source) - run.max_steps * prompts_begun(config)
    if config.max_steps is not None or config.algorithm.max_refills or num_unused <= 0:
        return notes
    return [
        *notes,
        f"{num_unused:,} of {len(source):,} prompts are never used: num_train_epochs={config.num_train_epochs:g} makes "
        f"{counted(run.max_steps, 'step')} of prompts_per_step={config.data.prompts_per_step}; raise num_train_epochs "
        "or max_steps, or lower prompts_per_step",
    ]


def make_collector(run: Run, generating: GeneratingGroup, sampler: PromptSampler) -> Collector:
    """Make the collector of a run."""
    config, rewards, needs = run.config, run.config.rewards, run.config.advantage.needs
    entries = run.rewards.entries
    plan = StepPlan(
        sampler,
        config.data.prompts_per_step,
        config.algorithm.num_generations,
        run.train_params,
        max_refills=config.algorithm.max_refills,
        greedy_baseline=Needs.BASELINE_REWARDS in needs,
        replays_experts=config.algorithm.routing_replay == "rollout",
        rollouts_path=None if config.rollouts_path is None else Path(config.rollouts_path),
        demonstrates=Needs.DEMONSTRATIONS in needs,
    )
    return Collector(
        generating,
        entries.names,
        _holding(plan, config),
        max_failure_share=rewards.max_reward_failure_share,
        reward_weights=run.rewards.weights(rewards.reward_weights),
        shaping=entries.shaping,
        success=run.success,
    )


def _holding(plan: StepPlan, config: TrainerConfig) -> StepPlan:
    """Return a plan that says which groups a step delivers, and which it holds."""
    buffer = config.buffer
    if not isinstance(buffer, HeldConfig):
        return plan
    size = config.data.prompts_per_step
    ahead = size * steps_ahead(config)
    drops = buffer.unfinished == "drop"
    later = ahead if rollout_ranks(config) else 0  # those generate what is ahead when they have delivered the batch
    rule = HoldRule(size, buffer.max_staleness or 0, ahead - later, buffer.buffer_order, drops=drops)
    return replace(plan, hold=rule, num_extra=ahead + (buffer.oversample or 0), num_later=later)


class RayRanks:
    """Starts worker groups on Ray, all on one cluster.

    config: with device and num_ranks resolved; log_folder: of the ranks' logs; closing: ends them when it is closed.

    Raises ConfigError if Ray is not installed or the cluster cannot be reached.
    """

    def __init__(self, config: TrainerConfig, log_folder: Path, closing: contextlib.ExitStack) -> None:
        assert isinstance(config.controller, RayControllerConfig)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                f"num_ranks={config.num_ranks} and controller.backend=ray need Ray, which is not installed: "
                f"pip install ray"
            )
        from hybrid_rl.controller.ray_backend import RayCluster

        ray = config.controller.ray
        self._options = RayOptions(
            placement=ray.placement,
            cpus_per_rank=float(ray.cpus_per_rank or 1),
            gpus_per_rank=int(config.model.device == "cuda"),
            threads_per_rank=ray.cpus_per_rank,
            env_vars={name: str(value) for name, value in ray.env_vars.items()},
            start_seconds=ray.start_timeout_seconds,
            watchdog_seconds=ray.watchdog_seconds,
        )
        self._log_folder = log_folder
        self._closing = closing
        self.cluster = RayCluster(config.controller.address)
        closing.callback(self.cluster.close)

    def start(
        self,
        role: str,
        make_worker: Callable[[RankContext], Any],
        num_ranks: int,
        splitter: Splitter,
        fsdp: FSDPConfig | None = None,
    ) -> Backend:
        """Start the ranks of a group. fsdp: of a sharded model; without it all ranks are shards of one copy."""
        from hybrid_rl.controller.ray_backend import RayActors

        dp_replicate = fsdp.dp_replicate if fsdp else 1
        backend = RemoteBackend(
            role,
            make_worker,
            mesh=RankMesh(dp_replicate, num_ranks // dp_replicate),
            splitter=splitter,
            ranks=RayActors(self.cluster),
            options=self._options,
            log_folder=self._log_folder,
        )
        self._closing.callback(backend.close)
        return backend


def token_cost(skeleton: PreTrainedModel) -> TokenCost:
    """Return what a model computes for a token. Experts count in full, as if every token visited all of them."""
    config = skeleton.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    embedding: Any = skeleton.get_input_embeddings()
    head: Any = skeleton.get_output_embeddings()
    if embedding.weight is not head.weight:
        num_parameters -= embedding.weight.numel()
    width = config.num_attention_heads * head_dim
    return TokenCost(num_parameters, attention_pair_cost(config.num_hidden_layers, width, num_parameters))
