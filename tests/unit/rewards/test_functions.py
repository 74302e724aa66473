"""What reward functions are called with, how they are named, and what is refused before work starts."""

import functools

import pytest
import torch

from hybrid_rl.errors import ConfigError, DataError, NotYetSupportedError
from hybrid_rl.rewards import RewardInput, exact_match, format_completion, resolve_functions
from hybrid_rl.rewards.functions import unique_names

CHAT = [{"role": "user", "content": "2+2?"}]


def sample(key=0, prompt="p", completion="c", **columns):
    return RewardInput(key, prompt, completion, [key, key + 1], columns)


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
    (spec,) = resolve_functions(takes_everything)
    arguments = spec.arguments([sample(0, answer="4"), sample(1, "q", "d", answer="5")], "state")
    assert arguments == {
        "prompts": ["p", "q"],
        "completions": ["c", "d"],
        "completion_ids": [[0, 1], [1, 2]],
        "answer": ["4", "5"],
        "trainer_state": "state",
    }
    assert spec.log_names == ["log_extra", "log_metric"]


def test_only_named_parameters_reach_a_function_without_kwargs():
    (spec,) = resolve_functions(lambda completions, answer, log_metric: [0.0])
    assert spec.arguments([sample(answer="4", other=1)], None) == {"completions": ["c"], "answer": ["4"]}
    assert spec.log_names == ["log_metric"]


def test_chat_completions_are_messages_and_text_stays_text():
    (spec,) = resolve_functions(length)
    assert spec.arguments([sample(prompt=CHAT, completion="4")], None)["completions"] == [
        [{"role": "assistant", "content": "4"}]
    ]
    assert format_completion("p", "4") == "4"


def test_columns_that_some_samples_lack_are_none_whatever_the_call():
    (spec,) = resolve_functions(takes_everything)
    assert spec.arguments([sample(0, a=1), sample(1, b=2)], None, ["c"])["a"] == [1, None]
    assert spec.arguments([sample(0, a=1)], None, ["c"])["c"] == [None]


def test_prompt_and_completion_columns_are_not_passed_but_reserved_names_are_refused():
    (spec,) = resolve_functions(takes_everything, ["prompt", "completion", "completion_ids"])
    gold = RewardInput(0, "p", "c", [1], {"completion": "gold", "completion_ids": [9], "task": 1})
    arguments = spec.arguments([gold], None)
    assert arguments.keys() == {"prompts", "completions", "completion_ids", "trainer_state", "task"}
    assert arguments["completion_ids"] == [[1]]
    with pytest.raises(DataError, match="trainer_state"):
        spec.arguments([sample(trainer_state=1)], None)
    with pytest.raises(ConfigError, match=r"\['completions'\].*rename"):
        resolve_functions(takes_everything, ["completions"])


def test_a_keyword_fixed_by_partial_is_not_overridden_by_a_column():
    def f(completions, answer, **kwargs):
        return [0.0]

    (spec,) = resolve_functions(functools.partial(f, answer="fixed"), ["answer"])
    assert "answer" not in spec.arguments([sample(answer="column")], None)


def test_names():
    specs = resolve_functions(
        [length, functools.partial(functools.partial(length)), Judge(), length, AsyncJudge().__call__]
    )
    assert [spec.name for spec in specs] == ["length", "length_2", "Judge", "length_3", "__call__"]
    assert unique_names(["a", "a_2", "a"]) == ["a", "a_2", "a_3"]


def test_coroutine_functions_are_recognised_through_partials_and_objects():
    async def f(completions, **kwargs):
        return [0.0]

    specs = resolve_functions([f, functools.partial(f, x=1), AsyncJudge(), Judge(), length])
    assert [spec.is_async for spec in specs] == [True, True, True, False, False]


def test_a_parameter_that_nothing_fills_is_refused_with_the_nearest_column():
    def f(completions, answr, **kwargs):
        return [0.0]

    with pytest.raises(ConfigError, match=r"'f' requires the parameter 'answr'.*did you mean 'answer'"):
        resolve_functions(f, ["prompt", "answer"])
    resolve_functions(f, None)  # a stream: unknown until the call
    resolve_functions(lambda completions, answr="": [0.0], ["answer"])
    with pytest.raises(ConfigError, match="'prompt'"):
        resolve_functions(lambda prompt: [0.0], ["prompt"])
    with pytest.raises(ConfigError, match="positional-only"):
        resolve_functions(lambda completions, /: [0.0])


@pytest.mark.parametrize("model", ["org/reward-model", torch.nn.Linear(1, 1)])
def test_reward_models_are_not_supported_yet(model):
    with pytest.raises(NotYetSupportedError, match="sequence-classification"):
        resolve_functions([model])


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        resolve_functions([])
    with pytest.raises(ConfigError, match="pass an instance"):
        resolve_functions(Judge)
    with pytest.raises(ConfigError, match="cannot be called"):
        resolve_functions([3])


def test_exact_match():
    assert exact_match(completions=[" 4\n", "5", "6"], answer=["4", 4, None]) == [1.0, 0.0, None]
    assert exact_match(completions=[format_completion(CHAT, "4 ")], answer=[4]) == [1.0]
