"""A Trainer's evaluations: on the data of the run or on rows given for once, its best step, and the end it may call
for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.errors import ConfigError, do_all
from hybrid_rl.evaluation.samples import EvalSamples, Evaluations
from hybrid_rl.metrics import finite, largest, now
from hybrid_rl.process.interrupts import undisturbed
from hybrid_rl.rewards import TrainerState
from hybrid_rl.run.best import BestStep
from hybrid_rl.run.checks import check_modes
from hybrid_rl.run.evaluation import load_sets, rows_of
from hybrid_rl.run.missing import explained
from hybrid_rl.run.restarts import may_restart
from hybrid_rl.run.results import Metrics
from hybrid_rl.run.start import make_evaluator
from hybrid_rl.run.timeline import Timeline
from hybrid_rl.run.views import ShownTrainer
from hybrid_rl.run.watch import broken_model_explained

logger = logging.getLogger("hybrid_rl")


class Evaluating(ShownTrainer):
    """The base of Trainer that evaluates.

    evaluations: the samples of the last evaluation by set, "" for a single one: with estimates() of accuracy, pass@k
    and majority@k, within() of budgets of tokens, and against() another evaluation of the same prompts. It prints as a
    table.
    """

    evaluations: Mapping[str, EvalSamples] = Evaluations()
    _best: BestStep
    _handoff: dict[str, float]
    _timeline: Timeline
    _save_due = False
    _has_begun: bool  # the record from before the first step is written
    _fit_begun = 0  # the training step after which the `fit()` under way began
    _last_metrics: Metrics  # of the last step of this process; empty before it
    _is_unevaluated = False  # the engine was lost in the evaluation of the last step, so that step is to be made again
    _owed: Mapping[str, float] | None = None  # metrics of the last step, if its evaluation was broken off by Ctrl-C

    @explained
    def evaluate(self, eval_dataset: Any = None) -> Metrics:
        """Compute rewards on eval_dataset, greedily unless configured otherwise; metric names begin with `eval/`, or
        with `eval/<set>/` if there are several sets.

        eval_dataset: other rows for this time, in any form that the Trainer takes. eval/accuracy is the share of
        samples that satisfy the first reward function (eval.success_functions); `evaluations` has more about them.
        """
        self._require_idle("evaluate")
        self._require_current()
        run, step = self._run, self.global_step
        if eval_dataset is None and not run.data.eval:
            raise ConfigError(
                "there is no evaluation data: pass eval_dataset= or set data.eval_path, or give rows: evaluate(rows)"
            )
        check_modes(self.config, learns=False)
        rows = run.eval_rows if eval_dataset is None else rows_of(load_sets(eval_dataset, run.data.encoder))
        start, doing = now(), f"evaluation after step {step}"
        evaluator = make_evaluator(run, self.policy, self.collector)
        with self._working("evaluate()"):
            with self._computing(), broken_model_explained(doing, self.run_folder), self._timeline.phase("evaluation"):
                call = (self.policy_version, self._state(step), self._log.samples_folder)
                numbers, found = evaluator.evaluate(rows, *call)
            object.__setattr__(self, "evaluations", Evaluations(found))
            metrics = Metrics(numbers, **{"timing/evaluate": now() - start})
            self._notify("on_evaluate", step, metrics)
        return metrics

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        """Have the best step so far saved, and end `fit()` if it is time to stop."""
        if self._best.look(self.global_step, metrics):
            self._save_due |= self.config.save_steps is not None
        if self._ends_early:
            self._is_stopping = True
            self._log.display.message(self._best.reason())

    @property
    def _ends_early(self) -> bool:
        """Whether an evaluation of this `fit()` calls for its end. Those before it do not: `fit(steps=20)` goes on
        after them, also if a restart brings them back."""
        return self._best.is_over and self._best.evaluated_step > self._fit_begun

    def _evaluate_at_start(self) -> None:
        """Evaluate before the first step, and a step whose evaluation was broken off, unless both are done."""
        if self._owed is not None:
            self._evaluate_owed(self._owed)
        if self._has_begun or self.global_step:
            return
        record = dict(self._handoff)
        if self._run.data.eval and self.config.eval.eval_on_start:
            record |= self.evaluate()
            self._best.look(0, record)
        self._has_begun = True  # before the record, so that a Ctrl-C between the two does not make a second one
        self._log.metrics(0, record)

    def _evaluate_owed(self, owed: Mapping[str, float]) -> None:
        """Make the evaluation of the last step that was broken off, and record it with the metrics of the step."""
        if not self._run.data.eval:
            logger.warning(
                "the evaluation after step %d was broken off, and is left out, as this run has no eval_dataset; to "
                "make it, resume that checkpoint with one",
                self.global_step,
            )
            self._owed = None
            return
        self._log.take_up()
        self._last_metrics = metrics = Metrics(owed, **self.evaluate())
        self._owed, step = None, self.global_step
        self._save_due |= self.config.save_steps is not None  # its checkpoint says that this is still to be done
        do_all(
            lambda: self._note_best(metrics),
            lambda: self._log.metrics(step, metrics),
            self._save_if_due,
            self._best.write,
        )

    def _evaluate_step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Evaluate after a step with these metrics. A Ctrl-C waits. If a second one breaks it off, the evaluation is
        made before the next step, also by a resumed run. If the engine is lost, the step is not saved: a restarted run
        makes it again."""
        try:
            with undisturbed():
                return self.evaluate()
        except KeyboardInterrupt:
            self._owed = finite(metrics)
            raise
        except Exception as error:
            self._is_unevaluated = may_restart(error)
            raise

    def _save_if_due(self) -> None:
        raise NotImplementedError

    def _stops_at_once(self) -> bool:
        """Whether a run that goes on has already been stopped early."""
        if self._best.is_over:
            self._log.display.message(self._best.reason())
        return self._best.is_over

    def _load_best(self) -> None:
        """Take the weights of the best step, if that was asked for."""

        def load(checkpoint: Path) -> None:
            self.policy.load(checkpoint.resolve())
            self._note_training()
            self._handoff = largest(self.policy.update_weights_again(self.policy_version))

        if told := self._best.load(self.global_step, load):
            self._log.display.message(told)

    def _notify(self, hook: str, *arguments: Any) -> None:
        raise NotImplementedError

    def _state(self, step: int) -> TrainerState:
        raise NotImplementedError
