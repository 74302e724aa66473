"""The workers of a run, and what the driver works with them: all of it is made again at a restart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

from hybrid_rl.batch import AnyBatch
from hybrid_rl.checkpoint.reading import STATE_FILE, Checkpoint
from hybrid_rl.config import TrainerConfig, optimizer_steps_per_training_step
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.errors import DataError
from hybrid_rl.logging.run_log import RunLog, cost_metrics
from hybrid_rl.metrics.metric_sums import Timings, largest
from hybrid_rl.process.hooks import extra
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.run.best import BestStep
from hybrid_rl.run.causes import Scoring
from hybrid_rl.run.guard import StepGuard
from hybrid_rl.run.position import Position
from hybrid_rl.run.prepare import Run
from hybrid_rl.run.start import make_collector, start_workers, starting, token_cost
from hybrid_rl.run.timeline import Timeline
from hybrid_rl.run.turns_folder import RunTurns
from hybrid_rl.run.watch import LearningWatch, SignalWatch
from hybrid_rl.training.balance import TokenCost
from hybrid_rl.workers.groups import GeneratingGroup, PolicyGroup


class Crew:
    """A run as it is set now, its workers, and what the driver has made to work with them.

    run: with the configuration of now. position: how far it is. folder: of the run. policy, generating: the ranks that
    train and those that generate, which may be the same. handoff: metrics of the last one.
    """

    policy: PolicyGroup
    generating: GeneratingGroup
    collector: Collector
    timeline: Timeline
    best: BestStep
    watch: LearningWatch
    handoff: dict[str, float]

    def __init__(self, run: Run, log: RunLog, sampler: PromptSampler, position: Position) -> None:
        self.run, self.sampler, self.folder = run, sampler, log.path
        self.guard = StepGuard(sampler)
        self.signal_watch = SignalWatch(run.config, Scoring.of(run))
        self.log, self.position = log, position
        self.turns = RunTurns(self.folder)
        self._first_data = sampler.state_dict()
        self._workers = contextlib.ExitStack()  # ends the workers when it is closed; used again

    @property
    def config(self) -> TrainerConfig:
        """The configuration, as it is set now."""
        return self.run.config

    def start(self, finish: Callable[[], None], carry_on: Callable[[Checkpoint], None] | None = None) -> None:
        """Start the workers, and put them where the checkpoint is from which the run resumes.

        finish: called before they end. carry_on: takes the checkpoint before its weights are loaded; None at a
        restart, where what was set on the live Trainer stays as it is.
        """
        run, position = self.run, self.position
        with starting(self.log.display, run.config, self.folder):
            files = self.turns.start(run.checkpoint) if run.agents is not None and run.config.save_steps else None
            self.policy, self.generating = start_workers(run, self.folder, self._workers, turn_files=files)
            self._workers.callback(finish)
            self.collector = make_collector(run, self.generating, self.sampler)
            self.timeline = Timeline(self.policy, self.folder)
            self.pictures = extra("memory_pictures")(self.policy, self.folder, run.plan, self.timeline.phase)
            self.best = BestStep(run.config.eval, self.folder)
            self.watch = LearningWatch(optimizer_steps_per_training_step(run.config))
            if run.checkpoint is not None:
                self._restore(run.checkpoint, carry_on)
            else:
                position.step = position.num_tokens = 0
                self.sampler.load_state_dict(self._first_data)
            self.guard.complete()  # the weights are those of a step, whatever was broken off before
            self.handoff = largest(self.generating.update_weights(position.step))
        position.policy_version = position.step
        position.has_begun = self.log.begin(position.step)

    @functools.cached_property
    def _rates(self) -> tuple[TokenCost, float | None]:
        """What the policy computes for a token, and the FLOP/s of a GPU of the run if they are known."""
        return token_cost(self.run.skeleton), extra("peak_flops")(self.run.hardware.name)

    def costs(self, batch: AnyBatch, timings: Timings, seconds: float, update: Mapping[str, float]) -> dict[str, float]:
        """Return what a training step cost: its seconds, throughput, GFLOP/s, and their share of what its GPUs can do
        if that is known. A backward pass is worth two forward ones, or one below adapters, whose base has no gradient
        of its weights; what is recomputed does not count. update: the metrics of the update."""
        config, (cost, peak_flops) = self.config, self._rates
        backward = (1 if config.lora.is_on else 2) * (1 - update.get("perf/forward_only_share", 0.0))
        passes = config.algorithm.num_iterations * (1 + backward)
        metrics = cost_metrics(batch, timings, seconds, cost.forward_flops(batch), passes)
        for part, group in (("rollout", self.generating), ("update", self.policy)):
            flops = metrics.get(f"perf/{part}_gflops", 0.0) * 1e9
            if flops and peak_flops:
                metrics[f"perf/{part}_mfu"] = flops / (peak_flops * group.num_ranks)
        return metrics

    def end(self) -> None:
        """End the workers."""
        self._workers.close()

    def _restore(self, checkpoint: Checkpoint, carry_on: Callable[[Checkpoint], None] | None) -> None:
        position, state, folder = self.position, checkpoint.state, checkpoint.folder.resolve()
        if carry_on is not None:
            carry_on(checkpoint)
            self.log.announce_resume(checkpoint)
        self.policy.load(checkpoint)
        try:
            self.sampler.load_state_dict(state["sampler"])
        except DataError as error:
            raise DataError(f"{checkpoint.folder / STATE_FILE}: {error}") from error
        position.step, position.num_tokens = checkpoint.step, state["num_tokens"]
        self.best.load_state_dict(state.get("best", {}))
        position.owed = state.get("owed")
        if "collector" in state:
            held = self.generating.held_prompts(position.step, folder)
            self.collector.load_state_dict(state["collector"], held, position.step)

    def state(self, step: int) -> TrainerState:
        """Return what reward functions and agents are told of the run in this step."""
        return TrainerState(step, self.position.max_steps, self.sampler.epoch)

    def publish_again(self) -> None:
        """Give the engine the weights again, as another version of the same step."""
        self.handoff = largest(self.generating.update_weights_again(self.position.policy_version))

    def keep(self, batch: AnyBatch, step: int) -> None:
        """Start writing to the run folder, and save the rollout if that was asked for."""
        self.log.take_up()
        self.collector.num_voids += self.turns.settle(step, batch)
        must = self.config.mode == "rollout"
        if self.config.save_rollouts or must:
            self.policy.save_rollout(batch, step, self.folder / "rollouts", must=must)

    def log_samples(self, batch: AnyBatch, step: int) -> None:
        """Have each rank write its own samples; only the texts of a few come to the driver, to be shown."""
        first = (int(batch["group"].min()), int(batch["trajectory"].min()))
        if self.config.log_completions:
            shown = batch.select(range(min(self.config.log_completions, batch.num_samples)))
            self.log.samples(self.policy.records(shown, step, first))
        with self.timeline.phase("samples written"):
            self.policy.log_samples(batch, step, self.folder, first)
