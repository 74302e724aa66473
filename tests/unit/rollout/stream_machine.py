"""The stream of groups as a state machine: what a driver may do with it, in any order, in every form of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hybrid_rl.config import resolve
from hybrid_rl.config.load import load_config
from hybrid_rl.errors import ConfigError, PeerFailedError
from hybrid_rl.process import threads
from hybrid_rl.rollout import turns as engine_turns
from tests.unit.rollout.engine_runs import EngineRun, EngineSetting, MakeRig, Picture, Versions
from tests.unit.rollout.holding import RankFailedError, listen

PARTIAL, AHEAD = {"rollout.partial": True}, {"rollout.async_level": 1}
FORMS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "partial": PARTIAL,
    "partial, freshest first": {**PARTIAL, "buffer_order": "freshest"},
    "dropping": {**PARTIAL, "unfinished": "drop"},
    "one step off": AHEAD,
    "both": {**PARTIAL, **AHEAD},
    "ranks apart": AHEAD,
    "ranks apart, partial": {**PARTIAL, **AHEAD},
}
CHANGES: dict[str, tuple[str, Any]] = {
    "shorter": ("max_tokens", 5),
    "longer": ("max_tokens", 9),
    "other rewards": ("function", 1),
    "colder": ("temperature", 0.7),
    "other groups": ("num_generations", 2),
}
KINDS = {"completions": False, "agents": True}
BROKEN_OFF = (KeyboardInterrupt, RankFailedError, PeerFailedError)


@st.composite
def settings_of(draw: Any, form: str, has_agents: bool, most: int, most_ranks: int) -> EngineSetting:
    """Any setting of a form that the configuration allows. most: prompts of a step, and samples of each."""
    numbers = st.sampled_from([2, *{*range(1, most + 1)} - {2}])  # what is drawn first is seldom left out
    size, keys = draw(numbers), FORMS[form]
    keys = {"prompts_per_step": size, "learning_rate": 1e-3, "max_steps": 9, **keys}
    if "rollout.async_level" in keys:
        keys["rollout.async_level"] = draw(st.sampled_from([2, 1, 3]))
    if "rollout.partial" in keys:
        keys["oversample"] = draw(st.sampled_from([2 * size, 1, size, 0]))
    if form not in ("in turn", "dropping"):
        least = keys.get("rollout.async_level", 0) + -(-keys.get("oversample", 0) // size)
        keys["max_staleness"] = draw(st.sampled_from([least, None]))
    config = resolve(*load_config({name: value for name, value in keys.items() if value is not None})[:2])
    buffer: Any = config.buffer
    num_ranks, refills = draw(st.sampled_from([*range(most_ranks, 0, -1)])), draw(st.sampled_from([False, False, True]))
    return EngineSetting(
        size,
        max(2, draw(numbers)) if refills else draw(numbers),
        ahead=size * config.rollout.async_level,
        oversample=getattr(buffer, "oversample", 0) or 0,
        max_staleness=getattr(buffer, "max_staleness", 0) or 0,
        order=getattr(buffer, "buffer_order", "fifo"),
        check_steps=draw(st.sampled_from([2, 1, 8])),
        num_ranks=num_ranks,
        slots=draw(st.sampled_from([8, 2, 4])),
        max_num_waiting=draw(st.sampled_from([4, 100])),
        is_shared=draw(st.booleans()),
        drops=form == "dropping",
        is_apart=form.startswith("ranks apart"),
        max_refills=200 if refills else 0,
        is_in_turn=form == "in turn",
        max_tokens=16 if has_agents else 10,
        has_agents=has_agents,
        tool_seconds=draw(st.sampled_from([0.0, 0.0, 0.004])) if has_agents else 0.0,
        max_open=draw(st.sampled_from([None, 3, 1])) if has_agents else None,
    )


class StreamMachine(RuleBasedStateMachine):
    """A run in one form. Its model is the run that nothing happens to, and what `EngineRun` checks of every step."""

    def __init__(
        self, form: str, kind: str, folder: Path, make_rig: MakeRig, versions: Versions, most: int, most_ranks: int
    ) -> None:
        super().__init__()
        self._drawn = settings_of(form, KINDS[kind], most, most_ranks)
        self._most_ranks, self._has_agents, self._is_partial = most_ranks, KINDS[kind], "rollout.partial" in FORMS[form]
        self._make: Callable[[str, EngineSetting], EngineRun] = lambda name, setting: EngineRun(
            setting, folder / name, make_rig, versions
        )
        self._patch = pytest.MonkeyPatch()

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        """Start a run, and save it."""
        self.setting = setting = data.draw(self._drawn)
        self.run = self._playing = self._make("run", setting)
        listen(self._patch, lambda: self._playing.script)
        self._patch.setattr(threads, "WATCH_SECONDS", 0.0)
        look = threads.LoopWatch.look
        self._patch.setattr(threads.LoopWatch, "look", lambda watch: (look(watch), self._playing.script.watch()))
        if setting.tool_seconds:
            self._patch.setattr(engine_turns, "PATIENCE_SECONDS", 0.001)
        self.is_published, self.is_disturbed = True, setting.is_apart or not (setting.ahead + setting.oversample)
        # Up to which step the run is that of the model; what was changed, by the step after which it was.
        self.num_alike: float = 0 if setting.tool_seconds else 10**9
        self.changes = dict[int, dict[str, Any]]()
        self._save()

    def _save(self) -> None:
        self.run.save()
        changes = {step: dict(change) for step, change in self.changes.items()}
        self._saved = self.num_alike, self.run.num_ranks, changes

    @property
    def _least_bound(self) -> int:
        """The smallest bound that the configuration allows."""
        setting = self.setting
        return setting.ahead // setting.num_prompts + -(-setting.oversample // setting.num_prompts)

    @property
    def _num_held(self) -> int:
        return sum(len(rank.held(self.run.step)) for rank in self.run.ranks)

    def _differs(self) -> None:
        """What comes now need not be what the model makes."""
        self.num_alike = min(self.num_alike, self.run.step)

    def _is_ready(self) -> bool:
        return self.is_published and self.run.pending is None

    # ---------------------------------------------------------------------------------------------------- a step

    @precondition(_is_ready)
    @rule()
    def take(self) -> None:
        """Submit prompts, generate until enough of them are whole, and take the batch."""
        self.run.one_step()
        self.is_published = False

    @precondition(_is_ready)
    @rule(data=st.data(), number=st.integers(1, 30))
    def break_off(self, data: Any, number: int) -> None:
        """Take a batch; meanwhile a rank is interrupted or fails, or the step is taken back when its batch has come."""
        run, script = self.run, self.run.script
        rank, is_shared = data.draw(st.integers(0, run.num_ranks - 1)), run.setting.is_shared and run.num_ranks > 1
        faults = ["late interrupt", "interrupt", "agent" if self._has_agents else "interrupt"]
        fault = data.draw(st.sampled_from(faults if is_shared else [*faults, "engine"]))
        if fault == "interrupt":
            script.looks = {rank: number // 2 + 1}
        elif fault == "engine":  # of a shared one it ends the run
            script.engine_steps = {rank: number}
        elif fault == "agent":
            script.watches = {rank: number}
        self.is_disturbed = True
        has_held = bool(self._num_held)
        try:
            run.one_step(scores=fault != "late interrupt")
            self.is_published = False
        except BROKEN_OFF:
            if self._has_agents and has_held:
                self._differs()

    @precondition(lambda self: not self.is_published and self.run.pending is not None)
    @rule(looks=st.sampled_from([None, None, 1, 2, 5]), interrupted=st.sampled_from([0, 0, 0, 1, 3]))
    def go_ahead(self, looks: int | None, interrupted: int) -> None:
        """Ranks that only generate begin the next batch, until it is whole, newer weights come or they are stopped."""
        run = self.run
        if run.pending[1].version == run.step:  # it was broken off for these weights
            run.publish()
        if not self._is_partial:
            looks = None
        if interrupted:
            run.script.looks = {run.num_ranks - 1: interrupted}
        if run.go_ahead(looks) or interrupted:
            self._differs()
        run.script.forgive()

    @precondition(lambda self: not self.is_published)
    @rule(saves=st.sampled_from([True, False]))
    def publish(self, saves: bool) -> None:
        """Give the engines the weights of the step, and perhaps write a checkpoint. Ranks that generate beside it end
        what they do, or take the weights."""
        run = self.run
        while run.pending is not None:
            run.publish() if run.pending[1].version == run.step else None
            run.go_ahead()
        run.publish()
        self.is_published = True
        if saves:
            self._save()

    # ------------------------------------------------------------------------------------------- between two steps

    @precondition(_is_ready)
    @rule(action=st.sampled_from(["evaluate", *CHANGES]))
    def pause(self, action: str) -> None:
        """Evaluate, or set something else."""
        if action == "evaluate":
            self.run.evaluate()
            self.is_disturbed = True
        else:
            self._change(*CHANGES[action])

    def _change(self, name: str, value: Any) -> None:
        """Set something else. What is held has one size of groups and one temperature."""
        run, is_fixed = self.run, name in ("temperature", "num_generations")
        if is_fixed and self._num_held and getattr(run.setting, name) != value:
            with pytest.raises(ConfigError, match=f"{name}=.* cannot be joined with the groups that are held"):
                run.change(**{name: value})
            return
        run.change(**{name: value})
        self.changes[run.step] = self.changes.get(run.step, {}) | {name: value}
        if self._has_agents and self._num_held:
            self._differs()

    @precondition(lambda self: self.run.step > self.run.saved[0])
    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        """Lose everything but the checkpoint, and resume: perhaps on other ranks, or with another bound, which is
        refused if what is held would be too old for it."""
        run = self.run
        num_ranks = data.draw(st.sampled_from([None, None, *range(1, self._most_ranks + 1)])) or run.num_ranks
        before, bound = run.saved[3], None
        if not (run.setting.drops or run.setting.is_in_turn):
            bound = data.draw(st.sampled_from([None, None, *range(self._least_bound, self._least_bound + 3)]))
        self.num_alike, before_ranks, changes = self._saved
        is_same = num_ranks == before_ranks
        self.changes = {step: dict(change) for step, change in changes.items()}
        try:
            run.kill(num_ranks, **({} if bound is None else {"max_staleness": bound}))
            is_same = is_same and bound in (None, before.max_staleness)
        except ConfigError as error:
            assert bound is not None and "is too small for" in str(error) and self._is_too_old(bound)
            run.kill(num_ranks)
        else:
            assert bound is None or not self._is_too_old(bound)
        self.is_published, self.is_disturbed = True, True
        if not is_same or (self._has_agents and self._num_held):
            self._differs()

    def _is_too_old(self, bound: int) -> bool:
        """Whether steps that take the oldest first would be too late for what is held."""
        run = self.run
        oldest = sorted(
            run.step if group.oldest_version is None else group.oldest_version
            for rank in run.ranks
            for group in rank.held(run.step)
        )
        return any(
            run.step + place // run.setting.num_prompts > version + bound for place, version in enumerate(oldest)
        )

    # -------------------------------------------------------------------------------------------------- the model

    @invariant()
    def is_sound(self) -> None:
        """Between any two of these, nothing is lost, left or too old."""
        if hasattr(self, "run"):
            self.run.check()

    def teardown(self) -> None:
        """The steps that stayed are those of a run that was left alone."""
        try:
            if hasattr(self, "run"):
                self.run.close()
                if self.is_disturbed:
                    self._compare()
        finally:
            self._patch.undo()

    def _compare(self) -> None:
        steps = self.run.steps[: int(min(self.num_alike, len(self.run.steps)))]
        if not steps:
            return
        setting = replace(self.setting, picture=Picture())
        if not setting.oversample:
            if not setting.ahead:
                setting = replace(setting, is_in_turn=True, drops=False)
            elif not setting.max_refills:
                setting = replace(setting, is_apart=False)
        # Which requests run beside each other changes last bits.
        gap = 1e-5 if self._has_agents or setting.is_apart != self.setting.is_apart else 0.0
        self._playing = model = self._make("model", setting)
        for step, expected in enumerate(steps):
            model.change(**self.changes.get(step, {}))
            model.one_step()
            while model.pending is not None:
                model.go_ahead()
            made = model.steps[-1]
            assert (made.version, made.samples.keys()) == (expected.version, expected.samples.keys())
            for key, (ids, versions, reward, logprobs) in expected.samples.items():
                assert made.samples[key][:3] == (ids, versions, reward)
                assert made.samples[key][3] == pytest.approx(logprobs, abs=gap)
        model.close()


def play(
    form: str, kind: str, folder: Path, make_rig: MakeRig, versions: Versions, num_examples: int, **sizes: int
) -> None:
    """Run the machine in a form, for a long time or a short one. sizes: as in StreamMachine."""
    is_long = num_examples > 2
    sizes = {"most": 3, "most_ranks": 3} | sizes if is_long else {"most": 2, "most_ranks": 2} | sizes
    run_state_machine_as_test(
        lambda: StreamMachine(form, kind, folder, make_rig, versions, **sizes),
        settings=settings(
            max_examples=(1 if KINDS[kind] else 2) * num_examples,  # agents take long
            stateful_step_count=24 if is_long else 14,
            phases=[Phase.generate],  # to shrink an example takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
