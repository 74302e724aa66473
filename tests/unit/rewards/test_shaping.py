"""Ready-made rewards against numbers worked out by hand."""

import asyncio
import inspect
import math

import cloudpickle
import pytest

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import (
    RewardInput,
    RewardRunner,
    cosine_reward,
    format_reward,
    kimi_length_reward,
    lcpo_exact,
    lcpo_max,
    overlong_penalty,
    tag_count_reward,
)


def ids(*lengths):
    return [[7] * length for length in lengths]


def made(*lengths):
    """Completions of these lengths, all of them the policy's."""
    return {"completion_ids": ids(*lengths), "completion_lengths": list(lengths)}


def good(completions, **_):
    return [{"good": 1.0, "bad": 0.0, "?": None}[text] for text in completions]


def test_overlong_penalty():
    """DAPO's own figures: at most 20480 tokens, of which 4096 are the buffer."""
    penalty = overlong_penalty(20480, 4096)
    lengths = (0, 16384, 16385, 18432, 20479, 20480, 30000)
    expected = [0.0, 0.0, -1 / 4096, -0.5, -4095 / 4096, -1.0, -1.0]
    assert penalty(completion_ids=ids(*lengths)) == expected
    assert penalty.__name__ == "overlong_penalty"
    for buffer in (0, -1, 20481):
        with pytest.raises(ConfigError, match=f"buffer={buffer}"):
            overlong_penalty(20480, buffer)


def test_cosine_reward():
    reward = cosine_reward(good, 8)
    texts, lengths = ["good"] * 4 + ["bad"] * 4 + ["?"], [0, 4, 7, 8, 0, 4, 7, 9, 3]
    found = reward(completions=texts, **made(*lengths))
    almost = (1 + math.cos(math.pi * 7 / 8)) / 2
    expected = [2.0, 1.5, 1.0 + almost, -10.0, -10.0, -5.0, -10.0 * almost, -10.0, None]
    assert found == pytest.approx(expected)
    # A correct one is worth less the longer it is, a wrong one more: to go on thinking.
    by_length = [reward(completions=[text], **made(n))[0] for text in ("good", "bad") for n in range(8)]
    assert by_length[:8] == sorted(by_length[:8], reverse=True) and by_length[8:] == sorted(by_length[8:])


def test_unusable_arguments_are_refused():
    for length in (0, math.nan):
        with pytest.raises(ConfigError, match=f"max_completion_length={length} must be above 0"):
            cosine_reward(good, length)
    with pytest.raises(ConfigError, match="lcpo_max must wrap a reward function that scores correctness; "):
        lcpo_max([good])


def test_kimi_length_reward():
    reward = kimi_length_reward(good, weight=2.0)
    found = reward(completions=["good", "good", "bad", "bad", "good", "?"], **made(10, 30, 15, 25, 20, 90))
    # lambda = .5 - (length - 10) / 20: .5, -.5, .25 (wrong: 0), -.25, 0; the unscored one does not count.
    assert found == pytest.approx([1 + 2 * 0.5, 1 - 2 * 0.5, 0.0, -2 * 0.25, 1.0, None])
    assert reward(completions=["good", "bad"], **made(4, 4)) == [1.0, 0.0]
    assert reward(completions=["?"], **made(4)) == [None]
    with pytest.raises(ConfigError, match="'kimi_length_reward' compares"):
        RewardRunner(reward)
    RewardRunner(reward, score_by="group").close()


def test_lcpo():
    given = {"completions": ["good", "bad", "good", "?", "good"], "target_length": [1000, 1000, 1000, 5, None]}
    given |= made(1500, 400, 1000, 3, 3)
    assert lcpo_exact(good)(**given) == pytest.approx([1 - 0.15, -0.18, 1.0, None, None])
    # .0003 (1000 - 1500) + .5 = .35; a wrong one gets nothing, however short.
    assert lcpo_max(good)(**given) == pytest.approx([0.35, 0.0, 0.5, None, None])
    short = {"completions": ["good"] * 2, **made(1, 4000), "goal": [2000, 2000]}
    assert lcpo_max(good, alpha=0.001, column="goal")(**short) == [1.0, 0.0]  # clipped on both sides


def test_lengths_of_agents():
    """Two completions of 6 and 8 tokens, of which the policy made 2 and 5, in a limit of 8: what is approached is the
    limit, what is shaped is what the policy wrote."""
    given = {"completions": ["good", "good"], "completion_ids": ids(6, 8), "completion_lengths": [2, 5]}
    assert overlong_penalty(8, 4)(completion_ids=given["completion_ids"]) == [-0.5, -1.0]
    quarter = (1 + math.cos(math.pi * 2 / 8)) / 2
    assert cosine_reward(good, 8)(**given) == pytest.approx([1 + quarter, -10.0])
    assert kimi_length_reward(good)(**given) == [1.5, 0.5]
    assert lcpo_exact(good, alpha=0.1)(**given, target_length=[2, 3]) == pytest.approx([1.0, 0.8])
    assert lcpo_max(good, alpha=0.1)(**given, target_length=[2, 3]) == pytest.approx([0.5, 0.3])


def test_reward_functions_get_the_lengths_of_what_the_policy_wrote():
    def length(completion_ids, completion_lengths):
        return [10 * len(ids) + length for ids, length in zip(completion_ids, completion_lengths, strict=True)]

    samples = [
        RewardInput(SampleKey(0), "p", "c", [1, 2, 3], {}, policy_length=1),
        RewardInput(SampleKey(1), "p", "c", [1, 2], {}),
    ]
    with RewardRunner(length) as runner:
        assert runner.score(samples, None).rewards.tolist() == [31, 22]


def test_success_says_what_is_correct():
    partly = cosine_reward(lambda completions: [0.6], 10, success=0.5)
    assert partly(completions=["x"], **made(0)) == [2.0]
    fully = cosine_reward(lambda completions: [0.6], 10)
    assert fully(completions=["x"], **made(0)) == [-10.0]


def test_a_wrapper_takes_the_arguments_of_the_wrapped_function_and_its_own():
    def correct(prompts, answer, completion_ids, other=3):
        assert other == 3
        return [1.0 for _ in answer]

    wrapped = lcpo_exact(correct)
    assert list(inspect.signature(wrapped).parameters) == [
        "prompts", "answer", "completion_ids", "other", "completion_lengths", "target_length"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'lcpo_exact' requires the parameter 'target_length'"):
        RewardRunner(wrapped, available_columns=["answer"])
    sample = RewardInput(SampleKey(0), "p", "c", [1, 2], {"answer": "a", "target_length": 3, "more": 1})
    with RewardRunner(wrapped, available_columns=["answer", "target_length", "more"]) as runner:
        assert runner.names == ["lcpo_exact"]
        assert runner.score([sample], None).rewards.tolist() == [1 - 0.0003]


def test_a_wrapper_is_async_if_the_function_is():
    async def correct(completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    wrapped = cosine_reward(correct, 4)
    with RewardRunner(wrapped) as runner:
        assert runner.functions[0].is_async
        assert runner.score([RewardInput(SampleKey(0), "p", "c", [1, 2], {})], None).rewards.tolist() == [1.5]


def test_a_wrong_number_of_values_is_named():
    with pytest.raises(ValueError, match="<lambda> returned 1 value for 2 completions"):
        cosine_reward(lambda completions: [1.0], 4)(completions=["a", "b"], **made(1, 1))


WELL_FORMED = "<think>\nso\n</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "is_form", "share"),
    [
        (WELL_FORMED, 1.0, 1.0),
        (f"  {WELL_FORMED}\n", 1.0, 1.0),
        ("<think></think><answer></answer>", 1.0, 1.0),
        (f"{WELL_FORMED} done", 0.0, 1.0),
        (f"Well, {WELL_FORMED}", 0.0, 1.0),
        ("<answer>4</answer><think>so</think>", 0.0, 1.0),
        ("<think>so</think>", 0.0, 0.5),
        (f"{WELL_FORMED}<answer>5</answer>", 0.0, 0.5),
        ("<think>a<think>b</think><answer>4</answer>", 0.0, 0.75),
        ("", 0.0, 0.0),
    ],
)
def test_form(text, is_form, share):
    assert format_reward()(completions=[text]) == [is_form]
    assert format_reward()(completions=[[{"role": "assistant", "content": text}]]) == [is_form]
    assert tag_count_reward()(completions=[text]) == [share]


def test_custom_pattern_and_tags():
    assert format_reward(r"\d+")(completions=["42", "42 "]) == [1.0, 0.0]
    assert tag_count_reward(["##"])(completions=["## a", "## a ##"]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="is not a regular expression"):
        format_reward("(")
    with pytest.raises(ConfigError, match="tags"):
        tag_count_reward("<think>")


def test_the_pattern_is_fast_on_long_texts_that_do_not_match():
    assert format_reward()(completions=["<think>" + "a <answer " * 20_000]) == [0.0]


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (overlong_penalty(10, 5), "overlong_penalty"),
        (cosine_reward(good, 10), "cosine_reward"),
        (kimi_length_reward(good), "kimi_length_reward"),
        (lcpo_exact(good), "lcpo_exact"),
        (lcpo_max(good), "lcpo_max"),
        (format_reward(), "format_reward"),
        (tag_count_reward(), "tag_count_reward"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_they_have_names_and_travel(reward, name):
    assert reward.__name__ == name
    given = {"completions": ["good"], **made(6), "target_length": [6]}
    copied = cloudpickle.loads(cloudpickle.dumps(reward))
    accepted = inspect.signature(reward).parameters
    wanted = {
        k: v for k, v in given.items() if k in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    }
    assert copied(**wanted) == reward(**wanted)
