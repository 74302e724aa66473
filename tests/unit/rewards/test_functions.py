"""Arguments and names of reward functions, and the checks before work starts."""

import functools
from collections.abc import Callable

import pytest
import torch

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.rewards import (
    EngineJudge,
    RewardInput,
    RewardList,
    RewardModelEntry,
    code_reward,
    exact_match,
    format_completion,
    math_reward,
    with_model_entries,
)
from hybrid_rl.rewards.functions import unique_names

CHAT = [{"role": "user", "content": "2+2?"}]


def sample(key=0, prompt="p", completion="c", **columns):
    return RewardInput(SampleKey(key), prompt, completion, [key, key + 1], columns)


def resolve(reward_funcs, available_columns=None):
    return list(RewardList.of(reward_funcs, available_columns).functions.values())


def takes_everything(**kwargs):
    return [0.0]


def length(completions):
    return [0.0]


class Judge:
    def __call__(self, completions):
        return [0.0]


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return [0.0]


def test_everything_reaches_a_function_with_kwargs():
    (spec,) = resolve(takes_everything)
    arguments = spec.arguments([sample(0, answer="4"), sample(1, "q", "d", answer="5")], "state")
    assert arguments == {
        "prompts": ["p", "q"],
        "completions": ["c", "d"],
        "completion_ids": [[0, 1], [1, 2]],
        "completion_lengths": [2, 2],
        "completion_openings": ["", ""],
        "answer": ["4", "5"],
        "trainer_state": "state",
    }
    assert spec.log_names == ["log_extra", "log_metric"]


def test_only_named_parameters_reach_a_function_without_kwargs():
    (spec,) = resolve(lambda completions, answer, log_metric: [0.0])
    assert spec.arguments([sample(answer="4", other=1)], None) == {"completions": ["c"], "answer": ["4"]}
    assert spec.log_names == ["log_metric"]


def test_chat_completions_are_messages_and_text_stays_text():
    (spec,) = resolve(length)
    assert spec.arguments([sample(prompt=CHAT, completion="4")], None)["completions"] == [
        [{"role": "assistant", "content": "4"}]
    ]
    assert format_completion("p", "4") == "4"


def test_columns_that_some_samples_lack_are_none_whatever_the_call():
    (spec,) = resolve(takes_everything)
    assert spec.arguments([sample(0, a=1), sample(1, b=2)], None, ["c"])["a"] == [1, None]
    assert spec.arguments([sample(0, a=1)], None, ["c"])["c"] == [None]


def test_the_prompt_column_is_not_passed_and_that_of_completions_is():
    (spec,) = resolve(takes_everything, ["prompt", "completion"])
    gold = RewardInput(SampleKey(0), "p", "c", [1], {"completion": "gold", "task": 1})
    arguments = spec.arguments([gold], None)
    own = {"prompts", "completions", "completion_ids", "completion_lengths", "completion_openings", "trainer_state"}
    assert arguments.keys() == own | {"task", "completion"}
    assert (arguments["completion_ids"], arguments["completions"], arguments["completion"]) == ([[1]], ["c"], ["gold"])


def test_reserved_names_of_columns_are_refused():
    (spec,) = resolve(takes_everything)
    with pytest.raises(DataError, match="a sample to score has a column 'trainer_state'"):
        spec.arguments([sample(trainer_state=1)], None)
    with pytest.raises(DataError, match="the dataset has a column 'completions', .*; rename"):
        RewardList.of(takes_everything, ["completions"])


def test_a_keyword_fixed_by_partial_is_not_overridden_by_a_column():
    def f(completions, answer, **kwargs):
        return [0.0]

    (spec,) = resolve(functools.partial(f, answer="fixed"), ["answer"])
    assert "answer" not in spec.arguments([sample(answer="column")], None)


def test_names():
    specs = resolve([length, functools.partial(functools.partial(length)), Judge(), length, AsyncJudge().__call__])
    assert [spec.name for spec in specs] == ["length", "length_2", "Judge", "length_3", "__call__"]
    assert unique_names(["a", "a_2", "a"]) == ["a", "a_2", "a_3"]


def test_coroutine_functions_are_recognised_through_partials_and_objects():
    async def f(completions, **kwargs):
        return [0.0]

    specs = resolve([f, functools.partial(f, x=1), AsyncJudge(), Judge(), length])
    assert [spec.is_async for spec in specs] == [True, True, True, False, False]


def misspelled(completions, answr, **kwargs):
    return [0.0]


@pytest.mark.parametrize(
    ("entry", "columns", "message"),
    [
        (misspelled, ["prompt", "answer"], "'misspelled' requires the parameter 'answr'.*did you mean 'answer'"),
        (lambda prompt: [0.0], ["prompt"], "'prompt'"),
        (lambda completions, /: [0.0], None, "positional-only"),
        ([], None, "empty"),
        (Judge, None, "pass an instance"),
        ([3], None, "cannot be called"),
    ],
)
def test_entries_that_cannot_be_called_are_refused(entry, columns, message):
    with pytest.raises(ConfigError, match=message):
        RewardList.of(entry, columns)


def test_parameters_that_a_stream_or_a_default_may_fill_are_not_refused():
    RewardList.of(misspelled, None)  # a stream: unknown until the call
    RewardList.of(lambda completions, answr="": [0.0], ["answer"])


class Named(torch.nn.Linear):
    config = type("Config", (), {"name_or_path": "org/other-model"})


def test_models_and_judges_keep_their_places_and_get_trls_names():
    module, plain = Named(1, 1), torch.nn.Linear(1, 1)
    given = [length, "org/reward-model/", module, plain, EngineJudge(), length, "org/reward-model"]
    found = RewardList.of(given)
    names = ["length", "reward-model", "other-model", "Linear", "engine_judge", "length_2", "reward-model_2"]
    assert found.names == names
    assert {place: spec.name for place, spec in found.functions.items()} == {0: "length", 5: "length_2"}
    assert [found.models[place].model for place in (1, 2, 3, 6)] == [given[1], module, plain, given[6]]
    assert list(found.judges) == [4] and found.late == [1, 2, 3, 4, 6]


def test_each_tokenizer_goes_to_its_model():
    first, second = object(), object()
    entries = with_model_entries([length, "org/a", "org/b"], [None, first, None])
    assert entries == [length, RewardModelEntry("a", "org/a", first), RewardModelEntry("b", "org/b", None)]
    assert with_model_entries("org/a", second) == [RewardModelEntry("a", "org/a", second)]
    assert with_model_entries(entries) == entries
    with pytest.raises(ConfigError, match="1 reward_processing_classes for 2 reward_funcs"):
        with_model_entries([length, "org/a"], first)
    with pytest.raises(ConfigError, match="'length', which is a function; put None"):
        with_model_entries([length], [first])


def test_exact_match():
    assert exact_match(completions=[" 4\n", "5", "6"], answer=["4", 4, None]) == [1.0, 0.0, None]
    assert exact_match(completions=[format_completion(CHAT, "4 ")], answer=[4]) == [1.0]
    for several in ({"target": ["a", "b"]}, ["a", "b"], ("a",), torch.tensor([1, 2])):
        with pytest.raises(TypeError, match=f"exact_match: the answer .* is of type {type(several).__name__}, "):
            exact_match(completions=["a"], answer=[several])
    assert exact_match(completions=["4"], answer=[torch.tensor(4).numpy()]) == [1.0]


def test_a_factory_that_was_not_called():
    def made(threshold: float = 0.5) -> Callable[..., list[float]]:
        raise AssertionError

    for factory in (math_reward, made, code_reward):
        name = factory.__name__
        with pytest.raises(ConfigError, match=rf"{name!r} makes a reward function and is none itself; .*{name}\(\)"):
            resolve(factory)
