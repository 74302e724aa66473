"""Changes of a Trainer between training steps: which are safe, how they are checked, and what a resumed run makes of
them."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rl.checkpoint.rotation import delete_oldest
from hybrid_rl.compat.transformers import mark_adapted
from hybrid_rl.config import TrainerConfig, to_dict
from hybrid_rl.config.changes import differing
from hybrid_rl.config.habits import habit_of
from hybrid_rl.config.load import leaf_names
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.errors import ConfigError
from hybrid_rl.logging.run_log import RunLog
from hybrid_rl.models.lora.plain import is_adapted
from hybrid_rl.process.interrupts import deferred_interrupt
from hybrid_rl.rewards import RewardList, RewardModelEntry, with_model_entries
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.rollout.successes import Grades
from hybrid_rl.run.agents import reward_sources
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.causes import Scoring
from hybrid_rl.run.changed import ANOTHER, SAMPLED, changed_config, leaves_of
from hybrid_rl.run.checks import check_rewards
from hybrid_rl.run.missing import ALIASES, attribute_advice, callback_advice
from hybrid_rl.run.others import ARGUMENTS, Tenant
from hybrid_rl.run.prepare import Run, sampling_params
from hybrid_rl.run.signature import KeySignature
from hybrid_rl.run.start import make_collector
from hybrid_rl.run.watch import SignalWatch
from hybrid_rl.workers.groups import PolicyGroup
from hybrid_rl.workers.setup import RewardSetup

logger = logging.getLogger("hybrid_rl")

# What may be set on a Trainer between two steps, and what that does. All else is built into models, engines, memory or
# the order of the data.
LIVE: Mapping[str, str] = {
    "learning_rate": "the new peak; the schedule goes on from where it is",
    "critic_learning_rate": "the same for the critic",
    "weight_decay": "from the next update",
    "max_grad_norm": "from the next update; None = never clip",
    "beta": "weight of the KL penalty, above 0 and only in a run that began with one; an adaptive one restarts from it",
    "epsilon": "lower clipping bound, of a policy loss that has one",
    "epsilon_high": "upper clipping bound, of a policy loss that has one",
    "entropy_coef": "weight of the entropy bonus; an adaptive one restarts from it",
    "temperature": "of the rollouts, and of training on them; generate() uses it too",
    "num_generations": "completions per prompt",
    "max_completion_length": "up to the one that the run began with, for which engine and memory were planned",
    "max_refills": "rollouts that may replace groups without a signal",
    "reward_funcs": "functions or judges; they are checked like those of the start",
    "reward_weights": "one weight per function; with another number of functions set both by trainer.set(...)",
    "max_reward_failure_share": "share of samples that may have no reward",
    "eval_steps": "evaluate every n steps",
    "eval_temperature": "of evaluation; 0 = greedy, and the next four are forgotten",
    "eval_top_p": "of sampled evaluation",
    "eval_top_k": "of sampled evaluation",
    "eval_min_p": "of sampled evaluation",
    "num_generations_eval": "completions per prompt of sampled evaluation",
    "success_reward": "what counts as a success",
    "save_steps": "save every n steps; None = never",
    "log_completions": "completions on the console after each step",
    "callbacks": "instances of Callback",
    "max_steps": "the length of the run; a linear or cosine schedule stretches with it",
}
NOT_KEYS = ("reward_funcs", "callbacks", "max_steps")
PARTS = ("policy", "collector", "module", "run_folder")  # of a Trainer, which it works with
BY_LENGTH = ("linear", "cosine")  # schedules that depend on the length of the run
REWARDS, LENGTH = "reward_funcs", "max_steps"


@dataclass(frozen=True)
class Change:
    """A key that was set after a training step, as a checkpoint records it. key: its path, or `reward_funcs`, whose
    values are the names of the functions."""

    step: int
    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {self.was} -> {self.now}"


class Live(Tenant):
    """The base of Trainer whose settings can be changed between training steps: `trainer.learning_rate = 1e-4`."""

    __signature__ = KeySignature()

    learning_rate: float
    critic_learning_rate: float
    weight_decay: float
    max_grad_norm: float | None
    beta: float
    epsilon: float
    epsilon_high: float | None
    entropy_coef: float
    temperature: float
    num_generations: int
    max_completion_length: int
    max_refills: int
    reward_weights: Sequence[float] | None
    max_reward_failure_share: float
    eval_steps: int | None
    eval_temperature: float
    eval_top_p: float
    eval_top_k: int
    eval_min_p: float
    num_generations_eval: int
    success_reward: float | None
    save_steps: int | None
    log_completions: int

    policy: PolicyGroup
    collector: Collector
    _run: Run
    _log: RunLog
    _sampler: PromptSampler
    _signal_watch: SignalWatch
    _callbacks: tuple[Callback, ...] = ()
    _changed: tuple[Change, ...] = ()
    _first_length = 0  # max_completion_length at the start
    _is_stopping = False

    @property
    def reward_funcs(self) -> tuple[Any, ...]:
        """The reward functions, as given. Assign a function or a list to score with others from the next step on."""
        setup = self._run.rewards
        return tuple(setup.functions[: len(setup.functions) - setup.num_added - setup.num_sources])

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """The callbacks, in the order in which they are called. Assign a list to call others."""
        return self._callbacks

    def set(self, **changes: Any) -> None:
        """Change settings between training steps, those given together in one go: `trainer.set(reward_funcs=[a, b],
        reward_weights=[1, 0.2])`. `trainer.temperature = 0.7` is short for a single one.

        Every rank, config.yaml, the metrics (`set/...`) and later checkpoints follow.

        Raises ConfigError for what cannot be changed, or not to this value, before anything is changed, and
        EngineStateError inside a step.
        """
        for name in changes:
            if name not in LIVE:
                raise ConfigError(self._refusal(name))
        self._require_open()
        callbacks = checked_callbacks(changes["callbacks"]) if "callbacks" in changes else self._callbacks
        length = checked_length(changes["max_steps"]) if "max_steps" in changes else None
        keys = {name: value for name, value in changes.items() if name not in NOT_KEYS}
        if keys or REWARDS in changes:
            self._require_idle(f"set {' and '.join(changes)}")
            self._set_keys(keys, changes)
        object.__setattr__(self, "_callbacks", callbacks)
        if length is not None:
            self.__setattr__("max_steps", length)

    def _set_keys(self, keys: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Set keys of the configuration, and reward functions if `changes` has them, all or none of them."""
        config = changed_config(self._run, keys, self._first_length)
        rewards = names = None
        if REWARDS in changes:
            rewards, names = self._checked_rewards(changes[REWARDS], config)
        made = list(self._differences(config))
        if names is not None:
            made.append(Change(self.global_step, REWARDS, self._run.reward_names, names))
        if made:
            self._apply(config, made, rewards, names)
            for change in made:
                self._log.display.message(f"set after step {change.step}: {change}")

    def stop(self) -> None:
        """End `fit()` after the step that is running: for callbacks. What save_steps promises is saved; a later `fit()`
        goes on. Does nothing outside of `fit()`."""
        self._is_stopping = bool(self._work)

    def _apply(
        self,
        config: TrainerConfig,
        made: Sequence[Change] = (),
        rewards: RewardSetup | None = None,
        names: list[str] | None = None,
    ) -> None:
        """Go on with this configuration, everywhere. made: what differs; rewards, names: of other reward functions."""
        run = self._run
        training, evaluating = sampling_params(config, run.train_params.stop_token_ids)
        params: dict[str, Any] = {"train_params": training, "eval_params": evaluating, "max_steps": self.max_steps}
        scoring: dict[str, Any] = {"rewards": rewards or run.rewards, "reward_names": names or run.reward_names}
        after = dataclasses.replace(run, config=config, **params, **scoring)
        is_other = rewards is not None or config.rewards != run.config.rewards
        if rewards is not None:
            after = dataclasses.replace(after, grades=Grades())
        num_steps = after.num_optimizer_steps, after.num_critic_steps
        collector = make_collector(after, self.policy, self._sampler).after(self.collector)
        with deferred_interrupt():  # or the ranks would have the new settings, and the driver the old ones
            self.policy.reconfigure(config, num_steps, after.rewards if is_other else None)
            self._run, self._changed = after, (*self._changed, *made)
            object.__setattr__(self, "config", config)
            object.__setattr__(self, "collector", collector)
            if is_other or config.algorithm != run.config.algorithm:
                self._signal_watch = SignalWatch(config, Scoring.of(after))
            self._log.change(config, [f"after step {change.step}: {change}" for change in self._changed])

    def _differences(self, config: TrainerConfig) -> Iterator[Change]:
        for path, was, now in differing(to_dict(self.config), to_dict(config)):
            yield Change(self.global_step, path, was, now)

    def _checked_rewards(self, given: Any, config: TrainerConfig) -> tuple[RewardSetup, list[str]]:
        """Check reward functions as at the start of a run. Raises ConfigError."""
        run = self._run
        entries = with_model_entries([] if given is None else given)
        models = [entry for entry in entries if isinstance(entry, RewardModelEntry)]
        if models:
            raise ConfigError(
                f"reward_funcs has the reward model {models[0].name!r}, which is loaded when a Trainer is made: set "
                f"functions and judges only. {ANOTHER}"
            )
        setup, names = check_rewards(
            given,
            config,
            run.rewards.available_columns,
            has_eval=bool(run.data.eval),
            sources=reward_sources(run.agents),
            has_environments=run.rewards.has_environments,
        )
        longest = run.max_length + self._first_length - run.config.rollout.max_completion_length
        if RewardList.of(setup.functions).max_length(longest) > RewardList.of(run.rewards.functions).max_length(
            longest
        ):
            raise ConfigError(
                "reward_funcs has a judge whose questions may be longer than what the engine was built for; lower its "
                f"max_tokens. {ANOTHER}"
            )
        return setup, names

    def _follow(self) -> None:
        """Let the run follow what was set on its parts or in passing: max_steps, and the weights of its datasets."""
        self._follow_length()
        self._follow_weights()

    def _follow_weights(self) -> None:
        """Record weights that were assigned to `train_dataset`, which draws by them already."""
        weights = self._sampler.assigned()
        if weights is None:
            return
        data = dataclasses.replace(self.config.data, dataset_weights=dict(weights))
        config = dataclasses.replace(self.config, data=data)
        change = Change(self.global_step, "data.dataset_weights", self.config.data.dataset_weights, dict(weights))
        if change.was != change.now:
            self._apply(config, [change])
            self._log.display.message(f"set after step {change.step}: {change}")

    def _follow_length(self) -> None:
        """Let configuration, display and the schedule of the learning rate follow max_steps if it was set since."""
        if self.max_steps == self._run.max_steps:
            return
        self._log.display.retotal(self.max_steps)
        schedule = self.config.optimizer.lr_scheduler_type
        change = Change(self.global_step, LENGTH, self._run.max_steps, self.max_steps)
        stretched = f"; the {schedule} schedule of the learning rate now ends there" if schedule in BY_LENGTH else ""
        self._apply(dataclasses.replace(self.config, max_steps=self.max_steps), [change])
        self._log.display.message(f"set after step {change.step}: {change}{stretched}")

    def _length_for(self, steps: int | None) -> int | None:
        """Return the step after which `fit(steps)` ends; None for max_steps, which is raised if it is below that."""
        if steps is None:
            return None
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"fit(steps={steps!r}): steps must be a whole number, at least 1")
        last = self.global_step + steps
        self.max_steps = max(self.max_steps, last)
        return last

    @property
    def _set_metrics(self) -> dict[str, float]:
        """The present value of every number that was set while the run was live, as `set/...`."""
        values = {change.key.rpartition(".")[2]: change.now for change in self._changed}
        for key, now in list(values.items()):
            if isinstance(now, Mapping):
                values |= {f"{key}/{name}": one for name, one in now.items()}
        return {f"set/{name}": float(now) for name, now in values.items() if isinstance(now, int | float)}

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _forget_old(self, *kept: Path | None) -> None:
        """Delete the checkpoints that save_total_limit does not allow, but not these, nor the one that was resumed."""
        delete_oldest(self.run_folder, self.config.checkpoints.save_total_limit, (*kept, self._run.resume))

    def _changes_state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint records of changes. A resumed run has the length that it is given."""
        self._follow_weights()
        return [dataclasses.asdict(change) for change in self._changed if change.key != LENGTH]

    def _carry_on(self, state: Mapping[str, Any]) -> None:
        """Go on with what was set while the resumed run was live: a key that still has the value with which that run
        began gets the one that it was set to. A key that was given another value keeps that."""
        records = [Change(**record) for record in state.get("changed", ())]
        mine = {change.key: change for change in records}
        first = {change.key: change.was for change in reversed(records)}
        names = mine.pop(REWARDS, None)
        if names is not None and names.now != self._run.reward_names:
            logger.warning(
                "after step %d the reward functions were set to %s, but this run has %s; pass the others to go on with "
                "them",
                *(names.step, ", ".join(names.now), ", ".join(self._run.reward_names)),
            )
        elif names is None and state.get("rewards", self._run.reward_names) != self._run.reward_names:
            logger.warning(
                "the resumed run had the reward functions %s, and this one has %s; pass the same to go on with them",
                *(", ".join(state["rewards"]) or "none", ", ".join(self._run.reward_names)),
            )
        flat = dict(leaves_of(self.config))
        wanted = {path: change.now for path, change in mine.items() if path in flat and flat[path] == first[path]}
        if not wanted:
            return
        keys = {path.rpartition(".")[2]: value for path, value in wanted.items()}
        config = changed_config(self._run, keys, self._first_length)
        self._apply(config, [change for change in records if change.key in wanted])
        self._log.display.message(
            "as set in the resumed run: "
            + ", ".join(f"{path} {first[path]} -> {mine[path].now} (after step {mine[path].step})" for path in wanted)
        )

    # -------------------------------------------------------------------------------------------------- attributes

    if not TYPE_CHECKING:  # or every misspelled attribute would pass the type checker

        def __getattr__(self, name: str) -> Any:
            """Return a setting that can be set, as it is now."""
            if name in LIVE and "config" in vars(self):
                for path, value in leaves_of(self.config):
                    if path.rpartition(".")[2] == name:
                        # Appending to the list itself would change the configuration unseen and unchecked.
                        return tuple(value) if isinstance(value, list) else value
                raise AttributeError(
                    f"trainer.{name}: this run has no such setting"
                    + (", it exists with eval_temperature above 0" if name in SAMPLED else "")
                    + " (trainer.config shows all)"
                )
            own = vars(self).get(ALIASES.get(name, name))
            if own is not None:
                if ALIASES.get(name) == "module" and is_adapted(own):
                    mark_adapted(own)  # a script saves it by its own method, which otherwise writes peft's wrappers
                return own
            advice = "" if name.startswith("_") else attribute_advice(name, dir(self))
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}" + (f": {advice}" if advice else "")
            )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *LIVE})

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made and not name.startswith("_"):
            if name == "max_steps":
                self._require_open()
                super().__setattr__(name, checked_length(value))
                if not self._is_busy:  # or the next step follows
                    self._follow_length()
                return
            if name in LIVE:
                self.set(**{name: value})
                return
            if refusal := self._refusal(name):
                raise ConfigError(refusal)
        super().__setattr__(name, value)

    def _refusal(self, name: str) -> str:
        """Return why an attribute cannot be set; "" for one that a user's own class may have."""
        what = f"trainer.{name} would do nothing"
        if name == "dataset_weights":
            return f"{what}: set trainer.train_dataset.weights, which holds from the next draw on"
        if name in PARTS:
            return f"trainer.{name} is what the Trainer works with, and cannot be replaced. {ANOTHER}"
        if name in ARGUMENTS or name in leaf_names():
            return f"{what}: it is fixed when a Trainer is made. {ANOTHER}"
        if hasattr(self, name) or type(self).__module__ != "hybrid_rl.trainer":
            return ""
        near = difflib.get_close_matches(name, LIVE, n=1)
        habit = habit_of(name)
        advice = habit.advice if habit else f"did you mean trainer.{near[0]}?" if near else ""
        return f"{what}: a Trainer has no such attribute" + (f"; {advice}" if advice else "")


def checked_length(steps: Any) -> int:
    """Return max_steps as an int. Raises ConfigError for what is no length."""
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise ConfigError(f"max_steps={steps!r} must be a whole number, at least 1")
    return int(steps)


def checked_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return callbacks as a tuple. Raises ConfigError for what is none."""
    given = (callbacks,) if isinstance(callbacks, Callback) else tuple(callbacks or ())
    for callback in given:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has {callback!r} of type {type(callback).__name__}: {callback_advice(callback)}"
            )
    return given
