"""Accuracy is that of the first reward function, not of a sum that others shape."""

import math

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.rollout.successes import Grades, SuccessRule
from tests.support.tiny import sums

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


def test_a_run_has_the_accuracy_of_its_first_function(make_trainer, capsys):
    """Whatever the second one gives: with its weight, more than 1 for most."""

    def digits(completions, **_):
        return [sum(char.isdigit() for char in text) / 2 for text in completions]

    def wrong(completions, **_):
        return [0.0] * len(completions)

    keys = {"eval_dataset": sums(8), "max_steps": 1, "reward_weights": [1.0, 3.0], "eval_temperature": 1.0}
    metrics = make_trainer(reward_funcs=[wrong, digits], **keys).fit()
    assert metrics["eval/reward"] > 0.5 and metrics["eval/accuracy"] == 0.0
    assert "eval accuracy 0.0%" in capsys.readouterr().err
    assert 0 < make_trainer(reward_funcs=[digits, wrong], success_reward=1.0, **keys).fit()["eval/accuracy"] < 1
