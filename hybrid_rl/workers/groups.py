"""The worker groups of a run, with the calls that the driver makes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_rl.batch import AnyBatch, BatchRef, SampleKey
from hybrid_rl.checkpoint.background import Progress
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import Backend, WorkerGroup, result_of
from hybrid_rl.errors import EngineStateError, StorageError, WorkerError, counted
from hybrid_rl.memory.history import Span, StepMemory
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.hold_rule import HeldPrompt
from hybrid_rl.training.skipped import SkippedUpdate
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.generating import GeneratingWorker
from hybrid_rl.workers.hybrid import HybridWorker
from hybrid_rl.workers.preflight import RankProbe
from hybrid_rl.workers.reference import ReferenceWorker
from hybrid_rl.workers.setup import RewardSetup

logger = logging.getLogger("hybrid_rl")


class RankGroup(WorkerGroup):
    """Calls that ranks of every role answer (`WorkerBase`), and so do the groups beside these."""

    def memory_metrics(self) -> list[dict[str, float]]:
        """Read the bytes by resident and the seconds of sleeps and wakes of each rank."""
        return self._of_all(WorkerBase.memory_metrics)

    def memory_history(self) -> list[list[StepMemory]]:
        """Read what was in memory over the last steps of each rank."""
        return self._of_all(WorkerBase.memory_history)

    def last_phases(self) -> list[list[Span]]:
        """Read in which phase each rank was when, over the last step."""
        return self._of_all(WorkerBase.last_phases)

    def _of_all(self, method: Callable[[WorkerBase], object]) -> list[Any]:
        return [answer for group in (self, *self._beside) for answer in group._ranks.call(method)]

    def probe_rank(self) -> list[RankProbe]:
        """Read the versions of each rank, and measure its speed."""
        return self._ranks.call(WorkerBase.probe_rank)


class ReferenceGroup(RankGroup):
    """Ranks that hold the reference model only (`ReferenceWorker`)."""

    def score(self, batch: AnyBatch, step: int) -> AnyBatch:
        """Return the batch with ref_logprobs."""
        return self._ranks.call(ReferenceWorker.score, batch, step)


class GeneratingGroup(RankGroup):
    """Ranks with an engine (`GeneratingWorker`), of which the driver takes groups; they may also train, in turn."""

    @abstractmethod
    def begin(self, tasks: list[RolloutTask], call: RolloutCall) -> None:
        """Go on with the next step's batch, beginning with these prompts, and return at once."""

    @abstractmethod
    def demonstrations(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[AnyBatch, list[RolloutReport]]:
        """Score the data set's own completions of these prompts."""

    @abstractmethod
    def update_weights(self, version: int) -> list[dict[str, float]]:
        """Give the engines the policy's weights as this policy version, and prove it. Returns metrics of each rank."""

    @abstractmethod
    def held_apart(self, step: int) -> list[str] | None:
        """Return what these ranks hold after a training step, for those that write checkpoints (`held_texts`); None =
        these ranks do, each what it holds."""

    @abstractmethod
    def reconfigure(self, config: TrainerConfig, num_steps: tuple[int, int], rewards: RewardSetup | None) -> None:
        """Go on with a configuration that differs in what may change between steps, and so do ranks that train apart.

        num_steps: optimizer steps of policy and critic in the whole run; rewards: None = as they are."""

    def rollout(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[AnyBatch, list[RolloutReport]]:
        """Generate and score samples of these prompts, in any order. A report comes of each rank that had some."""
        return self._ranks.call(GeneratingWorker.rollout, tasks, call)

    def update_weights_again(self, version: int) -> list[dict[str, float]]:
        """Do the same for a version that the engines already hold, if somebody else has changed their weights."""
        return self._ranks.call(GeneratingWorker.update_weights_again, version)

    def held_texts(self, step: int) -> list[str]:
        """Return what each rank holds after a training step, as checkpoints have it."""
        return self._ranks.call(GeneratingWorker.held_texts, step)

    def oldest_held(self, step: int) -> list[int]:
        """Return, of each rank, the training step that began the oldest group that it holds after a training step; the
        next one if it holds none."""
        return self._ranks.call(GeneratingWorker.oldest_held, step)

    def held_prompts(self, step: int, folder: Path | None = None) -> dict[int, HeldPrompt]:
        """Return the prompts of the groups that all ranks hold after a training step, by group. folder: of a checkpoint
        of that step; go on with what it holds. Raises CheckpointError for damaged files."""
        return dict(
            pair for of_rank in self._ranks.call(GeneratingWorker.held_prompts, step, folder) for pair in of_rank
        )


class PolicyGroup(RankGroup):
    """Ranks that train (`HybridWorker`). reference: ranks that hold the reference model, None if these do, or there is
    none. has_scores: whether these ranks compute anything before advantages. beside: ranks that generate for them."""

    def __init__(
        self,
        backend: Backend,
        reference: ReferenceGroup | None = None,
        *,
        has_scores: bool = True,
        beside: Sequence[GeneratingGroup] = (),
    ) -> None:
        super().__init__(backend, beside)
        self._reference, self._has_scores = reference, has_scores
        self._num_unsaved = 0  # rollouts in a row
        self._records_tokens = False

    def reconfigure(self, config: TrainerConfig, num_steps: tuple[int, int], rewards: RewardSetup | None) -> None:
        """Go on with a configuration that differs in what may change between steps, as in GeneratingGroup."""
        self._ranks.call(HybridWorker.reconfigure, config, num_steps, rewards)

    # ---------------------------------------------------------------------------------------------- a training step

    def demonstrations(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[AnyBatch, list[RolloutReport]]:
        """Score the data set's own completions of these prompts."""
        return self._ranks.call(HybridWorker.demonstrations, tasks, call)

    def score(self, batch: AnyBatch, step: int) -> AnyBatch:
        """Add what the algorithm needs before advantages: logprobs of policy, reference and teacher, values.
        Reference ranks compute at the same time."""
        if self._reference is None or not self._has_scores or not isinstance(batch, BatchRef):
            scored: AnyBatch = self._ranks.call(HybridWorker.score, batch, step) if self._has_scores else batch
            return scored if self._reference is None else self._reference.score(scored, step)
        referring = self._reference.submit(ReferenceGroup.score, batch, step)
        try:
            made: BatchRef = self._ranks.call(HybridWorker.score, batch, step)
        except BaseException:
            referring.exception()  # waits for the reference; the policy's error is the one that is raised
            raise
        referred = result_of(referring)
        assert isinstance(referred, BatchRef)
        return made.joined(referred)

    def advantages(self, batch: AnyBatch) -> AnyBatch:
        """Add advantages, and returns if there is a critic."""
        return self._ranks.call(HybridWorker.advantages, batch)

    def update(self, batch: AnyBatch, step: int) -> list[MetricSums]:
        """Take all optimizer steps of a training step. Returns each rank's part of their metrics."""
        return self._ranks.call(HybridWorker.update, batch, step)

    def record_tokens(self) -> None:
        """Have updates keep what they do with every token, as columns of their batches."""
        self._ranks.call(HybridWorker.record_tokens)
        self._records_tokens = True

    def with_trained_columns(self, batch: AnyBatch) -> AnyBatch:
        """Add what the update of a batch found in passing: the trainer's logprobs, what `record_tokens` asks for."""
        columns = batch.columns if isinstance(batch, BatchRef) else batch
        full_batch: AnyBatch = batch
        if self._records_tokens or "old_logprobs" not in columns:
            full_batch = self._ranks.call(HybridWorker.with_trained_columns, batch)
        return full_batch

    def skipped_updates(self) -> dict[str, SkippedUpdate | None]:
        """Return the last update that policy and critic each skipped."""
        return self._ranks.call(HybridWorker.skipped_updates)

    # ------------------------------------------------------------------------------------------ samples and checkpoints

    def log_samples(
        self, batch: AnyBatch, step: int, folder: Path, first: tuple[int, int], eval_set: str | None = None
    ) -> None:
        """Append the samples of each rank to its file in the run folder. Samples that cannot be written now wait.
        first: the smallest group and trajectory of the step, from which records count. eval_set: the name of their
        evaluation set; None = they are of training."""
        self._ranks.call(HybridWorker.log_samples, batch, step, folder, first, eval_set)

    def answers(self, batch: AnyBatch) -> list[list[tuple[SampleKey, str | None]]]:
        """Read what reward functions extracted from each rank's samples, of those that have it."""
        return self._ranks.call(HybridWorker.answers, batch)

    def lost_samples(self) -> list[Path]:
        """Write the samples that wait, and return the files that cannot be written. Dead ranks were reported when they
        died."""
        if self.has_ended:
            return []
        try:
            files: list[list[Path]] = self._ranks.call(HybridWorker.flush_samples)
        except WorkerError:
            return []
        return [path for of_rank in files for path in of_rank]

    def records(self, batch: AnyBatch, step: int, first: tuple[int, int]) -> list[dict[str, Any]]:
        """Read the records of samples, as `log_samples` would write them, in their order."""
        parts: list[list[dict[str, Any]]] = self._ranks.call(HybridWorker.records, batch, step, first)
        return sorted(
            (record for part in parts for record in part), key=lambda record: (record["trajectory"], record["turn"])
        )

    def save_rollout(self, batch: AnyBatch, step: int, folder: Path, *, must: bool) -> None:
        """Save the samples of a step for replay. A full disk is an error only if it `must` be done."""
        try:
            self._ranks.call(HybridWorker.save_rollout, batch, step, folder)
        except StorageError as error:
            if must or self.has_ended:
                raise
            self._num_unsaved += 1
            if self._num_unsaved == 1:
                logger.warning(
                    "the rollout of step %d is not saved, nor are those that follow until the disk can be written "
                    "again: %s",
                    *(step, error),
                )
            return
        if self._num_unsaved:
            logger.warning("rollouts are saved again; those of %s are missing", counted(self._num_unsaved, "step"))
        self._num_unsaved = 0

    def save(self, folder: Path, state: dict[str, Any], held: list[str] | None = None) -> None:
        """Write a checkpoint. state: of the driver; held: what other ranks hold (`held_texts`), None = these ranks do.
        Raises CheckpointError."""
        self._ranks.call(HybridWorker.save, folder, state, held)

    def begin_save(self, folder: Path, state: dict[str, Any], held: list[str] | None = None) -> str:
        """Take a snapshot of what `save` would write, and begin to write it in the background. Returns ""; if there is
        too little host memory, what is missing, and nothing has begun. Raises CheckpointError."""
        return self._ranks.call(HybridWorker.begin_save, folder, state, held)

    def save_progress(self, wait_seconds: float = 0.0) -> list[Progress]:
        """Read how far each rank is with the checkpoint of `begin_save`, at once or after waiting so long for its
        end."""
        return self._ranks.call(HybridWorker.save_progress, wait_seconds)

    def end_save(self, *, is_given_up: bool) -> None:
        """Forget what `begin_save` began. is_given_up: a rank has failed, so that the others need not go on."""
        self._ranks.call(HybridWorker.end_save, is_given_up)

    def write_weights(self, root: Path, version: int) -> float:
        """Write the weights as this policy version for ranks that only generate. root: the folder of all versions.
        Returns seconds. Raises HandoffError if they cannot be written."""
        return self._ranks.call(HybridWorker.write_weights, root, version)

    def save_merged(self, folder: Path) -> None:
        """Write the policy as a model without adapters. Raises CheckpointError."""
        self._ranks.call(HybridWorker.save_merged, folder)

    def keep_base(self, known: str | None, run_folder: Path) -> dict[str, Any]:
        """Return where the base model of the adapters is, with its hashes; write it into the run folder if it is
        nowhere. known: the name or folder that it was loaded from, if it was. Raises CheckpointError."""
        return self._ranks.call(HybridWorker.keep_base, known, run_folder)

    def check_base(self, record: dict[str, Any], what: str) -> None:
        """Raise CheckpointError unless the base model of the adapters is the one of this record (`keep_base`)."""
        self._ranks.call(HybridWorker.check_base, record, what)

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self._ranks.call(HybridWorker.load, replace(checkpoint, folder=checkpoint.folder.resolve()))


class HybridGroup(PolicyGroup, GeneratingGroup):
    """Ranks that train and generate in turn."""

    def begin(self, tasks: list[RolloutTask], call: RolloutCall) -> None:
        """Raise: these ranks do nothing while they train."""
        raise EngineStateError("ranks that train in turn begin nothing ahead; set rollout_ranks for ranks that do")

    def update_weights(self, version: int) -> list[dict[str, float]]:
        """Give the engines the weights as this policy version, and prove it. Returns metrics of each rank."""
        return self._ranks.call(HybridWorker.update_weights, version)

    def held_apart(self, step: int) -> None:
        """Return None: each rank writes what it holds."""
