"""Evaluations of a run: on its data or on rows given for once, its best step, and the end it may call for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.batch import AnyBatch
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.errors import ConfigError, DataError, do_all
from hybrid_rl.metrics.eval_samples import ACCURACY, EvalSamples, Evaluations
from hybrid_rl.metrics.metric_sums import finite, now
from hybrid_rl.process import progress
from hybrid_rl.process.interrupts import undisturbed
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.rollout.successes import eval_samples
from hybrid_rl.run.checks import check_modes
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.evaluation import load_sets, rows_of
from hybrid_rl.run.prepare import Run
from hybrid_rl.run.restarts import may_restart
from hybrid_rl.run.saver import Saver
from hybrid_rl.run.step_results import Metrics
from hybrid_rl.run.stopper import Stopper
from hybrid_rl.run.tenancy import Tenancy
from hybrid_rl.run.watch import broken_model_explained
from hybrid_rl.workers.groups import PolicyGroup

logger = logging.getLogger("hybrid_rl")

KEPT_SAMPLES = 1000  # of each set and evaluation of a run, in eval-samples.jsonl


class Evaluator:
    """Evaluates the policy of a run on sets of prompts."""

    def __init__(self, run: Run, policy: PolicyGroup, collector: Collector) -> None:
        self._run, self._policy, self._collector = run, policy, collector
        self._params, self._num_generations = run.eval_params, run.config.eval.num_generations_eval

    def evaluate(
        self,
        sets: Mapping[str, Sequence[PromptRow]],
        version: int,
        state: TrainerState,
        folder: Path | None,
        kept: int | None = KEPT_SAMPLES,
    ) -> tuple[dict[str, float], dict[str, EvalSamples]]:
        """Return metrics of all sets, named eval/..., or eval/<set>/... for sets with a name, and their samples by set.

        folder: where their samples are appended to eval-samples.jsonl, of each set whole groups of about `kept`
        samples (None = all); None = nowhere. Raises DataError for a prompt that is too long for the engine.
        """
        if not self._run.data.grows:
            for name, rows in sets.items():
                self._check_lengths(name, rows)
        metrics: dict[str, float] = {}
        latest: dict[str, EvalSamples] = {}
        for name, rows in sets.items():
            batch, metrics_of_set = self._roll_out(name, rows, version, state)
            answers = [pair for part in self._policy.answers(batch) for pair in part]
            samples = eval_samples(batch, rows, self._run.success, answers, self._params.max_tokens)
            metrics_of_set |= _share_metrics(samples)
            if folder is not None:
                self._keep(batch, name, state.global_step, folder, kept)
            prefix = f"eval/{name}/" if name else "eval/"
            metrics |= {prefix + metric: value for metric, value in metrics_of_set.items()}
            latest[name] = samples
        return metrics, latest

    def _roll_out(
        self, name: str, rows: Sequence[PromptRow], version: int, state: TrainerState
    ) -> tuple[AnyBatch, dict[str, float]]:
        """Return the samples of a set, and the metrics of its rollout without spreads, which mean little here."""
        purpose = f"evaluation/{state.global_step}" + (f"/{name}" if name else "")
        call = (rows, self._num_generations, self._params, version, state)
        with progress.doing(f"evaluation of {name}" if name else "evaluation"):
            made = self._collector.rollout(*call, purpose=purpose)
        metrics = {
            name: value
            for name, value in made.metrics.items()
            if "std" not in name.split("/")[-1] and not name.startswith("pass@")
        }
        return made.batch, metrics

    def _keep(self, batch: AnyBatch, name: str, step: int, folder: Path, kept: int | None) -> None:
        """Have the ranks write down the samples of a set, or those of its first prompts."""
        group = batch["group"]
        first = (int(group.min()), int(batch["trajectory"].min()))
        if kept is not None and batch.num_samples > kept:
            prompts = max(1, kept // self._num_generations)
            batch = batch.select((group < group.min() + prompts).nonzero()[:, 0])
        self._policy.log_samples(batch, step, folder, first, name)

    def _check_lengths(self, name: str, rows: Sequence[PromptRow]) -> None:
        longest = self._run.max_length - self._run.config.rollout.max_completion_length
        for place, row in enumerate(rows):
            if len(row.prompt_ids) > longest:
                raise DataError(
                    f"row {place} of {f'set {name!r}' if name else 'the data'} has {len(row.prompt_ids)} tokens, but "
                    f"the engine was made for prompts of at most {longest}; set max_prompt_length when the "
                    "Trainer is made, or shorten it"
                )


def _share_metrics(samples: EvalSamples) -> dict[str, float]:
    """Return accuracy, pass@k and maj@k, and the interval of the accuracy."""
    estimates = samples.estimates()
    metrics = {name: estimate.value for name, estimate in estimates.items()}
    if ACCURACY in estimates:
        metrics |= {f"{ACCURACY}_low": estimates[ACCURACY].low, f"{ACCURACY}_high": estimates[ACCURACY].high}
    return metrics


class RunEvaluator:
    """Evaluates the policy of a run.

    notify: calls a hook of the callbacks. latest: the samples of the last evaluation by set, "" for a single one.
    """

    def __init__(
        self, crew: Crew, tenancy: Tenancy, saver: Saver, stopper: Stopper, notify: Callable[..., None]
    ) -> None:
        self._crew, self._position, self._log = crew, crew.position, crew.log
        self._tenancy, self._saver, self._stopper, self._notify = tenancy, saver, stopper, notify
        self.latest: Mapping[str, EvalSamples] = Evaluations()

    def evaluate(self, eval_dataset: Any = None) -> Metrics:
        """Evaluate now, on the data of the run or on these rows, as `Trainer.evaluate` says."""
        self._tenancy.require_idle("evaluate")
        self._tenancy.require_current()
        crew, step, data = self._crew, self._position.step, self._crew.run.data
        if eval_dataset is None and not data.eval:
            raise ConfigError(
                "there is no evaluation data: pass eval_dataset= or set data.eval_path, or give rows: evaluate(rows)"
            )
        check_modes(crew.config, learns=False)
        rows = rows_of(data.eval if eval_dataset is None else load_sets(eval_dataset, data.encoder))
        start, doing = now(), f"evaluation after step {step}"
        evaluator = Evaluator(crew.run, crew.policy, crew.collector)
        with self._tenancy.working("evaluate()"):
            explained, phase = broken_model_explained(doing, crew.folder), crew.timeline.phase("evaluation")
            with self._tenancy.computing(), explained, phase:
                call = (self._position.policy_version, crew.state(step), self._log.samples_folder)
                numbers, latest = evaluator.evaluate(rows, *call)
            self.latest = Evaluations(latest)
            metrics = Metrics(numbers, **{"timing/evaluate": now() - start})
            self._notify("on_evaluate", step, metrics)
        return metrics

    def note_best(self, metrics: Mapping[str, float]) -> None:
        """Have the best step so far saved, and end `fit()` if it is time to stop."""
        if self._crew.best.look(self._position.step, metrics):
            self._position.save_due |= self._crew.config.save_steps is not None
        self._stopper.look()

    def at_start(self) -> None:
        """Evaluate before the first step, and a step whose evaluation was broken off, unless both are done."""
        if self._position.owed is not None:
            self._evaluate_owed(self._position.owed)
        if self._position.has_begun or self._position.step:
            return
        record = dict(self._crew.handoff)
        if self._crew.run.data.eval and self._crew.config.eval.eval_on_start:
            record |= self.evaluate()
            self._crew.best.look(0, record)
        # Before the record, so that a Ctrl-C between the two does not make a second one.
        self._position.has_begun = True
        self._log.metrics(0, record)

    def _evaluate_owed(self, owed: Mapping[str, float]) -> None:
        """Make the evaluation of the last step that was broken off, and record it with the metrics of the step."""
        if not self._crew.run.data.eval:
            logger.warning(
                "the evaluation after step %d was broken off, and is left out, as this run has no eval_dataset; to "
                "make it, resume that checkpoint with one",
                self._position.step,
            )
            self._position.owed = None
            return
        self._log.take_up()
        self._position.metrics = metrics = Metrics(owed, **self.evaluate())
        self._position.owed, step = None, self._position.step
        # The checkpoint of the step says that this is still to be done.
        self._position.save_due |= self._crew.config.save_steps is not None
        do_all(
            lambda: self.note_best(metrics),
            lambda: self._log.metrics(step, metrics),
            self._saver.save_if_due,
            self._crew.best.write,
        )

    def after_step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Evaluate after a step with these metrics. A Ctrl-C waits. If a second one breaks it off, the evaluation is
        made before the next step, also by a resumed run. If the engine is lost, the step is not saved: a restarted run
        makes it again."""
        try:
            with undisturbed():
                return self.evaluate()
        except KeyboardInterrupt:
            self._position.owed = finite(metrics)
            raise
        except Exception as error:
            self._position.is_unevaluated = may_restart(error)
            raise

    def load_best(self) -> None:
        """Take the weights of the best step, if that was asked for."""

        def load(checkpoint: Path) -> None:
            self._crew.policy.load(Checkpoint.read(checkpoint))
            self._tenancy.note_training()
            self._crew.publish_again()

        if note := self._crew.best.load(self._position.step, load):
            self._log.display.message(note)
