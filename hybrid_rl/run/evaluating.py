"""A Trainer's evaluations: on the data of the run or on rows given for once, its best step, and the end it may call
for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.errors import ConfigError
from hybrid_rl.evaluation.samples import EvalSamples, Evaluations
from hybrid_rl.metrics import largest, now
from hybrid_rl.rewards import TrainerState
from hybrid_rl.run.best import BestStep
from hybrid_rl.run.checks import check_modes
from hybrid_rl.run.evaluation import load_sets, rows_of
from hybrid_rl.run.results import Metrics
from hybrid_rl.run.start import make_evaluator
from hybrid_rl.run.timeline import Timeline
from hybrid_rl.run.views import ShownTrainer
from hybrid_rl.run.watch import broken_model_explained


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

    def evaluate(self, dataset: Any = None) -> Metrics:
        """Compute rewards on eval_dataset, greedily unless configured otherwise; metric names begin with `eval/`, or
        with `eval/<set>/` if there are several sets.

        dataset: other rows for this time, in any form that eval_dataset may have. eval/accuracy is the share of samples
        that satisfy the first reward function (eval.success_functions); `evaluations` has more about its samples.
        """
        self._require_idle("evaluate")
        self._require_current()
        run, step = self._run, self.global_step
        if dataset is None and not run.data.eval:
            raise ConfigError(
                "there is no evaluation data: pass eval_dataset= or set data.eval_path, or give rows: evaluate(rows)"
            )
        check_modes(self.config, learns=False)
        rows = run.eval_rows if dataset is None else rows_of(load_sets(dataset, run.data.encoder))
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
        if self._best.is_over:
            self._is_stopping = True
            self._log.display.message(self._best.reason())

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
