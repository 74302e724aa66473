"""Agents on ranks that only generate: the same run as one step off in turn, with newer weights in the middle of turns,
environments that the ranks that train never make, and failures that are told."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.errors import AgentError, RewardError
from tests.distributed.test_rollout_ranks import WaitsForWeights, interrupt_twice, loaded
from tests.support.agents.callers import SUM_CALLS, SUM_KEYS, SUM_ROWS, Sums, build_policy
from tests.support.engines.replayed import gaps_by_version

pytestmark = pytest.mark.slow  # processes are started

POLICY: Any = {"favour": {"k": 8.0}}  # so that answers have some ten tokens
KEYS = {**SUM_KEYS, "save_steps": 1, "rollout_ranks": 1, "run_name": "run"}
IN_TURN = {"rollout_ranks": None, "rollout.async_level": 1}
PARTIAL = {"rollout.partial": True, "oversample": 3}


def note(what: str) -> None:
    """Note in a folder what happens in which process."""
    if folder := os.environ.get("NOTES"):
        (Path(folder) / f"{what}-{os.getpid()}").touch()


class NotedSums(Sums):
    """Sums that note where they are made and closed."""

    def __init__(self) -> None:
        super().__init__()
        note(f"made-{id(self)}")

    def close(self) -> None:
        note(f"closed-{id(self)}")


class Factory:
    """Makes them, and notes in which processes it arrives."""

    def __call__(self) -> NotedSums:
        return NotedSums()

    def __reduce__(self):
        return _arrived, ()


def _arrived() -> Factory:
    note("arrived")
    return Factory()


class SlowSums(NotedSums):
    """Sums that take their time."""

    def _seconds(self) -> float:
        return 0.02 * random.SystemRandom().random()


def long(completion_ids, trainer_state, **_):
    """Depends on the step that it is told."""
    return [len(ids) / 64 + trainer_state.global_step / 64 for ids in completion_ids]


@pytest.fixture
def make(tmp_path: Path, forked_ranks):
    made = []

    def make(reward=long, folder="runs", **keys) -> Trainer:
        keys = {**KEYS, "output_dir": str(tmp_path / folder), **keys}
        if "rollout_func" in keys:
            keys["max_tool_calling_iterations"] = None
        else:
            keys.setdefault("environment_factory", NotedSums)
        keys = {name: value for name, value in keys.items() if value is not None}
        model, tokenizer = build_policy(SUM_CALLS, **POLICY)
        made.append(Trainer(model, reward, SUM_ROWS, tokenizer=tokenizer, **keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def weights_at(trainer: Trainer, step: int) -> dict[str, torch.Tensor]:
    """The weights of a policy version, as the checkpoint of that step has them."""
    if not step:
        return build_policy(SUM_CALLS, **POLICY)[0].state_dict()
    return AutoModelForCausalLM.from_pretrained(trainer.run_folder / f"checkpoint-{step}").state_dict()


def numbers(batch) -> list[int]:
    """The rows of the dataset of the groups of a batch, one for each."""
    groups = dict(zip(batch["group"].tolist(), (row["number"] for row in batch["row"]), strict=True))
    return list(groups.values())


def held(trainer: Trainer, step: int) -> list[int]:
    return [prompt.row.columns["number"] for prompt in trainer.generating.held_prompts(step).values()]


@pytest.mark.sweep
def test_the_run_is_that_of_one_process_one_step_off(make, tmp_path):
    """With tools that answer at once: samples, versions, rewards and losses. Environments are on the rank that
    generates, and all are closed. Resumed, and with Ctrl-C before and after the weights change, no prompt is lost or
    used twice."""
    notes = tmp_path / "notes"
    notes.mkdir()
    one = make(folder="one", **IN_TURN)
    results = [one.step() for _ in range(4)]
    apart = make(environment_factory=Factory(), ray={"env_vars": {"NOTES": str(notes)}})
    again = [apart.step() for _ in range(4)]
    steps = [loaded(result.batch) for result in again]
    for ours, theirs, batch in zip(again, results, steps, strict=True):
        for name in ("completion_ids", "completion_mask", "policy_version"):
            assert torch.equal(batch[name].values, theirs.batch[name].values)
        assert torch.equal(batch["group"], theirs.batch["group"])
        assert torch.equal(batch["rewards"], theirs.batch["rewards"])
        for name in ("loss", "grad_norm", "staleness/mean_age", "buffer/held_tokens", "agents/turns_mean"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], abs=1e-5)
        assert 0 < ours.metrics["ranks/generating_busy"] <= 1 and ours.metrics["agents/open_max"] == 4
        assert ours.metrics["buffer/restarted_trajectories"] == 0
    assert sum(step.metrics["tools/call_frequency"] for step in again) > 1
    weights, others = {step: weights_at(apart, step) for step in range(4)}, []
    for version, batch in enumerate(steps):
        gap, other_gap, ages = gaps_by_version(build_policy(SUM_CALLS, **POLICY)[0], weights, batch, version)
        assert gap < 1e-5 and list(ages) == [min(version, 1)]
        others.append(other_gap)
    assert max(others) > 1e-2
    apart.close()
    made, closed, (rank,) = (
        sorted(path.name.removeprefix(what) for path in notes.glob(f"{what}-*"))
        for what in ("made", "closed", "arrived")
    )
    assert made == closed and made and all(name.endswith(rank) for name in made)
    kept = shutil.copytree(apart.run_folder / "checkpoint-2", tmp_path / "kept" / "checkpoint-2")
    resumed = make(folder="again", resume=str(apart.run_folder / "checkpoint-2"), max_steps=5)
    third = resumed.step()
    assert third.metrics["buffer/restarted_trajectories"] == 4
    in_turn = make(folder="turn", resume=str(kept), **IN_TURN)
    assert torch.equal(in_turn.step().batch["completion_ids"].values, loaded(third.batch)["completion_ids"].values)
    interrupt_twice(resumed)
    assert resumed.global_step == 4
    fifth = loaded(resumed.step().batch)
    used = [number for batch in (*steps, fifth) for number in numbers(batch)] + held(resumed, 5)
    assert len(set(used)) == len(used) == 6 * 2


def test_newer_weights_are_taken_in_the_middle_of_turns(make):
    """By two training ranks to one that generates, with tools that take time: every token has the version of the
    weights that made it, the bound holds, and prompts are used once, also after a resume. Evaluation and generate() run
    beside what is held, and the run can be replayed."""
    keys = {"environment_factory": SlowSums, "num_ranks": 2, **PARTIAL}
    evaluation = {"eval_dataset": SUM_ROWS[:2], "eval_steps": 2}
    trainer = make(WaitsForWeights(), save_rollouts=True, **keys, **evaluation)
    results = [trainer.step() for _ in range(4)]
    steps = [loaded(result.batch) for result in results]
    weights, ages = {step: weights_at(trainer, step) for step in range(4)}, Counter[int]()
    for version, batch in enumerate(steps):
        gap, _, found = gaps_by_version(build_policy(SUM_CALLS, **POLICY)[0], weights, batch, version)
        assert gap < 1e-5
        if version:  # no look is delayed before the first step
            ages.update(found)
    mixed = sum(len({*row.tolist()} - {-1}) > 1 for batch in steps for row in batch["policy_version"])
    assert mixed and ages[0] > 10 and max(ages) <= trainer.config.buffer.max_staleness
    assert "eval/reward" in results[1].metrics and "eval/reward" in results[3].metrics
    assert len(trainer.generate([SUM_ROWS[0], SUM_ROWS[1]], max_completion_length=4)) == 2
    used = [number for batch in steps for number in numbers(batch)]
    assert len(set(used)) == len(used)
    now = held(trainer, 4)
    assert len(now) == 2 + 3 and not {*now} & {*used}
    trainer.close()
    resumed = make(folder="again", resume=str(trainer.run_folder / "checkpoint-4"), **{**keys, "max_steps": 5})
    step = resumed.step()
    assert step.metrics["buffer/restarted_trajectories"] == 2 * 5
    used += numbers(loaded(step.batch))
    assert len({*used, *held(resumed, 5)}) == len(used) + 5
    saved = {"mode": "train", "rollouts_path": str(trainer.run_folder / "rollouts")}
    replayed = make(folder="replay", **keys, **saved)
    for result in results:
        again = replayed.step().metrics
        assert (again["loss"], again["grad_norm"]) == (result.metrics["loss"], result.metrics["grad_norm"])


def test_what_fails_on_ranks_that_generate_is_told(make):
    """A function that raises costs its trajectories, and too many of these end the run; an error that is to end the run
    does at once."""

    async def failing(rows, client, trainer_state):
        for row in rows:
            if row["number"] >= 4:  # of the third batch, which is made beside the second step
                raise ValueError("the lamp is broken")

        async def one(row, trajectory):
            await client.generate(row["prompt"], trajectory, max_tokens=2)

        return await client.each(rows, one)

    async def ending(rows, client):
        if rows[0]["number"] >= 4:
            raise AgentError("the lamp is gone")
        return await failing(rows, client, None)

    trainer = make(rollout_func=failing, **{"data.shuffle": False})
    trainer.step(), trainer.step()
    with pytest.raises(RewardError, match="the lamp is broken"):
        trainer.step()
    trainer = make(rollout_func=ending, folder="ending", **{"data.shuffle": False})
    trainer.step()
    with pytest.raises(AgentError, match="the lamp is gone") as raised:
        trainer.step()
    assert raised.value.__notes__[0].startswith("rollout rank 0 of 1 failed in go_ahead() at training step 2")
