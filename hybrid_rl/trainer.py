"""The driver's training loop: rollout, rewards, advantages, update, handoff."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_rl.batch import AnyBatch, BatchRef
from hybrid_rl.checkpoint.finding import resumed_folder
from hybrid_rl.checkpoint.reading import STATE_FILE, read_state
from hybrid_rl.config import TrainerConfig, optimizer_steps_per_training_step
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.errors import (
    ConfigError,
    DataError,
    HybridRLError,
    do_all,
)
from hybrid_rl.logging.run_log import RunLog, cost_metrics, with_logged
from hybrid_rl.metrics import joined, largest, now
from hybrid_rl.planning.run_plan import RunPlan
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.generations import Generation, generations_of
from hybrid_rl.rollout.tally import Collected
from hybrid_rl.run.adapters import with_adapters
from hybrid_rl.run.agents import AgentArguments
from hybrid_rl.run.best import BestStep
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.causes import Scoring
from hybrid_rl.run.checks import check_modes
from hybrid_rl.run.familiar import Familiar
from hybrid_rl.run.generation import check_numbers, generation_of, prompts_of
from hybrid_rl.run.guard import StepGuard
from hybrid_rl.run.live import checked_callbacks
from hybrid_rl.run.memory import planned
from hybrid_rl.run.missing import explained
from hybrid_rl.run.others import bring_back, make_way, steps_of, warn_of_training
from hybrid_rl.run.pictures import MemoryPictures, save_trace
from hybrid_rl.run.planning import plan_prepared
from hybrid_rl.run.prepare import Run, mini_batches, prepare
from hybrid_rl.run.restarts import Restarts, check_restarts
from hybrid_rl.run.results import Metrics, StepResult, readable
from hybrid_rl.run.start import make_collector, make_sampler, notes_of, start_workers, starting
from hybrid_rl.run.timeline import Timeline
from hybrid_rl.run.watch import LearningWatch, SignalWatch, broken_model_explained

logger = logging.getLogger("hybrid_rl")


class Trainer(Familiar):
    """Trains a language model with reinforcement learning.

    model: a Hugging Face name or folder, or a module (which also needs tokenizer=); a module is trained in place. Of a
    PeftModel, or the folder of an adapter, the adapter is trained.
    reward_funcs: one or more functions `f(prompts, completions, completion_ids, <dataset columns>, **kwargs) ->
    list[float | None]`, plain or async; names, folders or modules of reward models; judges.
    train_dataset, eval_dataset: a list of dicts, a `datasets.Dataset`, a JSONL or parquet file, with a column
    `prompt` (text or chat messages). eval_dataset may be a dict of these by name, each a set with metrics of its own.
    config: a YAML file, a mapping or a `TrainerConfig`.
    peft_config: a peft LoraConfig, so that adapters are trained and nothing else (keys of the section `lora`).
    reward_processing_classes: the tokenizers of reward models.
    tools: functions, plain or async, that the policy may call; type hints and docstrings describe them to it.
    environment_factory: a class, or a function that makes an object, or a dict of these by name, chosen by the column
    `environment`. `reset(**row) -> str | None` begins a trajectory, public methods are its tools, and a method
    `get_reward()`, if there is one, scores it; reward functions may take `environments`. Prompts, and with a single
    class the dataset, may be left out.
    rollout_func: `async def f(rows, client, **kw) -> list[Trajectory]`, which makes the trajectories of these rows.
    agent: `async def f(row, base_url, api_key, **kw) -> float | dict | None`, a trajectory over an OpenAI-compatible
    endpoint.
    overrides: any key of the configuration, by leaf name or path (`hybrid-rl keys` lists them).

    Raises ConfigError, DataError, ModelError or RewardError before any work starts if something cannot be used.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        config: TrainerConfig | Mapping[str, Any] | str | Path | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        peft_config: Any = None,
        reward_processing_classes: Any = None,
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
        rollout_func: Any = None,
        agent: Any = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        model, overrides = with_adapters(model, peft_config, overrides)
        self._callbacks = checked_callbacks(callbacks)
        data, agents = (train_dataset, eval_dataset), AgentArguments(tools, environment_factory, rollout_func, agent)
        bring_back(model)
        with contextlib.ExitStack() as closing:
            run = prepare(
                model,
                tokenizer,
                reward_funcs,
                *data,
                config,
                overrides,
                reward_processing_classes,
                agents,
                closing=closing,
            )
            self._start(planned(run), closing)
            self._closing = closing.pop_all()

    def _start(self, run: Run, closing: contextlib.ExitStack) -> None:
        folder = resumed_folder(run.config.resume, run.config.output_dir, run.config.run_name)
        check_restarts(run.config, is_in_place=run.module is not None)
        make_way(run.config, folder)
        warn_of_training(run.module, is_resumed=run.resume is not None)
        self._run, self.module = run, run.module
        self.config, self.tokenizer, self.max_steps = run.config, run.choice.tokenizer, run.max_steps
        self._sampler, self._restarts = make_sampler(run), Restarts(run.config.max_restarts)
        self._begun_at = self._sampler.state_dict(), steps_of(run.module)
        self._first_length = run.config.rollout.max_completion_length
        self._signal_watch, self._last_metrics = SignalWatch(run.config, Scoring.of(run)), Metrics()
        self._log = RunLog(run.config, self.max_steps, run.resume, run.lock, run.about)
        self.run_folder = self._log.path  # of config.yaml, metrics.jsonl, samples.jsonl and checkpoints
        closing.callback(self._log.close)
        for note in notes_of(run):
            self._log.display.message(note)
        if run.memory.offload:
            self._log.display.message(f"memory in the phases of a step:\n{run.memory.table()}")
        self._workers = closing.enter_context(contextlib.ExitStack())
        self._begin(run)
        self._enter()

    def _begin(self, run: Run) -> None:
        put: Any = object.__setattr__  # what users cannot set, at a restart
        with starting(self._log.display, run.config, self.run_folder):
            put(self, "policy", start_workers(run, self.run_folder, self._workers))
            self._workers.callback(self._finish_save)
            put(self, "collector", make_collector(run, self.policy, self._sampler))
            self._timeline = Timeline(self.policy, self.run_folder)
            self._pictures = MemoryPictures(self.policy, self.run_folder, run.plan, self._timeline.phase)
            self._best = BestStep(run.config.eval, self.run_folder)
            self._watch = LearningWatch(optimizer_steps_per_training_step(run.config))
            if run.resume is not None:
                self._restore(run.resume)
            else:
                self._global_step = self._num_tokens = 0
                self._sampler.load_state_dict(self._begun_at[0])
            self._guard = StepGuard(self._sampler)
            self._handoff = largest(self.policy.update_weights(self.global_step))
        self._policy_version = self.global_step
        self._has_begun = self._log.begin(self.global_step)

    @property
    def train_dataset(self) -> PromptSampler:
        """Where training prompts come from; of several datasets by name, `weights` can be assigned between steps."""
        return self._sampler

    # --------------------------------------------------------------------------------------------- the loop

    @explained
    def fit(self, steps: int | None = None) -> Metrics:
        """Train until max_steps and return the metrics of the last step. Evaluates before the first and after the last.

        steps: how many more to train; max_steps rises if it must, so `fit(steps=20)` goes on with a run that ended.

        Ctrl-C ends training cleanly: results and, if checkpoints were asked for, the last complete step are saved, then
        KeyboardInterrupt is raised again. A later call continues after the last complete step. To stop early, call
        trainer.stop() in a callback. Signals and save_before end it in the same way, if they are to be listened to
        (enable_jit_checkpoint), and RunStopped is raised, with which a script ends with status 75 if there is a
        checkpoint to go on from.

        If ranks are lost, it goes on from the last checkpoint as often as max_restarts says.
        """
        self._make_again()
        self._require_idle("call fit()")
        last = self._length_for(steps)
        self._is_stopping = steps is None and self._stops_at_once()
        begun = self.global_step
        with self._stoppable(), self._working("fit()"), self._run_shown():
            for attempt in self._attempts():
                with attempt:
                    if self._has_steps(last):
                        self._stop.check()
                    self._evaluate_at_start()
                    while self._has_steps(last):
                        self._stop.check()
                        self.step()
                    self._end_saves(keeps_last=steps is None and self.global_step > begun)
                    if steps is None:
                        self._load_best()
        if self.global_step > begun:
            self._note_fitted()
        return self._last_metrics

    train = fit  # its name in TRL and transformers

    def _has_steps(self, last: int | None) -> bool:
        """Whether `fit()` has a step to train, up to this one; None = max_steps, which may change meanwhile."""
        return self.global_step < (self.max_steps if last is None else last) and not self._is_stopping

    def steps(self) -> Iterator[StepResult]:
        """Yield the remaining training steps, one at a time."""
        while self.global_step < self.max_steps and not self._best.is_over:
            yield self.step()

    def step(self) -> StepResult:
        """Run one training step, log it, and evaluate and save as due.

        Ctrl-C before the update undoes the step; once the update has begun it waits until the step is logged.
        """
        self._require_idle("call step()")
        self._require_current()
        check_modes(self.config)
        if self.global_step >= self.max_steps:
            raise ConfigError(self._nothing_to_do())
        self._follow()
        self._look_at_save()
        start, step, phase = now(), self.global_step + 1, self._timeline.phase
        self.policy.label = f"training step {step}"
        with self._working("step()"), self._guard.step(), self._timeline.step(step):
            with broken_model_explained(self.policy.label, self.run_folder), phase("rollout"):
                collected = self.collector.collect(self.policy_version, self._state(step))
            batch, timings, update = collected.batch, collected.timings, dict[str, float]()
            self._keep(batch, step)
            if self.config.mode != "rollout":
                batch = batch.with_columns(mini_batch=mini_batches(batch["group"], self.config, step))
                with timings.measure("logprobs"), phase("logprobs"):
                    batch = self.policy.score(batch, step)
                with phase("advantages"):
                    batch = self.policy.advantages(batch)
                self._commit()
                with timings.measure("update"), phase("update"):
                    update = joined(self.policy.update(batch, step))
                with phase("handoff"):
                    batch = self.policy.with_trained_logprobs(batch)
                    self._handoff = largest(self.policy.update_weights(step))
            return self._complete(step, batch, update, collected, start)

    @contextlib.contextmanager
    def _run_shown(self) -> Iterator[None]:
        """Notify callbacks and console of the start and end of `fit()`, and save what was learned if it fails."""
        self._notify("on_fit_start")
        if self.global_step >= self.max_steps:
            self._log.display.message(self._nothing_to_do())
        self._log.display.start(self.global_step)
        ends = (
            lambda begun=self.global_step: self._signal_watch.end(begun),
            lambda: self._notify("on_fit_end"),
            lambda: self._pictures.draw(self.global_step),
            lambda: self._log.stop(self.policy.lost_samples()),
        )
        try:
            yield
        except BaseException as error:  # errors from here on keep it as their context
            do_all(partial(self._end_run, error), *ends)
        else:
            do_all(*ends)

    def _nothing_to_do(self) -> str:
        done = f"nothing to do: step {self.global_step}, max_steps={self.max_steps}"
        more = "trainer.fit(steps=20) trains 20 more, and trainer.max_steps += 1 allows another trainer.step()"
        return f"{done}; {more} ({self.run_folder})"

    def _keep(self, batch: AnyBatch, step: int) -> None:
        """Start writing to the run folder, and save the rollout if that was asked for."""
        self._log.take_up()
        if self.config.save_rollouts or self.config.mode == "rollout":
            self.policy.save_rollout(batch, step, self.run_folder / "rollouts", must=self.config.mode == "rollout")

    def _commit(self) -> None:
        """Mark the point from which the weights change: Ctrl-C waits, and other Trainers of the module are warned."""
        self._guard.commit()
        self._note_training()

    def _complete(
        self, step: int, batch: AnyBatch, update: Mapping[str, float], collected: Collected, start: float
    ) -> StepResult:
        """Count the step, then log, evaluate and save as due. update: metrics of the optimizer steps."""
        self._global_step = step
        if self.config.mode != "rollout":
            self._policy_version = step
        self._num_tokens += int(batch["prompt_length"].sum() + batch["completion_length"].sum())
        self._guard.complete()
        metrics = {**update, **collected.metrics, **self._handoff, **largest(self.policy.memory_metrics())}
        metrics |= cost_metrics(batch, collected.timings, now() - start)
        metrics |= {"num_tokens": float(self.num_tokens), "epoch": self._sampler.epoch, **self._set_metrics}
        metrics |= self._save_metrics()
        if self.config.max_restarts:
            metrics["restarts"] = float(self._restarts.number)
        result = StepResult(readable(batch, self._run), Metrics(with_logged(metrics, collected.logged)))
        diverged = self._watch.look(step, result.metrics, self.policy.skipped_updates)
        self._signal_watch.look(step, result.metrics)
        self._after_step(result)
        if diverged is not None:
            raise diverged
        return result

    def _after_step(self, result: StepResult) -> None:
        """Evaluate, log and save. An error in the user's evaluation or callback is raised after log and checkpoint."""
        metrics, step = result.metrics, self.global_step
        self._last_metrics, self._is_unevaluated, self._owed = metrics, False, None
        is_last, eval_steps, save_steps = step == self.max_steps, self.config.eval.eval_steps, self.config.save_steps
        self._save_due |= save_steps is not None and (is_last or step % save_steps == 0)
        is_evaluated = is_last or (eval_steps is not None and step % eval_steps == 0)
        do_all(
            lambda: metrics.update(self._evaluate_step(metrics) if is_evaluated and self._run.data.eval else {}),
            lambda: self._note_best(metrics),
            lambda: self._log_samples(step, result.batch),
            lambda: self._log.metrics(step, metrics),
            self._save_if_due,
            lambda: self._best.write() if is_evaluated else None,
            lambda: self._pictures.look(step, metrics),
        )
        self._notify("on_step_end", step, result.batch, metrics)

    # ------------------------------------------------------------------------------ evaluation and generation

    @explained
    def generate(
        self,
        prompts: Sequence[Any] | Mapping[str, Any] | str,
        *,
        num_generations: int = 1,
        max_completion_length: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop_strings: Sequence[str] | None = None,
        seed: int = 0,
    ) -> list[Generation]:
        """Complete prompts (texts or lists of chat messages) with the current policy, num_generations each, in order.
        Instead of a prompt, a row of a dataset may be given, a dict whose other columns environments and agents get.

        max_completion_length, temperature and stop_strings default to those of the rollout; temperature 0 is greedy.
        The same seed gives the same samples. Raises AgentError if every trajectory ends with an error.
        """
        self._require_idle("generate")
        self._require_current()
        prompts = prompts_of(prompts)
        if not prompts:
            return []
        check_modes(self.config, learns=False)
        given = {"max_tokens": max_completion_length, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        given |= {"min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed}
        check_numbers(num_generations, given)
        rows, params = generation_of(self._run, prompts, given, stop_strings)
        call = (rows, num_generations, params, self.policy_version, self._state(self.global_step))
        with self._computing():
            batch = self.collector.rollout(*call, purpose="generate", is_scored=False).batch
        return generations_of(batch.load() if isinstance(batch, BatchRef) else batch)

    def plan(self, layouts: str | Path | None = None) -> RunPlan:
        """Return the plan of this run, as `hybrid-rl plan` prints it: print it, or leave it as the last line of a cell.

        layouts: a folder of traces of vLLM's loader (benchmarks/layouts), for the bytes of a handoff by link. Raises
        ModelError for a model whose memory cannot be counted.
        """
        return plan_prepared(self._run, None if layouts is None else Path(layouts))

    # --------------------------------------------------------------------------------------- saving and closing

    def save_memory_trace(self, path: str | Path) -> Path:
        """Write what was in memory on every rank over the last steps, and in which phase, as a JSON file for Perfetto
        (https://ui.perfetto.dev) or chrome://tracing. Returns its path."""
        self._require_open()
        return save_trace(self.policy.memory_history(), path)

    def _notify(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(self, *arguments)
            except StopIteration as error:
                raise HybridRLError(
                    f"{hook} of {type(callback).__name__} raised StopIteration; to end a run early call trainer.stop()"
                ) from error

    def _state(self, step: int) -> TrainerState:
        return TrainerState(step, self.max_steps, self._sampler.epoch)

    def _restore(self, checkpoint: Path) -> None:
        state = read_state(checkpoint, ("global_step", "num_tokens", "sampler"))
        if not self._is_made:  # at a restart, what was set on the live Trainer stays as it is
            self._carry_on(state)
            self._log.announce_resume(state)
        self.policy.load(checkpoint.resolve())
        try:
            self._sampler.load_state_dict(state["sampler"])
        except DataError as error:
            raise DataError(f"{checkpoint / STATE_FILE}: {error}") from error
        self._global_step, self._num_tokens = state["global_step"], state["num_tokens"]
        self._best.load_state_dict(state.get("best", {}))
        self._owed = state.get("owed")
        if "collector" in state:
            held = self.policy.held_prompts(self.global_step, checkpoint.resolve())
            self.collector.load_state_dict(state["collector"], held, self.global_step)

    def _log_samples(self, step: int, batch: AnyBatch) -> None:
        """Have each rank write its own samples; only the texts of a few come to the driver, to be shown."""
        first = (int(batch["group"].min()), int(batch["trajectory"].min()))
        if self.config.log_completions:
            shown = batch.select(range(min(self.config.log_completions, batch.num_samples)))
            self._log.samples(self.policy.records(shown, step, first))
        with self._timeline.phase("samples written"):
            self.policy.log_samples(batch, step, self._log.path, first)

    def _update_weights_again(self) -> None:
        self._handoff = largest(self.policy.update_weights_again(self.policy_version))
