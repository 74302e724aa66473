"""Changes of a run between training steps: which are safe, how they are checked, and what a resumed run makes of
them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.config import TrainerConfig, to_dict
from hybrid_rl.config.changes import differing
from hybrid_rl.config.config_text import key_values
from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.shortage import KEY, pass_tokens
from hybrid_rl.process.interrupts import deferred_interrupt
from hybrid_rl.rewards import RewardModelEntry, with_model_entries
from hybrid_rl.rollout.successes import Grades
from hybrid_rl.run.agent_checks import reward_sources
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.causes import Scoring
from hybrid_rl.run.changed import ANOTHER, changed_config
from hybrid_rl.run.checks import check_rewards
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.missing import LIVE, callback_advice, refusal
from hybrid_rl.run.prepare import Run
from hybrid_rl.run.start import make_collector
from hybrid_rl.run.tenancy import Tenancy
from hybrid_rl.run.watch import SignalWatch
from hybrid_rl.workers.setup import RewardSetup

logger = logging.getLogger("hybrid_rl")

NOT_KEYS = ("reward_funcs", "callbacks", "max_steps")
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


class Settings:
    """What can be changed of a run between training steps, and what was."""

    def __init__(self, crew: Crew, tenancy: Tenancy, callbacks: tuple[Callback, ...] = ()) -> None:
        self._crew, self._position, self._log = crew, crew.position, crew.log
        self._tenancy, self.callbacks = tenancy, callbacks
        self._changed: tuple[Change, ...] = ()
        self._first_length = crew.config.rollout.max_completion_length

    @property
    def reward_funcs(self) -> tuple[Any, ...]:
        """The reward functions, as given."""
        setup = self._crew.run.rewards
        return tuple(setup.functions[: len(setup.functions) - setup.num_added - setup.num_sources])

    def value(self, name: str) -> Any:
        """Return a setting as it is now. Raises AttributeError if the run has none of this name."""
        if name in NOT_KEYS:
            return self._position.max_steps if name == LENGTH else getattr(self, name)
        for key in key_values(self._crew.config):
            if key.path.rpartition(".")[2] == name:
                # Appending to the list itself would change the configuration unseen and unchecked.
                return tuple(key.value) if isinstance(key.value, list) else key.value
        raise AttributeError(name)

    def set(self, changes: Mapping[str, Any]) -> None:
        """Change settings, those given together in one go.

        Raises ConfigError for what cannot be changed, or not to this value, before anything is changed, and
        EngineStateError inside a step.
        """
        for name in changes:
            if name not in LIVE:
                raise ConfigError(refusal(name))
        self._tenancy.require_open()
        callbacks = checked_callbacks(changes["callbacks"]) if "callbacks" in changes else self.callbacks
        length = checked_length(changes[LENGTH]) if LENGTH in changes else None
        keys = {name: value for name, value in changes.items() if name not in NOT_KEYS}
        if keys or REWARDS in changes:
            self._tenancy.require_idle(f"set {' and '.join(changes)}")
            self._set_keys(keys, changes)
        self.callbacks = callbacks
        if length is not None:
            self._position.max_steps = length
            if not self._tenancy.is_busy:  # or the next step follows
                self._follow_length()

    def _set_keys(self, keys: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Set keys of the configuration, and reward functions if `changes` has them, all or none of them."""
        config = changed_config(self._crew.run, keys, self._first_length)
        rewards = self._checked_rewards(changes[REWARDS], config) if REWARDS in changes else None
        made = list(self._differences(config))
        if rewards is not None:
            made.append(Change(self._position.step, REWARDS, self._reward_names, rewards.entries.names))
        if made:
            self._apply(config, made, rewards)
            for change in made:
                self._log.display.message(f"set after step {change.step}: {change}")

    @property
    def _reward_names(self) -> list[str]:
        return self._crew.run.rewards.entries.names

    def _apply(self, config: TrainerConfig, made: Iterable[Change] = (), rewards: RewardSetup | None = None) -> None:
        """Go on with this configuration, everywhere. made: what differs; rewards: other reward functions."""
        crew, run = self._crew, self._crew.run
        after = dataclasses.replace(run, config=config, max_steps=self._position.max_steps)
        is_other = rewards is not None or config.rewards != run.config.rewards
        if rewards is not None:
            after = dataclasses.replace(after, rewards=rewards, grades=Grades())
        num_steps = after.num_optimizer_steps, after.num_critic_steps
        collector = make_collector(after, crew.generating, crew.sampler).after(crew.collector, self._position.step)
        with deferred_interrupt():  # or the ranks would have the new settings, and the driver the old ones
            crew.generating.reconfigure(config, num_steps, after.rewards if is_other else None)
            crew.collector = collector
            if is_other or config.algorithm != run.config.algorithm:
                crew.signal_watch = SignalWatch(config, Scoring.of(after))
            self._record(after, made)

    def _record(self, after: Run, made: Iterable[Change]) -> None:
        """Take over a run with another configuration, here and in its folder."""
        self._crew.run, self._changed = after, (*self._changed, *made)
        self._log.change(after.config, [f"after step {change.step}: {change}" for change in self._changed])

    def _differences(self, config: TrainerConfig) -> Iterator[Change]:
        for path, was, now in differing(to_dict(self._crew.config), to_dict(config)):
            yield Change(self._position.step, path, was, now)

    def _checked_rewards(self, given: Any, config: TrainerConfig) -> RewardSetup:
        """Check reward functions as at the start of a run. Raises ConfigError."""
        run = self._crew.run
        entries = with_model_entries([] if given is None else given)
        models = [entry for entry in entries if isinstance(entry, RewardModelEntry)]
        if models:
            raise ConfigError(
                f"reward_funcs has the reward model {models[0].name!r}, which is loaded when a Trainer is made: set "
                f"functions and judges only. {ANOTHER}"
            )
        setup = check_rewards(
            given,
            config,
            run.rewards.available_columns,
            has_eval=bool(run.data.eval),
            sources=reward_sources(run.agents),
            has_environments=run.rewards.has_environments,
        )
        longest = self._longest
        if setup.entries.max_length(longest) > run.rewards.entries.max_length(longest):
            raise ConfigError(
                "reward_funcs has a judge whose questions may be longer than what the engine was built for; lower its "
                f"max_tokens. {ANOTHER}"
            )
        return setup

    @property
    def _longest(self) -> int:
        """The longest sample that this run may have, whatever max_completion_length is set to, in tokens."""
        run = self._crew.run
        return run.max_length + self._first_length - run.config.rollout.max_completion_length

    # ---------------------------------------------------------------------------------------- shortages of memory

    def smaller_micro_batch(self, error: BaseException) -> int | None:
        """Return the tokens_per_micro_batch with which passes are half as large as the one in which a rank among others
        ran out of memory, or as small as the longest sample allows; None for other errors, and if that is
        no help."""
        tokens = pass_tokens(error)
        half = max((tokens or 0) // 2, self._longest)
        return half if tokens is not None and half < tokens else None

    def shrink(self, tokens: int) -> None:
        """Go on with so many tokens in a micro-batch, on workers that are to be made again: those of now are lost."""
        run = self._crew.run
        optimizer = dataclasses.replace(run.config.optimizer, tokens_per_micro_batch=tokens)
        config = dataclasses.replace(run.config, optimizer=optimizer)
        self._record(dataclasses.replace(run, config=config), [*self._differences(config)])
        logger.warning(
            "memory ran out in a pass of one of several ranks: all go on with %s=%d, which makes passes smaller and "
            "gives the same gradient. Set it, and the next run begins so",
            *(KEY, tokens),
        )

    @contextlib.contextmanager
    def advising(self) -> Iterator[None]:
        """Add what to set to the error of a block in which a rank among others runs out of memory."""
        try:
            yield
        except Exception as error:
            tokens = self.smaller_micro_batch(error)
            if tokens is not None:
                error.add_note(
                    f"set {KEY}={tokens}: passes are smaller then, and the gradient is the same. With "
                    "max_restarts and save_steps, fit() does so by itself"
                )
            elif pass_tokens(error) is not None:
                error.add_note(
                    f"{KEY} cannot be lower: a sample may take {self._longest} tokens. Make prompts or completions "
                    "shorter, let memory.offload, memory.on_host or model.gradient_checkpointing make room, or use "
                    "more ranks"
                )
            raise

    # ------------------------------------------------------------------------------------------------ what follows

    def follow(self) -> None:
        """Let the run follow what was set on its parts or in passing: max_steps, and the weights of its datasets."""
        self._follow_length()
        self._follow_weights()

    def _follow_weights(self) -> None:
        """Record weights that were assigned to `train_dataset`, which draws by them already."""
        weights = self._crew.sampler.assigned()
        if weights is None:
            return
        before = self._crew.config
        data = dataclasses.replace(before.data, dataset_weights=dict(weights))
        config = dataclasses.replace(before, data=data)
        change = Change(self._position.step, "data.dataset_weights", before.data.dataset_weights, dict(weights))
        if change.was != change.now:
            self._apply(config, [change])
            self._log.display.message(f"set after step {change.step}: {change}")

    def _follow_length(self) -> None:
        """Let configuration, display and the schedule of the learning rate follow max_steps if it was set since."""
        was, length = self._crew.run.max_steps, self._position.max_steps
        if length == was:
            return
        self._log.display.retotal(length)
        schedule = self._crew.config.optimizer.lr_scheduler_type
        change = Change(self._position.step, LENGTH, was, length)
        stretched = f"; the {schedule} schedule of the learning rate now ends there" if schedule in BY_LENGTH else ""
        self._apply(dataclasses.replace(self._crew.config, max_steps=length), [change])
        self._log.display.message(f"set after step {change.step}: {change}{stretched}")

    def length_for(self, steps: int | None) -> int | None:
        """Return the step after which `fit(steps)` ends; None for max_steps, which is raised if it is below that."""
        if steps is None:
            return None
        last = self._position.step + checked_length(steps, "steps")
        self.set({LENGTH: max(self._position.max_steps, last)})
        return last

    def metrics(self) -> dict[str, float]:
        """The present value of every number that was set while the run was live, as `set/...`."""
        values = {change.key.rpartition(".")[2]: change.now for change in self._changed}
        for key, now in list(values.items()):
            if isinstance(now, Mapping):
                values |= {f"{key}/{name}": value for name, value in now.items()}
        return {f"set/{name}": float(now) for name, now in values.items() if isinstance(now, int | float)}

    # ------------------------------------------------------------------------------------------------- checkpoints

    def changes_state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint records of changes. A resumed run has the length that it is given."""
        self._follow_weights()
        return [dataclasses.asdict(change) for change in self._changed if change.key != LENGTH]

    def carry_on(self, checkpoint: Checkpoint) -> None:
        """Go on with what was set while the resumed run was live: a key that still has the value with which that run
        began gets the one that it was set to. A key that was given another value keeps that."""
        state = checkpoint.state
        records = [Change(**record) for record in state.get("changed", ())]
        mine = {change.key: change for change in records}
        first = {change.key: change.was for change in reversed(records)}
        names = mine.pop(REWARDS, None)
        if names is not None and names.now != self._reward_names:
            logger.warning(
                "after step %d the reward functions were set to %s, but this run has %s; pass the others to go on with "
                "them",
                *(names.step, ", ".join(names.now), ", ".join(self._reward_names)),
            )
        elif names is None and state.get("rewards", self._reward_names) != self._reward_names:
            logger.warning(
                "the resumed run had the reward functions %s, and this one has %s; pass the same to go on with them",
                *(", ".join(state["rewards"]) or "none", ", ".join(self._reward_names)),
            )
        flat = {key.path: key.value for key in key_values(self._crew.config)}
        wanted = {path: change.now for path, change in mine.items() if path in flat and flat[path] == first[path]}
        if not wanted:
            return
        keys = {path.rpartition(".")[2]: value for path, value in wanted.items()}
        config = changed_config(self._crew.run, keys, self._first_length)
        self._apply(config, [change for change in records if change.key in wanted])
        self._log.display.message(
            "as set in the resumed run: "
            + ", ".join(f"{path} {first[path]} -> {mine[path].now} (after step {mine[path].step})" for path in wanted)
        )


def checked_length(steps: Any, name: str = LENGTH) -> int:
    """Return a number of steps as an int. Raises ConfigError for what is no length."""
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise ConfigError(f"{name}={steps!r} must be a whole number, at least 1")
    return int(steps)


def checked_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return callbacks as a tuple. Raises ConfigError for what is none."""
    hooks = (callbacks,) if isinstance(callbacks, Callback) else tuple(callbacks or ())
    for callback in hooks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has {callback!r} of type {type(callback).__name__}: {callback_advice(callback)}"
            )
    return hooks
