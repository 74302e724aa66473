"""Partial rollouts in whole runs: versions are those of the weights, a step taken back begins again from what was held,
and what cannot be joined with held groups is refused."""

import asyncio
import gc
import json
import os
import random
import signal
import time
from collections import Counter

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.errors import CheckpointError, ConfigError, DataError, RewardError
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.engines.replayed import assert_learned_alike, gaps_by_version
from tests.support.inside.rollouts import lengths_of, open_groups
from tests.support.inside.workers import stream_of
from tests.support.tiny import build_model, build_tokenizer, spread, sums

KEYS = {
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion_length": 40,
    "stop_token_ids": [6, 7],  # so that completions end by chance, after some 14 tokens
    "learning_rate": 2e-2,
    "max_steps": 5,
    "rollout.partial": True,
}


@pytest.fixture
def make(tmp_path):
    """A Trainer whose completions end by chance, after some 14 tokens of 40."""
    made = []

    def make(folder="runs", reward_funcs=spread, rows=None, **keys):
        keys = {**KEYS, "output_dir": str(tmp_path / folder), "run_name": "run", **keys}
        made.append(Trainer(build_model(), reward_funcs, rows or sums(40), tokenizer=build_tokenizer(), **keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def count(completion_ids, **_):
    return [len(ids) for ids in completion_ids]


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def test_every_token_has_the_version_of_the_weights_that_made_it(make):
    """Replayed through the weights of each version, by the model's own forward pass."""
    trainer = make(oversample=2)
    weights, others, ages, num_mixed = {0: weights_of(trainer)}, [], Counter[int](), 0
    for step in range(1, KEYS["max_steps"] + 1):
        batch = trainer.step().batch
        weights[step] = weights_of(trainer)
        gap, other_gap, found = gaps_by_version(build_model(), weights, batch, step - 1)
        assert gap < 1e-5
        others.append(other_gap)
        ages.update(found)
        num_mixed += sum(len(set(row.tolist())) > 1 for row in batch["policy_version"])
    assert num_mixed  # completions were broken off and gone on with
    assert max(others) > 1e-2  # so weights of a neighbouring version would be noticed
    assert ages[1] > 50 and max(ages) <= trainer.config.buffer.max_staleness


def test_groups_that_teach_nothing_are_replaced_and_a_resumed_run_is_the_whole_one(make):
    """Half of all groups of two have equal rewards; no batch has one, no prompt is used twice, nothing is too old. The
    groups ahead were whole a step before they are trained on, and have the reward of that step."""

    def reward(completion_ids, trainer_state, **_):
        return [float(len(ids) % 2 * trainer_state.global_step) for ids in completion_ids]

    keys = {"max_refills": 30, "save_steps": 1, "reward_funcs": reward, "rows": sums(200)}
    keys |= {"oversample": 1, "rollout.async_level": 1}
    whole, whole_in = make("whole", **keys), set[float]()
    results, used = [whole.step() for _ in range(KEYS["max_steps"])], list[str]()
    for step, result in enumerate(results):
        rewards = torch.as_tensor(result.batch["rewards"]).view(2, 2)
        assert (rewards.min(1).values == 0).all() and (rewards.max(1).values > 0).all()
        whole_in |= {step + 1 - best for best in rewards.max(1).values.tolist()}
        used += [str(prompt) for prompt in result.batch["prompt"][::2]]
        oldest = min(min(row.tolist()) for row in result.batch["policy_version"])
        assert step - oldest <= whole.config.buffer.max_staleness
        assert torch.equal(result.batch["group"], result.batch["group"].sort().values)
    assert {0, 1} <= whole_in and min(whole_in) == 0
    assert len(set(used)) == len(used)
    assert sum(result.metrics["collect/groups_dropped"] for result in results) > 0
    assert {result.metrics["buffer/held_groups"] for result in results} == {3.0}
    broken = make("broken", **keys)
    for _ in range(3):
        broken.step()
    broken.close()
    resumed = make("broken", resume="auto", **keys)
    assert len(open_groups(resumed.collector, 3)) == 3
    resumed.fit()
    texts = [(trainer.run_folder / "samples.jsonl").read_text() for trainer in (whole, resumed)]
    assert texts[0] == texts[1] and texts[0].count("\n") == 20
    theirs = weights_of(whole)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(resumed).items())


def late(completion_ids, **_):
    """A reward that takes another time in every run."""
    time.sleep(0.05 * random.SystemRandom().random())
    return [len(set(ids)) / 8 for ids in completion_ids]


def test_a_replayed_run_learns_what_the_recorded_one_learned(make):
    keys = {"oversample": 1, "rollout.async_level": 1}
    recorded = make("recorded", late, save_rollouts=True, **keys)
    recorded.fit()
    replayed = make("replayed", late, mode="train", rollouts_path=str(recorded.run_folder / "rollouts"), **keys)
    replayed.fit()
    lines = assert_learned_alike(recorded, replayed)
    assert len(lines) == KEYS["max_steps"] and max(line["staleness/mean_age"] for line in lines) > 0


def test_a_run_that_drops_has_no_old_token_and_resumes_and_replays_to_the_bit(make):
    """Over two epochs: in the second, prompts start in the order of the lengths of the first."""
    keys = {"unfinished": "drop", "oversample": 2, "max_steps": 4, "rows": sums(8)}
    whole = make("whole", save_rollouts=True, **keys)
    whole.fit()
    lines = read_jsonl(whole.run_folder / "metrics.jsonl")[1:]
    assert [line["epoch"] for line in lines] == [0.5, 1.0, 1.5, 2.0]
    for line in lines:
        assert line["staleness/mean_age"] == 0 and line["buffer/dropped_groups"] == 2
        assert line["buffer/dropped_tokens"] > 0
    broken = make("broken", save_steps=1, **keys)
    for _ in range(3):
        broken.step()
    broken.close()
    resumed = make("broken", save_steps=1, resume="auto", **keys)
    assert len(lengths_of(resumed.collector).state_dict(3)) > 2
    resumed.fit()
    replayed = make("replayed", mode="train", rollouts_path=str(whole.run_folder / "rollouts"), **keys)
    replayed.fit()
    assert [line["epoch"] for line in read_jsonl(replayed.run_folder / "metrics.jsonl")[1:]] == [0.5, 1.0, 1.5, 2.0]
    texts = [(trainer.run_folder / "samples.jsonl").read_text() for trainer in (whole, resumed)]
    assert texts[0] == texts[1] and texts[0].count("\n") == 16
    theirs = weights_of(whole)
    for trainer in (resumed, replayed):
        assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(trainer).items())


def test_what_cannot_be_joined_with_held_groups_is_refused(make, tmp_path):
    trainer = make(oversample=2, save_steps=1)
    trainer.step()
    trainer.max_steps = 6
    trainer.learning_rate = 1e-3  # the groups that are held outlive a change
    before = trainer.collector
    with pytest.raises(
        ConfigError, match=r"temperature=0.7 cannot be joined with the groups .* temperature=1.0: leave"
    ):
        trainer.temperature = 0.7
    with pytest.raises(ConfigError, match=r"num_generations=4 cannot be joined with"):
        trainer.num_generations = 4
    assert trainer.collector is before and trainer.config.rollout.temperature == 1
    trainer.step()
    assert len(open_groups(trainer.collector, 2)) == 2
    trainer.close()
    saved = tmp_path / "runs" / "run" / "checkpoint-1"
    for refusal, match in (
        ({"rollout.partial": False}, r"the checkpoint holds 2 groups of samples .* would lose: resume with"),
        ({"unfinished": "drop"}, r"would lose: resume with .* and without unfinished=drop"),
        ({"temperature": 0.5, "oversample": 2}, r"temperature=0.5 cannot be joined"),
        (
            {"prompts_per_step": 1, "oversample": 1, "max_staleness": 1},
            r"max_staleness=1 is too small for the 2 groups .* to at least 2",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            make("others", resume=str(saved), **refusal)
    held = saved / "held-0000.json"
    groups = json.loads(held.read_text())
    for damage, match in ((groups[:1], "but its files have"), ([{"row": 3}], "is damaged")):
        held.write_text(json.dumps(damage))
        with pytest.raises(CheckpointError, match=match):
            make("others", resume=str(saved), oversample=2)


def test_what_is_held_outlives_the_weights_of_the_best_step(make):
    """Every prompt is trained on once, although the run goes on from the weights of an earlier step."""
    rows = [row | {"number": number} for number, row in enumerate(sums(40))]
    trainer = make(rows=rows, oversample=2, save_steps=1, max_steps=3)
    used = [number for _ in range(3) for number in numbers_of(trainer.step().batch)]
    trainer.policy.load(Checkpoint.read(trainer.run_folder / "checkpoint-1"))  # as load_best_model_at_end does
    trainer.generating.update_weights_again(3)
    trainer.max_steps = 5
    used += [number for _ in range(2) for number in numbers_of(trainer.step().batch)]
    held = [prompt.row.columns["number"] for prompt in trainer.generating.held_prompts(5).values()]
    assert len(held) == 2 and len({*used, *held}) == len(used) + 2 == 12


def numbers_of(batch):
    return [row["number"] for row in batch["row"][:: KEYS["num_generations"]]]


def test_shares_of_a_partial_step_are_those_of_its_tokens(make):
    trainer = make(oversample=2)
    num_trained = num_made = 0
    num_slots = 8  # all that is begun and unfinished
    for step in range(1, 5):
        batch, metrics = trainer.step()
        held = stream_of(trainer).held(step)
        num_held = sum(group.num_tokens + group.num_begun for group in held)
        num_new = int(batch["completion_length"].sum())
        assert metrics["buffer/held_share"] == pytest.approx(num_held / (num_held + num_new))
        num_trained, num_before = num_trained + num_new, num_made
        num_made = num_trained + num_held
        num_places = metrics["engine/steps"] * num_slots
        assert metrics["engine/idle_share"] == pytest.approx(1 - (num_made - num_before) / num_places)
        num_slots = 2 * (4 - len(held)) + sum(len([*group.remaining()]) for group in held)
        ages = {step - 1 - version for version in batch["policy_version"].values.tolist()}
        named = {f"staleness/ratio_{p}_age_{age}" for p in ("p05", "p50", "p95") for age in ages if max(ages) > 0}
        assert {name for name in metrics if name.startswith("staleness/ratio")} == named
    assert named


def test_a_reward_that_failed_for_a_held_group_is_asked_again_by_the_next_try(make):
    """A service that is away for a while: the steps that need it fail, and the first after it has come back goes on."""
    is_away = False

    def service(completion_ids, **_):
        if is_away:
            raise ConnectionError("away")
        return [float(len(ids)) for ids in completion_ids]

    trainer = make(reward_funcs=service, **{"rollout.async_level": 1})
    trainer.step()
    is_away, num_failed = True, 0
    for _ in range(3):
        try:
            trainer.step()
        except RewardError:
            num_failed += 1
    assert num_failed
    is_away, before = False, trainer.global_step
    trainer.step()
    assert trainer.global_step == before + 1


def test_ctrl_c_while_rewards_are_set_leaves_ranks_and_driver_alike(make, monkeypatch):
    trainer = make(**{"rollout.partial": False, "rollout.async_level": 1})
    trainer.step()
    reconfigure = type(trainer.generating).reconfigure

    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return reconfigure(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(trainer.generating), "reconfigure", interrupted)
        trainer.set(reward_funcs=[spread, count], reward_weights=[1.0, 2.0])
    assert trainer.config.rewards.reward_weights == [1.0, 2.0]
    assert all(len(values) == 2 for values in trainer.step().batch["function_rewards"])


def test_dropped_groups_leave_no_word_in_the_log(make, caplog):
    """Their rewards are cancelled; asyncio tells of errors that nobody reads, when it forgets their tasks."""

    async def slow(completion_ids, **_):
        await asyncio.sleep(0.02)
        return spread(completion_ids)

    trainer = make(reward_funcs=slow, oversample=4, unfinished="drop")
    for _ in range(3):
        trainer.step()
    trainer.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_rows_that_a_checkpoint_would_change_are_refused_before_anything_is_generated(make):
    trainer = make(rows=[row | {"pair": (1, 2)} for row in sums(8)])
    with pytest.raises(
        DataError, match=r"row \d+: the column 'pair' has the value \(1, 2\), which a checkpoint cannot"
    ):
        trainer.step()
