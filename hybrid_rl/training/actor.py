"""The actor: the policy that is trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybrid_rl.algos import Needs
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.memory.transfer import finish_downloads, start_download
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.load_balance import LoadBalance
from hybrid_rl.models.packed.router import Routers
from hybrid_rl.process import progress
from hybrid_rl.training.batch_plan import Plan, row_size, sample_rows, still_micro_batches
from hybrid_rl.training.entropy import EntropyWeight
from hybrid_rl.training.host_optimizer import HostOptimizer
from hybrid_rl.training.kl_weight import KLWeight
from hybrid_rl.training.learned import LearnedNumbers
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.mini_batch import joined_counts, look_ahead, prepared_column, with_trajectory_tokens
from hybrid_rl.training.mismatch import MismatchGuard, rollout_gap
from hybrid_rl.training.no_optimizer import NoOptimizer
from hybrid_rl.training.optimizer import Optimizer
from hybrid_rl.training.router_scores import router_columns
from hybrid_rl.training.routing_replay import RoutingReplay
from hybrid_rl.training.said import FirstWords
from hybrid_rl.training.scoring import MicroBatches, distribution_columns, old_logprobs
from hybrid_rl.training.sharding.fsdp import accumulating
from hybrid_rl.training.spec import Counts, LossSpec, MiniBatch, SideModels
from hybrid_rl.training.token_record import TokenRecord
from hybrid_rl.training.trained import TrainedModel

logger = logging.getLogger("hybrid_rl")


class Actor(TrainedModel):
    """The policy with its optimizer, and the updates of one training step."""

    def __init__(
        self,
        model: CausalLM,
        config: TrainerConfig,
        context: RankContext,
        *,
        num_optimizer_steps: int,
        reference: CausalLM | None = None,
        is_trained: bool = True,
    ) -> None:
        """is_trained: False for a policy that only generates, without an optimizer."""
        self._spec = spec = LossSpec.of(config)
        algorithm = config.algorithm
        is_on_host = config.memory.keeps_on_host("optimizer")
        optimizer = HostOptimizer if is_on_host else Optimizer if is_trained else NoOptimizer
        super().__init__(model, config, context, num_optimizer_steps=num_optimizer_steps, optimizer=optimizer)
        self._old_logprobs = algorithm.old_logprobs
        self._reads_squares = Needs.SUM_PI_SQUARED in config.advantage.needs
        self._seed = config.seed
        routers = Routers(model) if spec.reads_routers else None
        replay = algorithm.routing_replay
        self._replay = None if replay == "off" or not is_trained else RoutingReplay(model, replay)
        self._beside = SideModels(reference, routers, LoadBalance.of(model, algorithm.router_aux_loss_coef))
        self.kl_weight = KLWeight(spec.kl)
        self.entropy_weight = EntropyWeight(
            config.entropy, algorithm.entropy_coef, is_subset=spec.has_entropy_threshold
        )
        self._numbers = LearnedNumbers(spec.policy_loss, model.device)
        self._has_told = False
        self.guard: MismatchGuard | None = None  # of the tokens of each step, if they are compared
        self.said: FirstWords | None = None  # before the last update
        # What the last update found out in passing, of all its samples: columns that they do not have.
        self.trained_columns: dict[str, Jagged] = {}

    def reconfigure(self, config: TrainerConfig, num_optimizer_steps: int) -> None:
        """Go on with other numbers in the loss and the optimizer. What follows a measured number (KL, entropy) starts
        again only if it was given anew."""
        before, self._spec = self._spec, LossSpec.of(config)
        self.kl_weight.reconfigure(self._spec.kl)
        if config.algorithm.entropy_coef != before.algorithm.entropy_coef:
            self.entropy_weight.reconfigure(config.algorithm.entropy_coef)
        self.optimizer.reconfigure(config.optimizer, num_optimizer_steps)

    def record_tokens(self) -> None:
        """Keep what updates do with every token, from now on, as columns that they find out in passing."""
        self._beside = replace(self._beside, record=TokenRecord())

    def columns(self, batch: Batch, plan: Plan) -> dict[str, Jagged]:
        """Compute old_logprobs under the present weights, or take the engine's, as configured, with what the algorithm
        needs of their distribution; nothing if the update needs none."""
        micro_batches = [micro for mini in plan for micro in mini]
        num_top, routers = self._spec.num_top, self._beside.routers
        columns: dict[str, Jagged] = {}
        if self._replay is not None:
            batch = self._replay.begun(batch)
        if num_top or self._reads_squares:
            columns = distribution_columns(
                self.model, batch, micro_batches, self.halvings, num_top=num_top, wants_squares=self._reads_squares
            )
        elif routers is None and self._old_logprobs == "recompute":
            columns = old_logprobs(self.model, batch, micro_batches, self.halvings)
        if routers is not None:
            columns |= router_columns(self.model, routers, batch, micro_batches, self.halvings)
        if self._old_logprobs == "rollout":
            columns["old_logprobs"] = batch["rollout_logprobs"]
        return columns

    @torch.enable_grad()
    def update(self, batch: Batch, plan: Plan, version: int) -> MetricSums:
        """Take all optimizer steps of a training step; returns this rank's part of the metrics over all of them.
        version: of the weights before the first of them. Collective."""
        spec, sums = self._spec, MetricSums()
        if self._replay is not None:
            batch = self._replay.begun(batch)
        self.trained_columns = {}
        progress.count(self._num_iterations * len(plan), "optimizer steps", is_common=True)
        changed = start_download(self.optimizer.take_over())
        recomputed = self._old_logprobs == "recompute" and "old_logprobs" in batch
        if recomputed:
            if self.guard is not None:
                self.guard.check(batch, batch["old_logprobs"].values, version)
            sums.merge(rollout_gap(batch, batch["old_logprobs"].values, spec.correction, self._context, version))
        counts = joined_counts(batch, plan, spec, self._context)
        seed = self._seed * 1_000_003 + version * 1009
        prepared = prepared_column(batch, plan, spec, self._context, seed=seed)
        if prepared is not None:
            batch = batch.with_columns(prepared=prepared)
        batch = with_trajectory_tokens(batch, spec)
        still = [[False] * len(mini) for mini in plan]
        if spec.follows_advantages and self._beside.balance is None:
            still = still_micro_batches(batch, plan, spec.mask(batch), self._context)
        sums.merge(_forward_only(batch, plan, still))
        first: torch.Tensor | None = None  # what the weights of the rollout said of the first mini-batch
        size, record = partial(row_size, batch), self._beside.record
        for _ in range(self._num_iterations):
            for micro_batches, its_counts, are_still in zip(plan, counts, still, strict=True):
                for attempt in self.halvings.attempts(micro_batches, size):
                    with attempt as cut:
                        parts = [rows for _, rows in cut]
                        mini = self._mini_batch(batch, parts, its_counts, version)
                        step, losses, before = MetricSums(), [], []
                        if record is not None:
                            record.begin()
                        for (micro, is_last), (place, part) in zip(self._cut(batch, parts), cut, strict=True):
                            is_still = are_still[place]
                            with accumulating(self.model, is_last=is_last), torch.set_grad_enabled(not is_still):
                                loss, stats, said = micro_batch_loss(self.model, micro, spec, mini, self._beside)
                                if not is_still:
                                    loss.backward()  # type: ignore[no-untyped-call]
                            if not is_still:
                                self.optimizer.accumulate()
                            if record is not None:
                                record.take(part)
                            step.merge(stats)
                            losses.append(loss.detach())
                            before += [said.float()] if part else []
                if record is not None:
                    record.keep(batch["completion_ids"])
                if first is None:
                    first = start_download(torch.cat([torch.zeros(2, 0, device=self.model.device), *before], dim=1))
                    if self.guard is not None and not recomputed:
                        finish_downloads(self.model.device)
                        self.guard.check(batch.select(sample_rows(plan[0])), first[0], version)
                updated, common = self._take_step(batch, micro_batches, losses, prefix="", loss="loss")
                self._numbers.step(self._context, is_valid=updated and its_counts.num_tokens > 0)
                sums.merge(self._step_metrics(step, common))
        if self._replay is not None:
            sums.merge(self._replay.take_metrics())
        self._read(sums)
        self._tell_changed(changed)
        if record is not None:
            self.trained_columns |= record.columns(batch["completion_ids"])
        if first is not None:
            rows = sample_rows(plan[0])
            its_batch = batch.select(rows)
            self.said = FirstWords.of(its_batch, first)
            if not recomputed:
                sums.merge(rollout_gap(its_batch, first[0], spec.correction, self._context, version))
            if len(plan) == 1 and "old_logprobs" not in batch:
                self.trained_columns["old_logprobs"] = _in_order(batch["completion_ids"], rows, first[0])
        if "teacher_logprobs" in batch:
            on = batch["completion_mask"].values
            gap = (batch["old_logprobs"].values - batch["teacher_logprobs"].values)[on]
            sums.mean("teacher_kl", float(gap.double().sum()), len(gap))
        sums.merge(self.kl_weight.follow(batch, sums, self._context))
        return sums

    def _mini_batch(self, batch: Batch, micro_batches: MicroBatches, counts: Counts, version: int) -> MiniBatch:
        """Find what the losses of micro-batches need to know of their mini-batch before the first backward pass."""
        self._numbers.clear()
        mini = MiniBatch(counts, version, self.kl_weight.beta, self.entropy_weight.applied, self._numbers.on_device)
        if len(micro_batches) <= 1 and self._context.num_data_ranks == 1:
            return mini
        balance = self._beside.balance
        return look_ahead(
            self.model, batch, micro_batches, self._spec, mini, balance, self._context, halvings=self.halvings
        )

    def _step_metrics(self, step: MetricSums, common: MetricSums) -> MetricSums:
        """Join the metrics of one optimizer step. step: of its micro-batches; common: of every model that learns."""
        step.merge(common)
        once = int(self._context.data_rank == 0)
        if self._beside.balance is not None:
            step.mean("aux_loss", 0.0, once)
        if once:
            step.merge(self._numbers.metrics())
        step.merge(self.entropy_weight.follow(step, self._context))
        return step

    def _tell_changed(self, changed: torch.Tensor) -> None:
        """Warn once of weights that a user has loaded into the module since the last step: bool [P], which."""
        names = [name for name, is_changed in zip(self.optimizer.names, changed.tolist(), strict=False) if is_changed]
        if names and not self._has_told:
            logger.warning(
                "%d of %d parameters were changed by hand since the last update (first %s): training continues from "
                "their values, with the optimizer's moments as they are (said once)",
                *(len(names), len(self.optimizer.names), names[0]),
            )
            self._has_told = True

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of the optimizer, and what the algorithm has learned besides the model."""
        own = self.kl_weight.state_dict() | self._numbers.state_dict() | self.entropy_weight.state_dict()
        return super().optimizer_state() | {"algorithm": own}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self.kl_weight.load_state_dict(state["algorithm"])
        self.entropy_weight.load_state_dict(state["algorithm"])
        self._numbers.load_state_dict(state["algorithm"])


def _forward_only(batch: Batch, plan: Plan, still: Sequence[Sequence[bool]]) -> MetricSums:
    """Return which share of the completion tokens an update computes without a backward pass."""
    lengths, sums = batch["completion_ids"].lengths, MetricSums()
    for mini, flags in zip(plan, still, strict=True):
        for rows, is_still in zip(mini, flags, strict=True):
            num_tokens = int(lengths[rows].sum()) if rows else 0
            sums.mean("perf/forward_only_share", num_tokens * is_still, num_tokens)
    return sums


def _in_order(completions: Jagged, rows: torch.Tensor, values: torch.Tensor) -> Jagged:
    """Return a float32 column from the values of the tokens of samples in the order `rows`, int64 [N]."""
    place = completions.with_values(torch.arange(len(completions.values))).select(rows).values
    column = torch.zeros(len(completions.values))
    column[place] = values.float().cpu()
    return completions.with_values(column)
