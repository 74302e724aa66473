"""Accuracy is that of the first reward function, not of a sum that others shape."""

import math

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.rollout.successes import Grades, SuccessRule
from tests.support.tiny import exact, sums

NAN = math.nan


def of(values, threshold=None, rewards=None, groups=None, grades=None):
    """values: of the first function, in groups of two; a second one gives 5 each."""
    rewards = [value + 5 for value in values] if rewards is None else rewards
    columns = {
        "function_rewards": [[value, 5.0] for value in values],
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "group": torch.tensor(groups or [n // 2 for n in range(len(values))]),
    }
    return SuccessRule(threshold=threshold, grades=grades).metrics(Batch(columns))


def test_the_other_functions_do_not_count():
    """0 of 4 are right, though each has a reward of 5."""
    assert of([0.0, 0.0, 0.0, 0.0]) == {"pass@1": 0.0, "pass@2": 0.0}
    assert of([1.0, 0.0, 0.0, 0.0]) == {"pass@1": 0.25, "pass@2": 0.5}
    assert of([1.0, 1.0, 0.0, 1.0], rewards=[-3.0, 0.5, 0.0, 0.1]) == {"pass@1": 0.75, "pass@2": 1.0}  # penalties


def test_of_numbers_between_nobody_knows_what_is_right():
    assert of([0.0, 0.3, 1.0, 0.0]) == {}
    assert of([4.0, 5.0]) == {}
    assert of([0.0, 0.3, 1.0, 0.0], threshold=0.3) == {"pass@1": 0.5, "pass@2": 1.0}
    assert of([0.0, 0.0], threshold=0.0) == {"pass@1": 1.0, "pass@2": 1.0}


def test_a_run_with_rewards_between_has_no_accuracy_later_either():
    grades = Grades()
    assert of([1.0, 0.0], grades=grades) == {"pass@1": 0.5, "pass@2": 1.0}
    assert of([1.0, 0.3], grades=grades) == {}
    assert of([1.0, 1.0], grades=grades) == {}
    assert of([1.0, 1.0], grades=grades, threshold=1.0) == {"pass@1": 1.0, "pass@2": 1.0}
    assert of([1.0, 1.0], grades=Grades()) == {"pass@1": 1.0, "pass@2": 1.0}


def test_what_failed_is_wrong_and_what_does_not_apply_is_left_out():
    assert of([1.0, NAN, 1.0, NAN], rewards=[6.0, NAN, 6.0, NAN]) == {"pass@1": 0.5, "pass@2": 1.0}
    assert of([1.0, 0.0, NAN, NAN], rewards=[6.0, 5.0, 5.0, 5.0]) == {"pass@1": 0.5, "pass@2": 1.0}
    assert of([NAN, NAN], rewards=[5.0, 5.0]) == {} == of([NAN, NAN], threshold=1.0, rewards=[5.0, 5.0])


def test_single_samples_and_groups_in_any_order():
    assert of([1.0, 0.0, 0.0], groups=[7, 8, 9]) == {"pass@1": pytest.approx(1 / 3)}
    assert of([1.0, 0.0, 0.0, 0.0], groups=[9, 3, 3, 9]) == {"pass@1": 0.25, "pass@2": 0.5}


def digits(completions, **_):
    return [sum(char.isdigit() for char in text) / 2 for text in completions]


def test_a_model_that_prints_noise_has_no_accuracy_of_half(make_trainer, capsys):
    """The first function gives 0 for all; the other one, with its weight, more than 1 for most."""

    def wrong(completions, **_):
        return [0.0] * len(completions)

    keys = {"eval_dataset": sums(8), "max_steps": 1, "reward_weights": [1.0, 3.0], "eval_temperature": 1.0}
    trainer = make_trainer(reward_funcs=[wrong, digits], **keys)
    metrics = trainer.fit()
    assert metrics["eval/reward"] > 0.5 and metrics["eval/accuracy"] == 0.0
    assert (metrics["pass@1"], metrics["pass@2"]) == (0.0, 0.0)
    assert "eval accuracy 0.0%" in capsys.readouterr().err
    shaped = make_trainer(reward_funcs=[digits, wrong], **keys)
    assert not {"eval/accuracy", "pass@1"} & shaped.fit().keys()
    assert "eval accuracy" not in capsys.readouterr().err
    told = make_trainer(reward_funcs=[digits, wrong], success_reward=1.0, **keys)
    assert 0 < told.fit()["eval/accuracy"] < 1


def test_no_reward_and_no_refilled_group_tells_a_success(make_trainer):
    rows = [{**row, "completion": row["answer"]} for row in sums(8)]
    supervised = make_trainer(reward_funcs=None, algorithm="sft", num_generations=1, train_dataset=rows, max_steps=1)
    assert "pass@1" not in supervised.step().metrics

    def half(completion_ids, **_):
        return [float(ids[0] % 2) for ids in completion_ids]

    refilled = make_trainer(reward_funcs=half, max_refills=9, max_steps=1, save_rollouts=True)
    assert "pass@1" not in refilled.step().metrics
    recorded = {"rollouts_path": str(refilled.run_folder / "rollouts"), "mode": "train"}
    assert "pass@1" not in make_trainer(reward_funcs=half, max_refills=9, max_steps=1, **recorded).step().metrics
    assert "pass@2" in make_trainer(reward_funcs=half, max_steps=1, **recorded).step().metrics
    assert "pass@2" in make_trainer(reward_funcs=exact, max_steps=1).step().metrics
