"""Ranks that only generate, beside ranks that train: each side works while the other one does.

Weights travel through a folder in shared memory, into which the training ranks write every version and from which the
others read and verify it (`policy_versions.py`). While a step trains, a batch is generated for one of the next steps:
the next one, or with a larger async_level one after it. A step ends when both are done, so no side gets further ahead.
AReaL (arXiv:2505.24298, section 4.1) breaks generation off in the same way when new weights come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from hybrid_rl.batch import AnyBatch
from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import is_rounded
from hybrid_rl.config.rollout_ranks import rollout_config
from hybrid_rl.controller import Backend, RankContext, dispatch, result_of
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.memory.cycle import ACTOR
from hybrid_rl.metrics.metric_sums import MetricSums, joined, largest, now
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.process import progress
from hybrid_rl.process.interrupts import request_interrupt
from hybrid_rl.resharding.handoff.disk import version_folder
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.counters import use_metrics
from hybrid_rl.training.run_cycle import memory_phases
from hybrid_rl.training.sharding.build import policy_on_meta
from hybrid_rl.workers.generating import GeneratingWorker, load_policy
from hybrid_rl.workers.groups import GeneratingGroup, PolicyGroup, ReferenceGroup
from hybrid_rl.workers.policy_versions import PolicyReader, fill, require_folder
from hybrid_rl.workers.rollout_side import EmbeddedSide, FilesSide, RolloutSide, RoundedSide
from hybrid_rl.workers.setup import RewardSetup, WorkerSetup
from hybrid_rl.workers.trainer_memory import TrainerMemory

STOP = "stop"  # a file beside the versions: the run ends, and nobody waits for what is being generated


def training_setup(setup: WorkerSetup) -> WorkerSetup:
    """Return the arguments of ranks that only train: without an engine, and without tools and environments."""
    return replace(setup, generates=False, agents=None)


def rollout_setup(setup: WorkerSetup) -> WorkerSetup:
    """Return the arguments of the ranks that only generate beside them."""
    config = rollout_config(setup.config)
    return replace(setup, config=config, teacher=None, critic=None, expected=None, is_trained=False)


class RolloutWorker(GeneratingWorker):
    """A rank that only generates, with weights that training ranks have written. An embedded engine decodes from a copy
    of the policy; any other reads them itself, and there is no policy on this rank."""

    _taken: Mapping[str, float] = MappingProxyType({})  # metrics of the last handoff
    _root: Path | None = None
    _reader: PolicyReader

    def __init__(self, setup: WorkerSetup, context: RankContext) -> None:
        super().__init__(setup, context)
        config, memory = setup.config, TrainerMemory(setup.config, context)
        self._is_embedded = config.rollout.placement == "embedded"
        self._cycle = memory_phases(config, has_reward_models=False, trains=False).cycle
        if self._is_embedded:
            self._model = load_policy(setup, context)
            self.hold(memory.models(ACTOR, [self._model]))
        else:
            assert isinstance(setup.model, ModelRecipe), "ranks on Ray build their models"
            self._model = policy_on_meta(setup.model, config)
            self._model.check_length(setup.max_length)
        with self.lease(frozenset({ACTOR} if self._is_embedded else ())), progress.doing("building the engine"):
            embedded = RoundedSide if is_rounded(config.rollout) else EmbeddedSide
            side: RolloutSide = (embedded if self._is_embedded else FilesSide)(setup, self._model, context)
        self._generate_with(setup, side, memory, self._model)

    @dispatch(collect="all")
    def take_weights(self, root: Path, version: int) -> dict[str, float]:
        """Take a version of the weights from the folder of all versions, unless it is there already, and give it to the
        engine. Returns metrics. Raises HandoffError for files that differ from what was written."""
        if self._version != version:
            self._take(root, version)
        return dict(self._taken)

    @dispatch(collect="all")
    def update_weights_again(self, version: int) -> dict[str, float]:
        """Take a version once more that the engine already holds, if its weights were changed by somebody else."""
        assert self._root is not None, "it was taken before"
        self._invalidate()
        self._take(self._root, version)
        return dict(self._taken)

    def _take(self, root: Path, version: int) -> None:
        require_folder(root)
        context, start = self._context, now()
        if self._root != root:
            share: Any = {"reader": context.rank, "num_readers": context.num_ranks, "gather": context.gather}
            self._reader, self._root = PolicyReader(root, self._model.dtype, **share), root
        self._version = None
        with self._reader.read(version) as (source, changes):
            num_bytes = 0
            if isinstance(self._side, FilesSide):
                self._side.give(source, changes)
            else:
                with self.lease(frozenset({ACTOR})):
                    num_bytes = fill(self._model, source)
            seconds = now() - start
            metrics = self.update_weights(version)
        metrics["timing/handoff"] += seconds
        self._taken = metrics | ({"handoff/bytes": float(num_bytes)} if num_bytes else {})

    def _expected(self, version: int) -> Tensor | None:
        return self._reader.probe

    @dispatch(split="items", collect="all")
    def go_ahead(
        self, tasks: list[RolloutTask], call: RolloutCall, root: Path
    ) -> tuple[MetricSums, list[SlotUse], float]:
        """Generate what the next steps need, beginning with this rank's prompts. If a newer version is written
        meanwhile and completions may be held, they are broken off and go on with that one. Returns metrics, how full
        the engine was with the weights of each version, and seconds."""
        start, learner, uses = now(), call.version + 1, list[SlotUse]()
        breaks_off = self._config.rollout.partial

        def is_outdated() -> bool:
            if (root / STOP).exists():
                request_interrupt()  # it ends with this call
            return breaks_off and call.version < learner and version_folder(root, learner).is_dir()

        while True:
            with self.phase(self._cycle.generate):
                is_broken_off, metrics, use = self._stream.go_ahead(tasks, call, learner, is_outdated)
            uses.append(use)
            if not is_broken_off:
                return metrics, uses, now() - start
            tasks, call = [], replace(call, version=learner)
            self._take(root, learner)

    @dispatch(collect="leader")
    def reconfigure(self, config: TrainerConfig, num_steps: tuple[int, int], rewards: RewardSetup | None) -> None:
        """Go on with a configuration that differs in what may change between steps; there is no optimizer here."""
        self._roll_out_with(rollout_config(config), rewards)


class _TrainingRanks:
    """A backend whose errors may be consequences: a batch is lost if the rank that made it dies. cause: finds the error
    that came first."""

    def __init__(self, ranks: Backend, cause: Callable[[], BaseException | None]) -> None:
        self._ranks, self._cause = ranks, cause
        self.role, self.num_ranks, self.label = ranks.role, ranks.num_ranks, ranks.label
        self.close = ranks.close

    @property
    def has_ended(self) -> bool:
        """Whether no ranks are left to call."""
        return self._ranks.has_ended

    def call(self, method: Callable[..., object], *args: Any) -> Any:
        """Run a dispatched method on all ranks."""
        self._ranks.label = self.label
        try:
            return self._ranks.call(method, *args)
        except Exception as error:
            cause = self._cause()
            if cause is None:
                raise
            raise cause from error


class RolloutGroup(GeneratingGroup):
    """Ranks that only generate (`RolloutWorker`), for the ranks of `policy`, which train meanwhile.

    training: the ranks of `policy`; reference, has_scores: as in PolicyGroup. root: the folder through which weights
    come.

    In a step these ranks deliver the batch, which they have since a step before, and at once begin another one with the
    weights of this step; the first step begins all that is ahead. A step ends when what it began is there and they have
    the new weights. So as many batches are ahead after every step, and which weights make which samples does not depend
    on time, unless completions may be held: then new weights are taken in the middle of them.
    """

    def __init__(
        self,
        backend: Backend,
        training: Backend,
        reference: ReferenceGroup | None = None,
        *,
        has_scores: bool,
        root: Path,
    ) -> None:
        super().__init__(backend)
        training = _TrainingRanks(training, self._failure)
        self.policy = PolicyGroup(training, reference, has_scores=has_scores, beside=(self,))
        self._root = root
        self._ahead: Future[tuple[dict[str, float], float]] | None = None
        self._entered = self._begun = now()  # when the step began, and the last call of `_go_ahead` was made
        self._refilling = 0.0  # seconds of the step in which groups that teach nothing were replaced

    def rollout(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[AnyBatch, list[RolloutReport]]:
        """Return samples, of a training step those that are there since the step before: only at the start of a run,
        and in the place of groups that teach nothing, is anything generated before the batch comes."""
        if call.hold is None:
            return super().rollout(tasks, call)
        self._ahead = None  # what a step that was taken back had begun is begun again
        if call.is_refill:
            start, answer = now(), super().rollout(tasks, call)
            self._refilling += now() - start
            return answer
        self._entered, self._refilling = now(), 0.0
        batch, reports = super().rollout(tasks, call)
        # Its samples were made beside the training of the step before: what that took is no part of this step.
        return batch, [replace(report, use=replace(report.use, cost=None)) for report in reports]

    def demonstrations(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[AnyBatch, list[RolloutReport]]:
        """Have the ranks that train score the data set's own completions of these prompts."""
        return self.policy.demonstrations(tasks, call)

    def begin(self, tasks: list[RolloutTask], call: RolloutCall) -> None:
        """Go on with what the next steps need, beginning with these prompts, and return at once."""
        self._begun = now()
        self._ahead = self.submit(RolloutGroup._go_ahead, tasks, call)

    def _go_ahead(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[dict[str, float], float]:
        """Generate what the next steps need. Returns metrics, and the seconds of the slowest rank."""
        ranks = self._ranks.call(RolloutWorker.go_ahead, tasks, call, self._root)
        uses = [SlotUse.of_ranks(of_version) for of_version in zip(*(uses for _, uses, _ in ranks), strict=True)]
        metrics = joined(metrics for metrics, _, _ in ranks) | use_metrics(uses)
        return metrics, max(seconds for _, _, seconds in ranks)

    def _failure(self) -> BaseException | None:
        """Break off what is being generated, and return the error with which it ended, if it failed."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        stop = self._root / STOP
        stop.touch()
        try:
            return ahead.exception()
        finally:
            stop.unlink()

    def update_weights(self, version: int) -> list[dict[str, float]]:
        """Have the weights written as this policy version, wait for what is generated meanwhile, and take the version.
        Returns metrics of the handoff, of what is held, and of how busy both sides were."""
        seconds = self.policy.write_weights(self._root, version)
        trained, metrics = now(), dict[str, float]()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            metrics, generating = result_of(ahead)
            whole = max(now() - self._entered, 1e-9)  # from the wait for the batch's rewards on, in which no side works
            metrics["ranks/generating_busy"] = min((self._refilling + generating) / whole, 1.0)
            metrics["ranks/training_busy"] = min((trained - self._begun) / whole, 1.0)
        taken = largest(self._ranks.call(RolloutWorker.take_weights, self._root, version))
        return [{**taken, **metrics, "timing/handoff_write": seconds}]

    def held_apart(self, step: int) -> list[str]:
        """Return what these ranks hold after a training step."""
        return self.held_texts(step)

    def reconfigure(self, config: TrainerConfig, num_steps: tuple[int, int], rewards: RewardSetup | None) -> None:
        """Go on with a configuration that differs in what may change between steps, on both sides."""
        self.policy.reconfigure(config, num_steps, rewards)
        self._ranks.call(RolloutWorker.reconfigure, config, num_steps, rewards)

    def close(self) -> None:
        """End these ranks; what is being generated is broken off."""
        with suppress(OSError):  # the folder may be gone
            (self._root / STOP).touch()
        super().close()
