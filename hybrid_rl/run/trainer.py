"""The driver's training loop: rollout, rewards, advantages, update, handoff."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from hybrid_rl.batch import AnyBatch, BatchRef
from hybrid_rl.checkpoint.finding import resumed_folder
from hybrid_rl.config import TrainerConfig, ValueHeadConfig
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.errors import ConfigError, HybridRLError, do_all
from hybrid_rl.logging.run_log import RunLog, with_logged
from hybrid_rl.metrics.eval_samples import EvalSamples
from hybrid_rl.metrics.metric_sums import joined, largest, now
from hybrid_rl.process.hooks import extra
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.rollout.counters import Collected
from hybrid_rl.rollout.generations import Generation, generations_of
from hybrid_rl.run.adapters import with_adapters
from hybrid_rl.run.agent_checks import AgentArguments
from hybrid_rl.run.attributes import SLOTS, refusing, setting, shown
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.checks import check_modes
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.evaluator import RunEvaluator
from hybrid_rl.run.familiar import Driver, Familiar, State
from hybrid_rl.run.generation import check_numbers, generation_of, prompts_of
from hybrid_rl.run.memory_plan import planned
from hybrid_rl.run.missing import attribute_advice, explained
from hybrid_rl.run.position import Position
from hybrid_rl.run.prepare import Run, mini_batches, prepare
from hybrid_rl.run.recovery import Recovery
from hybrid_rl.run.rescue import Rescue
from hybrid_rl.run.restarts import check_restarts
from hybrid_rl.run.saver import Saver
from hybrid_rl.run.settings import Settings, checked_callbacks
from hybrid_rl.run.signature import KeySignature
from hybrid_rl.run.start import make_sampler, notes_of
from hybrid_rl.run.step_results import Metrics, StepResult, readable
from hybrid_rl.run.stopper import Stopper
from hybrid_rl.run.tenancy import Tenancy, bring_back, make_way, warn_of_training
from hybrid_rl.run.watch import broken_model_explained
from hybrid_rl.workers.groups import GeneratingGroup, PolicyGroup


@refusing
class Trainer:
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

    # No other attribute can be set: it would do nothing. A class of the user's has those that it likes.
    __slots__ = SLOTS
    __signature__ = KeySignature()

    config: TrainerConfig = shown("_crew.config")
    tokenizer: Any = shown("_crew.run.choice.tokenizer")
    module: nn.Module | None = shown("_crew.run.module")  # the user's own if it is trained in place
    train_dataset: PromptSampler = shown("_crew.sampler")  # of several datasets, `weights` can be assigned
    policy: PolicyGroup = shown("_crew.policy")  # the ranks that train
    generating: GeneratingGroup = shown("_crew.generating")  # and those that generate; the same if they take turns
    collector: Collector = shown("_crew.collector")
    run_folder: Path = shown("_crew.folder")  # of config.yaml, metrics.jsonl, samples.jsonl and checkpoints
    global_step: int = shown("_position.step")  # training steps completed
    num_tokens: int = shown("_position.num_tokens")  # of all samples so far, prompts included
    policy_version: int = shown("_position.policy_version")  # of the weights that the engine generates with
    evaluations: Mapping[str, EvalSamples] = shown("_evaluator.latest")  # by set, "" for a single one

    # What can be assigned between steps (`LIVE` says what that does), as `set` does for several at once.
    max_steps: int = setting()
    reward_funcs: tuple[Any, ...] = setting()
    callbacks: Sequence[Callback] = setting()
    learning_rate: float = setting()
    critic_learning_rate: float = setting()
    weight_decay: float = setting()
    max_grad_norm: float | None = setting()
    beta: float = setting()
    epsilon: float = setting()
    epsilon_high: float | None = setting()
    entropy_coef: float = setting()
    temperature: float = setting()
    num_generations: int = setting()
    max_completion_length: int = setting()
    max_refills: int = setting()
    reward_weights: Sequence[float] | None = setting()
    max_reward_failure_share: float = setting()
    eval_steps: int | None = setting()
    eval_temperature: float = setting()
    eval_top_p: float = setting()
    eval_top_k: int = setting()
    eval_min_p: float = setting()
    num_generations_eval: int = setting()
    success_reward: float | None = setting()
    save_steps: int | None = setting()
    log_completions: int = setting()

    # Names of TRL and transformers.
    args, processing_class, processor = config, tokenizer, tokenizer
    model: Any = shown("_familiar.module")
    model_wrapped = model
    state: State = shown("_familiar.state")
    save_model: Any = shown("_familiar.save_model")
    push_to_hub: Any = shown("_familiar.push_to_hub")
    log_metrics: Any = shown("_familiar.log_metrics")
    save_metrics: Any = shown("_familiar.save_metrics")
    save_state: Any = shown("_familiar.save_state")
    is_world_process_zero: Any = shown("_familiar.is_world_process_zero")
    is_local_process_zero = is_world_process_zero
    accelerator = Driver()
    is_fsdp_enabled = is_deepspeed_enabled = False  # of accelerate's plugins, for which scripts ask

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
        model, overrides = with_adapters(model, peft_config, overrides)
        hooks, agents = checked_callbacks(callbacks), AgentArguments(tools, environment_factory, rollout_func, agent)
        arguments = model, tokenizer, reward_funcs, train_dataset, eval_dataset, config, overrides
        bring_back(model)
        with contextlib.ExitStack() as closing:
            run = prepare(*arguments, reward_processing_classes, agents, closing=closing)
            self._start(planned(run), hooks, closing)
            self._tenancy.enter(closing.pop_all())

    def _start(self, run: Run, callbacks: tuple[Callback, ...], closing: contextlib.ExitStack) -> None:
        """Make the parts of the run, and start its workers."""
        check_restarts(run.config, is_in_place=run.module is not None)
        make_way(run.config, resumed_folder(run.config.resume, run.config.output_dir, run.config.run_name))
        warn_of_training(run.module, is_resumed=run.checkpoint is not None)
        sampler = make_sampler(run)
        self._position = position = Position(run.max_steps)
        self._log = log = RunLog(run.config, run.max_steps, run.checkpoint, run.lock, run.about)
        closing.callback(log.close)
        for note in [*notes_of(run), *run.memory.notes]:
            log.display.message(note)
        self._crew = crew = Crew(run, log, sampler, position)
        closing.callback(crew.end)
        self._tenancy = tenancy = Tenancy(run.config, run.module, log.path, crew.guard, position, crew.publish_again)
        self._settings = Settings(crew, tenancy, callbacks)
        self._saver = saver = Saver(crew, tenancy, self._settings, self._notify)
        self._stopper = Stopper(crew, tenancy, saver)
        self._evaluator = RunEvaluator(crew, tenancy, saver, self._stopper, self._notify)
        self._recovery = Recovery(crew, tenancy, saver, self._stopper, self._settings)
        self._rescue, self._familiar = Rescue(crew, tenancy, saver), Familiar(crew, saver)
        crew.start(saver.finish, self._settings.carry_on)
        self._view = extra("run_view")(crew, tenancy)  # the last one: with it the Trainer is whole

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
        self._recovery.make_again()
        self._tenancy.require_idle("call fit()")
        stopper, last, begun = self._stopper, self._settings.length_for(steps), self.global_step
        stopper.begin(is_whole=steps is None)
        with stopper.listening(), self._tenancy.working("fit()"), self._run_shown():
            for attempt in self._recovery.attempts():
                with attempt:
                    if stopper.has_steps(last):
                        stopper.stop.check()
                    self._evaluator.at_start()
                    while stopper.has_steps(last):
                        stopper.stop.check()
                        self.step()
                    self._saver.end(keeps_last=steps is None and self.global_step > begun)
                    if steps is None:
                        self._evaluator.load_best()
        if self.global_step > begun:
            self._rescue.note_fitted()
        return Metrics(self._position.metrics)

    train = fit  # its name in TRL and transformers

    def steps(self) -> Iterator[StepResult]:
        """Yield the remaining training steps, one at a time."""
        while self.global_step < self.max_steps and not self._crew.best.is_over:
            yield self.step()

    def step(self) -> StepResult:
        """Run one training step, log it, and evaluate and save as due.

        Ctrl-C before the update undoes the step; once the update has begun it waits until the step is logged.
        """
        crew, policy = self._crew, self.policy
        self._tenancy.require_idle("call step()")
        self._tenancy.require_current()
        check_modes(self.config)
        if self.global_step >= self.max_steps:
            raise ConfigError(f"{self._position.nothing_to_do} ({self.run_folder})")
        self._settings.follow()
        self._saver.look()
        start, step, phase = now(), self.global_step + 1, crew.timeline.phase
        policy.label = f"training step {step}"
        crew.turns.begin()
        with self._tenancy.working("step()"), self._settings.advising(), crew.guard.step(), crew.timeline.step(step):
            with broken_model_explained(policy.label, self.run_folder), phase("rollout"):
                collected = self.collector.take(self.policy_version, crew.state(step))
            batch, timings, update = collected.batch, collected.timings, dict[str, float]()
            crew.keep(batch, step)
            if self.config.mode != "rollout":
                batch = batch.with_columns(mini_batch=mini_batches(batch["group"], self.config, step))
                with timings.measure("logprobs"), phase("logprobs"):
                    batch = policy.score(batch, step)
                with phase("advantages"):
                    batch = policy.advantages(batch)
                crew.guard.commit()  # the weights change from here on: Ctrl-C waits
                self._tenancy.note_training()
                has_critic = isinstance(self.config.critic, ValueHeadConfig)
                with timings.measure("update"), phase("update"), crew.guard.update(has_critic=has_critic):
                    update = joined(policy.update(batch, step))
                with phase("handoff"):
                    batch = policy.with_trained_columns(batch)
                    crew.handoff = largest(self.generating.update_weights(step))
            return self._complete(step, batch, update, collected, start)

    @contextlib.contextmanager
    def _run_shown(self) -> Iterator[None]:
        """Notify callbacks and console of the start and end of `fit()`, and save what was learned if it fails."""
        crew, log, begun = self._crew, self._log, self.global_step
        self._notify("on_fit_start")
        if begun >= self.max_steps:
            log.display.message(f"{self._position.nothing_to_do} ({self.run_folder})")
        log.display.start(begun)
        ends = (
            lambda: crew.signal_watch.end(begun),
            lambda: self._notify("on_fit_end"),
            lambda: crew.pictures.draw(self.global_step),
            lambda: log.stop(crew.policy.lost_samples()),
        )
        try:
            yield
        except BaseException as error:  # errors from here on keep it as their context
            do_all(partial(self._stopper.end, error), *ends)
        else:
            do_all(*ends)

    def _complete(
        self, step: int, batch: AnyBatch, update: Mapping[str, float], collected: Collected, start: float
    ) -> StepResult:
        """Count the step, then log, evaluate and save as due. update: metrics of the optimizer steps."""
        crew, position = self._crew, self._position
        position.step = step
        if self.config.mode != "rollout":
            position.policy_version = step
        position.num_tokens += int(batch["prompt_length"].sum() + batch["completion_length"].sum())
        crew.guard.complete()
        metrics = {**update, **collected.metrics, **crew.handoff, **largest(crew.policy.memory_metrics())}
        metrics |= crew.costs(batch, collected.timings, now() - start, update)
        metrics |= {"num_tokens": float(position.num_tokens), "epoch": crew.sampler.epoch, **self._settings.metrics()}
        metrics |= self._saver.metrics() | self._recovery.metrics()
        result = StepResult(readable(batch, crew.run), Metrics(with_logged(metrics, collected.logged)))
        diverged = crew.watch.look(step, result.metrics, crew.policy.skipped_updates)
        crew.signal_watch.look(step, result.metrics)
        self._after_step(result)
        if diverged is not None:
            raise diverged
        return result

    def _after_step(self, result: StepResult) -> None:
        """Evaluate, log and save. An error in the user's evaluation or callback is raised after log and checkpoint."""
        crew, position, metrics = self._crew, self._position, result.metrics
        step, save_steps, eval_steps = position.step, self.config.save_steps, self.config.eval.eval_steps
        is_last = step == position.max_steps
        position.metrics, position.is_unevaluated, position.owed = metrics, False, None
        position.save_due |= save_steps is not None and (is_last or step % save_steps == 0)
        is_evaluated = is_last or (eval_steps is not None and step % eval_steps == 0)
        do_all(
            lambda: metrics.update(self._evaluator.after_step(metrics) if is_evaluated and crew.run.data.eval else {}),
            lambda: self._evaluator.note_best(metrics),
            lambda: crew.log_samples(result.batch, step),
            lambda: self._log.metrics(step, metrics),
            self._saver.save_if_due,
            lambda: crew.best.write() if is_evaluated else None,
            lambda: crew.pictures.look(step, metrics),
        )
        self._notify("on_step_end", step, result.batch, metrics)

    def _notify(self, hook: str, *arguments: Any) -> None:
        for callback in self._settings.callbacks:
            try:
                getattr(callback, hook)(self, *arguments)
            except StopIteration as error:
                raise HybridRLError(
                    f"{hook} of {type(callback).__name__} raised StopIteration; to end a run early call trainer.stop()"
                ) from error

    # ---------------------------------------------------------------------- evaluation, generation and settings

    @explained
    def evaluate(self, eval_dataset: Any = None) -> Metrics:
        """Compute rewards on eval_dataset, greedily unless configured otherwise; metric names begin with `eval/`, or
        with `eval/<set>/` if there are several sets.

        eval_dataset: other rows for this time, in any form that the Trainer takes. eval/accuracy is the share of
        samples that satisfy the first reward function (eval.success_functions). `evaluations` has the samples of the
        last call by set: with estimates() of accuracy, pass@k and majority@k, within() of budgets of tokens, and
        against() another evaluation of the same prompts. It prints as a table.
        """
        return self._evaluator.evaluate(eval_dataset)

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
        self._tenancy.require_idle("generate")
        self._tenancy.require_current()
        prompts = prompts_of(prompts)
        if not prompts:
            return []
        check_modes(self.config, learns=False)
        sampling_fields = {
            "max_tokens": max_completion_length,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
        }
        sampling_fields |= {"min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed}
        check_numbers(num_generations, sampling_fields)
        rows, params = generation_of(self._crew.run, prompts, sampling_fields, stop_strings)
        call = (rows, num_generations, params, self.policy_version, self._crew.state(self.global_step))
        with self._tenancy.computing():
            batch = self.collector.rollout(*call, purpose="generate", is_scored=False).batch
        return generations_of(batch.load() if isinstance(batch, BatchRef) else batch)

    def plan(self, layouts: str | Path | None = None) -> Any:
        """Return the plan of this run, as `hybrid-rl plan` prints it: print it, or leave it as the last line of a cell.

        layouts: a folder of traces of vLLM's loader (benchmarks/layouts), for the bytes of a handoff by link. Raises
        ModelError for a model whose memory cannot be counted.
        """
        return extra("plan_prepared")(self._crew.run, None if layouts is None else Path(layouts))

    def set(self, **changes: Any) -> None:
        """Change settings between training steps, those given together in one go: `trainer.set(reward_funcs=[a, b],
        reward_weights=[1, 0.2])`. `trainer.temperature = 0.7` is short for a single one.

        Every rank, config.yaml, the metrics (`set/...`) and later checkpoints follow.

        Raises ConfigError for what cannot be changed, or not to this value, before anything is changed, and
        EngineStateError inside a step.
        """
        self._settings.set(changes)

    def stop(self) -> None:
        """End `fit()` after the step that is running: for callbacks. What save_steps promises is saved; a later `fit()`
        goes on. Does nothing outside of `fit()`."""
        self._stopper.ask()

    # --------------------------------------------------------------------------------- saving, showing and closing

    def save(self, folder: str | Path | None = None, *, merged: bool = False) -> Path:
        """Write a checkpoint: weights and tokenizer as `from_pretrained` reads them, optimizer, position in the data.

        A run with adapters writes the adapter as peft reads it, and names its base model; one that was passed as a
        module is written once, into the run folder. merged: write the whole model with the adapter merged into it
        instead, by itself: nothing can be resumed from it.

        folder: default `checkpoint-<step>`, or `merged-<step>`, in the run folder. It is written completely or not at
        all. Raises CheckpointError if it cannot be written.
        """
        return self._saver.save(folder, merged=merged)

    def save_memory_trace(self, path: str | Path) -> Path:
        """Write what was in memory on every rank over the last steps, and in which phase, as a JSON file for Perfetto
        (https://ui.perfetto.dev) or chrome://tracing. Returns its path."""
        self._tenancy.require_open()
        return extra("save_memory_trace")(self.policy.memory_history(), path)

    def report(self, target: str | Path | None = None) -> Path:
        """Write one page of HTML about this run so far, and return its path. target: default report.html in the run
        folder."""
        return extra("write_report")(self.run_folder, target)

    def __repr__(self) -> str:
        name = type(self).__name__
        return self._view.text(name) if hasattr(self, "_view") else f"<{name} whose making failed>"

    def _repr_html_(self) -> str | None:
        return self._view.html() if hasattr(self, "_view") else None

    def __dir__(self) -> list[str]:
        """List what is there to be used or assigned, without the keys that are refused."""
        return [name for name in super().__dir__() if getattr(getattr(type(self), name, None), "path", name)]

    if not TYPE_CHECKING:  # or every misspelled attribute would pass the type checker

        def __getattr__(self, name: str) -> Any:
            """Say what to use in the place of a name that is not there."""
            if name in Trainer.__slots__:
                raise AttributeError("making this Trainer failed halfway; make a new one")
            advice = "" if name.startswith("_") else attribute_advice(name, dir(self))
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}" + (f": {advice}" if advice else "")
            )

    def close(self, reason: str = "") -> None:
        """Release workers, reward processes and trackers; a second call does nothing. reason: shown by later calls.

        A forked child has only a copy of the Trainer and releases nothing: everything belongs to the parent.

        Raises HybridRLError if a callback or reward function calls it while the Trainer is working.
        """
        self._tenancy.close(reason)

    end = close  # its name in transformers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            if any(isinstance(error, Exception) for error in raised):
                self._rescue.keep()
        finally:
            self.close()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # exit handlers have already run by then
            with contextlib.suppress(Exception):
                self.close()
