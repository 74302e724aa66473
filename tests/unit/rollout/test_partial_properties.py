"""Partial rollouts under random schedules: nothing lost, nothing twice, no token too old, no rank that waits for ever,
and the same samples whatever broke off in between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hybrid_rl.errors import PeerFailedError
from tests.unit.rollout.holding import RankFailedError, Run, Script, Setting, listen, with_refills

NUM_STEPS = 5
BROKEN_OFF = (KeyboardInterrupt, RankFailedError, PeerFailedError)


def setting_of(rng: random.Random) -> Setting:
    """Any of the settings that validate allows (`_settled_buffer`), small."""
    num_prompts = rng.randint(1, 4)
    ahead = num_prompts * rng.randint(0, 1)
    oversample = rng.randint(0 if ahead else 1, 2 * num_prompts)
    least = ahead // num_prompts + -(-oversample // num_prompts)
    drops = not ahead and rng.random() < 0.2
    setting = Setting(
        num_prompts,
        rng.randint(1, 3),
        ahead,
        oversample,
        0 if drops else least + rng.choice((0, 0, 1, 3)),
        "fifo" if ahead or drops else rng.choice(("fifo", "freshest")),
        check_steps=rng.choice((1, 2, 8)),
        num_ranks=rng.randint(1, 4),
        slots=rng.randint(1, 8),
        max_num_waiting=rng.choice((4, 100)),
        is_shared=rng.random() < 0.3,
        drops=drops,
    )
    return with_refills(setting)


class Schedule:
    """One random run beside the same run without faults. scripts: those that are asked about interrupts."""

    def __init__(self, seed: int, folder: Path, scripts: list[Script]) -> None:
        self.rng, self.folder, self.scripts = random.Random(seed), folder, scripts
        self.setting = setting_of(self.rng)
        self.evaluates = [self.rng.random() < 0.2 for _ in range(NUM_STEPS)]

    def play(self) -> None:
        whole = self._run("whole", breaks=False)
        broken = self._run("broken", breaks=True)
        for mine, theirs in zip(broken.steps, whole.steps, strict=True):
            assert mine == theirs
        other = self.rng.randint(1, 4)  # ranks: the samples are as sound as any, but others
        broken.kill(other)
        self.scripts[:] = [broken.script]
        for _ in range(2):
            broken.one_step()
        broken.check_prompts()

    def _run(self, name: str, *, breaks: bool) -> Run:
        run, saved = Run(self.setting, self.folder / name), False
        self.scripts[:] = [run.script]
        while run.step < NUM_STEPS:
            if breaks:
                self._break(run.script, run.num_ranks)
            try:
                run.one_step(scores=not breaks or self.rng.random() > 0.1)
            except BROKEN_OFF:
                run.script.forgive()
                if saved and self.rng.random() < 0.4:
                    run.kill()
                continue
            run.script.forgive()
            run.check_prompts()
            if self.evaluates[run.step - 1]:
                run.evaluate()
            if not saved or not breaks or self.rng.random() < 0.6:
                run.save()
                saved = True
            if breaks and self.rng.random() < 0.15:
                run.kill()
        run.save()
        return run

    def _break(self, script: Script, num_ranks: int) -> None:
        """Let a rank be interrupted or fail at some time in the next step, or never."""
        rank, chance = self.rng.randrange(num_ranks), self.rng.random()
        if chance < 0.25:
            script.looks = {rank: self.rng.randint(1, 12)}
        elif chance < 0.5 and not self.setting.is_shared:  # a shared engine that fails ends the run
            script.engine_steps = {rank: self.rng.randint(1, 30)}


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(20), id="20"),
        pytest.param(range(20, 10_000), id="10000", marks=[pytest.mark.sweep, pytest.mark.timeout(7200)]),
    ],
)
def test_random_schedules_lose_nothing_use_nothing_twice_and_keep_the_bound(seeds, tmp_path, monkeypatch):
    """Interrupted, failed and killed runs train on the samples of the whole one, with the same versions and rewards; a
    rank that waits for another for ever breaks a barrier."""
    scripts: list[Script] = []
    listen(monkeypatch, lambda: scripts[0])
    for seed in seeds:
        try:
            Schedule(seed, tmp_path / str(seed), scripts).play()
        except BaseException as error:
            error.add_note(f"seed {seed}: {setting_of(random.Random(seed))}")
            raise
