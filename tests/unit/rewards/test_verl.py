"""verl's reward functions: called per completion, with the columns of verl's rows."""

import asyncio
import functools
from typing import Any

import numpy as np
import pytest

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import ConfigError, RewardError
from hybrid_rl.rewards import RewardInput, RewardRunner
from hybrid_rl.rewards.functions import inspect_function

COLUMNS = ["prompt", "data_source", "reward_model", "extra_info", "answer"]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert data_source == "openai/gsm8k" and set(extra_info) == {"index"}
    return 10 * float(solution_str.endswith(ground_truth)) + extra_info["index"]


def call(function: Any, **changes: Any) -> list[float]:
    rows: dict[str, Any] = {
        "completions": ["it is 4", [{"role": "assistant", "content": "it is 5"}]],
        "data_source": ["openai/gsm8k"] * 2,
        "extra_info": [{"index": 1}, {"index": 2}],
        "reward_model": [{"style": "rule", "ground_truth": "4"}, '{"ground_truth": "4"}'],
        "answer": ["x", "x"],  # reward_model comes first
    }
    found = inspect_function(function, "score", COLUMNS)
    return found.function(**{name: value for name, value in (rows | changes).items() if found.accepts(name)})


def test_it_is_called_per_completion_with_the_columns_of_its_row() -> None:
    assert call(compute_score) == [11, 2]
    assert inspect_function(compute_score, "score", COLUMNS).function.__name__ == "compute_score"
    assert call(compute_score, reward_model=None, answer=["5", "5"]) == [1, 12]


def test_some_parameters_or_all_by_keyword() -> None:
    def short(solution_str, ground_truth, scale=2, **kwargs):
        return scale * len(solution_str) + len(kwargs)

    assert call(short) == [16, 16]  # 7 letters; data_source and extra_info are in kwargs
    assert call(functools.partial(compute_score, extra_info={"index": 0})) == [10, 0]


def test_a_mapping_has_a_score_and_metrics() -> None:
    def score(data_source, solution_str, ground_truth, extra_info):
        return {"score": 0.5, "acc": float("4" in solution_str), "pred": "4"}

    seen: dict[str, float] = {}
    assert call(score, log_metric=seen.__setitem__) == [0.5, 0.5]
    assert seen == {"acc": 0.5}


TRUTH = {"ground_truth": "4"}


@pytest.mark.parametrize(
    ("columns", "truths"),
    [
        ({"reward_model": [TRUTH, None], "answer": [None, "5"]}, ["4", "5"]),  # a mixture: each set has its own column
        ({"reward_model": [TRUTH, None], "ground_truth": [None, "6"], "answer": ["x", "x"]}, ["4", "6"]),
        ({"ground_truth": ["3", None], "answer": [None, "5"]}, ["3", "5"]),
        ({"ground_truth": [None, None], "reward_model": [TRUTH, TRUTH]}, ["4", "4"]),
        ({"reward_model": [{"style": "rule"}, {"ground_truth": None}], "answer": ["5", "5"]}, ["5", "5"]),
        ({"reward_model": ["4", '{"ground_truth": "7"}']}, ["4", "7"]),
        ({"ground_truth": ["", "0"], "answer": ["5", "5"]}, ["", "0"]),  # no text and a zero are answers
    ],
)
def test_the_expected_answer_is_found_row_by_row(columns: dict[str, Any], truths: list[str]) -> None:
    seen: list[str] = []

    def score(data_source, solution_str, ground_truth, extra_info):
        seen.append(ground_truth)
        return 1.0

    given = {"reward_model": None, "answer": None} | columns
    function = inspect_function(score, "score", [*COLUMNS, "ground_truth"]).function
    assert function(completions=["a", "b"], **given) == [1.0, 1.0] and seen == truths


def test_a_row_without_an_expected_answer_fails_by_itself() -> None:
    found = call(compute_score, reward_model=[TRUTH, {"style": "rule"}], answer=[None, None])
    assert found[0] == 11 and isinstance(found[1], RewardError)
    assert "compute_score needs ground_truth, but this row has none: ground_truth=None, reward_model=" in str(found[1])


def test_the_text_is_the_whole_response_as_in_verl() -> None:
    def score(data_source, solution_str, ground_truth, extra_info):
        assert solution_str == "a\nb\nc"
        return 1.0

    told = [{"role": role, "content": text} for role, text in (("assistant", "a"), ("tool", "b"), ("assistant", "c"))]
    assert call(score, completions=[told, told]) == [1.0, 1.0]


async def compute_score_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    if solution_str == "down":
        raise ValueError("the grader is down")
    return {"score": float(solution_str.endswith(ground_truth)), "length": len(solution_str)}


class Later:
    async def __call__(self, solution_str, ground_truth):
        return (await compute_score_later(None, solution_str, ground_truth))["score"]


@pytest.mark.parametrize("function", [compute_score_later, functools.partial(compute_score_later), Later()])
def test_an_async_function_is_awaited(function: Any) -> None:
    """Two right of three with an answer, in the order of the samples; the other two fail by themselves."""
    texts, answers = ["is 4", "4", "4", "4", "down"], ["4", "4", "5", None, "4"]
    inputs = [
        RewardInput(SampleKey(place), "p", text, [1], {"answer": answer})
        for place, (text, answer) in enumerate(zip(texts, answers, strict=True))
    ]
    with RewardRunner([function], available_columns=["prompt", "answer"]) as runner:
        result = runner.score(inputs, None)
    np.testing.assert_array_equal(result.rewards, [1.0, 1.0, 0.0, np.nan, np.nan])
    assert [failure.key.trajectory for failure in result.failures] == [3, 4]
    assert "needs ground_truth" in result.failures[0].detail and "the grader is down" in result.failures[1].detail
    with RewardRunner([function], available_columns=["prompt", "answer"]) as runner:
        (failure,) = runner.score(inputs[3:4], None).failures  # nothing to await
    assert "needs ground_truth" in failure.detail


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs ground_truth, but the dataset has none of the columns ground_truth"):
        inspect_function(compute_score, "score", ["prompt", "data_source"])
    with pytest.raises(RewardError, match="score returned 'good'; return a number"):

        def score(data_source, solution_str, ground_truth, extra_info):
            return "good"

        call(score)
