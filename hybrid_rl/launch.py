"""Starting the workers of a run: in this process, or one process per rank."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from hybrid_rl.assembly import Run
from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.config import RayControllerConfig
from hybrid_rl.controller import LocalBackend, RankMesh, WorkerGroup
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.errors import ConfigError
from hybrid_rl.models.weights.recipe import ModelRecipe
from hybrid_rl.models.weights.sources import blocks_of
from hybrid_rl.workers import HybridWorker, ReferenceWorker, WorkerSetup
from hybrid_rl.workers.balance import attention_pair_cost, split_over_ranks


class Workers(NamedTuple):
    """The worker groups of a run. reference: None where the policy's ranks hold the reference, or there is none."""

    policy: WorkerGroup
    reference: WorkerGroup | None

    def score(self, batch: Batch | BatchRef, step: int) -> Batch | BatchRef:
        """Add the logprobs that the algorithm needs."""
        batch = self.policy.score(batch, step)
        return batch if self.reference is None else self.reference.score(batch, step)


def start_workers(run: Run, log_folder: Path, closing: contextlib.ExitStack) -> Workers:
    """Start the ranks of a run. log_folder: where ranks in other processes write their logs; closing: gets what ends
    them.

    Raises ConfigError where they cannot run here, and what a rank raised while it made its worker.
    """
    setup = WorkerSetup(
        model=run.choice.module or run.choice.recipe(run.config),
        tokenizer=run.choice.tokenizer,
        rewards=run.rewards,
        config=run.config,
        num_optimizer_steps=run.num_optimizer_steps,
        max_length=run.max_length,
        probe_ids=run.data.probe_ids,
    )
    if isinstance(run.config.controller, RayControllerConfig):
        return _start_on_ray(run, setup, log_folder, closing)
    # A module of this process is trained in place; a named one is loaded here.
    setup = replace(setup, model=run.choice.load(run.config))
    policy = WorkerGroup(HybridWorker, LocalBackend("policy", partial(HybridWorker, setup)))
    closing.callback(policy.close)
    return Workers(policy, None)


def _start_on_ray(run: Run, setup: WorkerSetup, log_folder: Path, closing: contextlib.ExitStack) -> Workers:
    try:
        from hybrid_rl.controller.ray_backend import RayBackend, RayCluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"num_ranks={run.config.num_ranks} and controller.backend=ray need Ray, which is not installed: "
            f"pip install ray"
        ) from error
    config, controller = run.config, run.config.controller
    assert isinstance(controller, RayControllerConfig)
    cluster = RayCluster(controller.address)
    closing.callback(cluster.close)
    if not isinstance(setup.model, ModelRecipe):
        # A live module goes once into the object store, from which each rank reads its part.
        source = blocks_of(setup.model, cluster.put)
        setup = replace(setup, model=ModelRecipe.of_module(setup.model, source))

    def start(role: str, worker: Any, num_ranks: int, dp_replicate: int) -> WorkerGroup:
        backend = RayBackend(
            role,
            partial(worker, setup),
            mesh=RankMesh({"dp_replicate": dp_replicate, "dp_shard": num_ranks // dp_replicate}),
            splitter=partial(split_over_ranks, pair_cost=attention_cost(run.skeleton)),
            cluster=cluster,
            options=options,
            log_folder=log_folder / "logs",
        )
        group = WorkerGroup(worker, backend)
        closing.callback(group.close)
        return group

    options = ray_options(controller)
    policy = start("policy", HybridWorker, config.num_ranks, config.fsdp.dp_replicate)
    reference = None
    if setup.needs_reference and controller.reference_ranks:
        reference = start("reference", ReferenceWorker, controller.reference_ranks, 1)
    return Workers(policy, reference)


def ray_options(controller: RayControllerConfig) -> RayOptions:
    """How the configuration places and watches ranks."""
    return RayOptions(
        placement=controller.placement,
        cpus_per_rank=float(controller.cpus_per_rank or 1),
        gpus_per_rank={"auto": None, "cpu": 0, "cuda": 1}[controller.device],
        threads_per_rank=controller.cpus_per_rank,
        env_vars={name: str(value) for name, value in controller.env_vars.items()},
        start_seconds=controller.start_timeout_seconds,
        watchdog_seconds=controller.watchdog_seconds,
    )


def attention_cost(skeleton: PreTrainedModel) -> float:
    """`attention_pair_cost` of a model. Experts count in full, as if a token visited all."""
    config = skeleton.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    embedding, head = skeleton.get_input_embeddings().weight, skeleton.get_output_embeddings().weight
    if embedding is not head:
        num_parameters -= embedding.numel()
    return attention_pair_cost(config.num_hidden_layers, config.num_attention_heads * head_dim, num_parameters)
