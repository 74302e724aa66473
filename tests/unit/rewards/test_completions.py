"""What the policy said: one table of cases, and what every ready-made reward, vote and judge makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl import rewards
from hybrid_rl.extras.programs.code import find_program
from hybrid_rl.rewards import completion_text
from hybrid_rl.rewards.completions import conversation_text, opening_of, response_text
from hybrid_rl.rewards.judging import JudgeStyle

ASKS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "mul", "arguments": {"a": 17}}}]}
TOOL = {"role": "tool", "name": "mul", "content": "The answer is $408$"}
THOUGHT = "<think>\nlong\n</think>\n\n"


def says(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


# completion, what the prompt opened, the text with thinking, and without
CASES: dict[str, tuple[Any, str, str, str]] = {
    "text": ("it is 408", "", "it is 408", "it is 408"),
    "text with a thought": (THOUGHT + "408", "", THOUGHT + "408", "\n\n408"),
    "text, the prompt opens the thought": ("long\n</think>\n\n408", "<think>\n", THOUGHT + "408", "\n\n408"),
    "text cut off in its thought": ("<think>so 408", "", "<think>so 408", ""),
    "cut off in the thought that the prompt opened": ("so 408", "<think>\n", "<think>\nso 408", ""),
    "nothing": ("", "", "", ""),
    "a tag in the middle": ("use <think> here", "", "use <think> here", "use <think> here"),
    "no messages": ([], "", "", ""),
    "one message": ([says("408")], "", "408", "408"),
    "one message, the prompt opens the thought": (
        *([says("long\n</think>\n\n408")], "<think>\n", THOUGHT + "408", "\n\n408"),
    ),
    "no role": ([{"content": "408"}], "", "408", "408"),
    "after a tool": ([ASKS, TOOL, says("I do not know")], "", "I do not know", "I do not know"),
    "the limit came after a call": ([ASKS, TOOL, ASKS], "", "", ""),
    "the limit came after a result": ([ASKS, TOOL], "", "", ""),
    "text beside a call": ([{**ASKS, "content": "17 times 24 are 408?"}], "", "", ""),
    "a thought beside a call": ([{**ASKS, "content": "<think>408</think>"}], "", "", ""),
    "a call that cannot be read": ([says('<tool_call>{"a": 408', tool_call_error="broken")], "", "", ""),
    "a call in the older form": ([says("", function_call={"name": "mul", "arguments": "408"})], "", "", ""),
    "no calls": ([says("408", tool_calls=[])], "", "408", "408"),
    "a user after the answer": ([says("408"), {"role": "user", "content": "409?"}], "", "408", "408"),
    "only the user": ([{"role": "user", "content": "408"}], "", "", ""),
    "thinking apart": ([ASKS, TOOL, says("408", reasoning_content="long")], "", THOUGHT + "408", "\n\n408"),
    "thinking apart, another key": ([says("408", reasoning="\nlong\n")], "", THOUGHT + "408", "\n\n408"),
    "thinking apart, a third": ([says("408", thinking="long")], "", THOUGHT + "408", "\n\n408"),
    "no thinking": ([says("408", reasoning_content=None)], "", "408", "408"),
    "cut off in thinking apart": ([says("", reasoning_content="so 408")], "", "<think>\nso 408", ""),
    "content in blocks": ([says([{"type": "text", "text": "40"}, {"type": "text", "text": "8"}])], "", "408", "408"),
    "content in one block": ([says({"type": "text", "text": "408"})], "", "408", "408"),
    "no content": ([says(None)], "", "", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_policy_said(case: str) -> None:
    completion, opening, whole, answer = CASES[case]
    assert completion_text(completion, opening=opening) == whole
    assert completion_text(completion, thinking=False, opening=opening) == answer


@pytest.mark.parametrize("case", CASES)
def test_every_reward_and_vote_reads_that(case: str) -> None:
    """Whatever the form of a completion is: each gives what it gives for that text alone."""
    completion, opening, whole, answer = CASES[case]
    votes: dict[str, list[Any]] = {}
    given: dict[str, Any] = {"completions": [completion], "completion_openings": [opening]}
    given |= {"answer": ["408"], "solution": ["$408$"], "log_extra": votes.__setitem__}

    def score(function: Any, **changes: Any) -> Any:
        return function(**{name: value for name, value in (given | changes).items() if name not in leave})[0]

    alone = {"completions": [whole], "completion_openings": [""]}
    for function in (rewards.accuracy_reward, rewards.reasoning_accuracy_reward, rewards.think_format_reward):
        leave: tuple[str, ...] = ("answer",)
        assert score(function) == score(function, **alone), function.__name__
    for function in (rewards.format_reward(), rewards.tag_count_reward()):
        leave = ("answer", "solution", "log_extra")
        assert score(function) == score(function, **alone), function.__name__
    leave = ("solution",)
    assert score(rewards.exact_match) == float(answer.strip() == "408")
    assert votes["extracted_answer"] == [answer.strip() or None]  # who says nothing has no vote
    is_right = float(answer.strip() in ("408", "it is 408"))
    assert score(rewards.math_reward("answer")) == is_right
    assert votes["extracted_answer"] == (["408"] if is_right else [None])
    assert score(rewards.gsm8k_reward) == 0.0 and votes["extracted_answer"] == [None]
    assert find_program(completion, opening) == find_program(answer)


FORM = "<answer>x</answer>"


@pytest.mark.parametrize(
    ("completion", "opening"),
    [
        ("<think>\nlong\n</think>\n\n" + FORM, ""),  # a template that opens nothing
        ("long\n</think>\n\n" + FORM, "<think>\n"),  # one that opens the thought
        ([ASKS, TOOL, says("<think>\nlong\n</think>\n\n" + FORM)], ""),  # with tools
        ([ASKS, TOOL, says(FORM, reasoning_content="long")], ""),  # and a template that knows thinking apart
    ],
)
def test_one_answer_has_one_form(completion: Any, opening: str) -> None:
    given = {"completions": [completion], "completion_openings": [opening]}
    functions = (rewards.format_reward(), rewards.tag_count_reward(), rewards.think_format_reward)
    assert [function(**given) for function in functions] == [[1.0]] * 3
    solution = {"solution": [r"\boxed{3}"]}
    right = completion.replace("x", r"\boxed{3}") if isinstance(completion, str) else [*completion[:-1], {}]
    if isinstance(completion, list):
        right[-1] = {**completion[-1], "content": completion[-1]["content"].replace("x", r"\boxed{3}")}
    assert rewards.reasoning_accuracy_reward(**(given | {"completions": [right]}), **solution) == [1.0]


def test_what_tools_wrote_is_nobodys_answer() -> None:
    gives_up = [ASKS, TOOL, says("I do not know")]
    assert rewards.math_reward()(completions=[gives_up], answer=["408"]) == [0.0]
    assert rewards.accuracy_reward([gives_up], ["$408$"]) == [0.0]
    right = [ASKS, {**TOOL, "content": "407"}, says("408")]
    assert rewards.exact_match([right], ["408"]) == rewards.math_reward()(completions=[right], answer=["408"]) == [1.0]
    tags = [ASKS, {**TOOL, "content": "<think>a</think><answer>b</answer>"}, says("x")]
    assert rewards.tag_count_reward()([tags]) == [0.0]


@pytest.mark.parametrize(
    ("prompt", "tail", "opening"),
    [
        ("1+2=", "1+2=", ""),
        ("Assistant: <think>", "Assistant: <think>", "<think>"),
        ([{"role": "user", "content": "1+2"}], "assistant\n<think>\n", "<think>\n"),
        ([{"role": "user", "content": "1+2"}], "assistant\n<think>\n\n</think>\n\n", ""),
        ([{"role": "user", "content": "think in <think>"}], "in <think>\nassistant\n", ""),
        ([{"role": "assistant", "content": "<think>\nFirst,"}], "First,", "<think>\nFirst,"),
        ([{"role": "assistant", "content": "<think>a</think>b"}], "</think>b", ""),
        ([{"role": "assistant", "content": None}], "", ""),
        ([], "", ""),
    ],
)
def test_what_a_prompt_has_opened(prompt: Any, tail: str, opening: str) -> None:
    assert opening_of(prompt, tail) == opening


def test_judges_see_who_said_what() -> None:
    talk = [{**ASKS, "content": "hm"}, TOOL, says("408", reasoning_content="long")]
    shown = "assistant: hm -> mul(a=17)\ntool: The answer is $408$\nassistant: <think>\nlong\n</think>\n\n408"
    assert conversation_text(talk) == shown
    assert conversation_text([says("408")]) == conversation_text("408") == "408"
    assert conversation_text([ASKS]) == "assistant: mul(a=17)"  # not nothing: it is what there is to judge
    style = JudgeStyle.of("pointwise", "{completion}", None)
    questions = style.questions(["p"] * 3, [talk, "x</think>y", "z"], {}, [0, 1, 2], ["", "<think>", ""])
    assert [question.prompt for question in questions] == [shown, "<think>x</think>y", "z"]


def test_a_response_is_all_that_follows_the_prompt() -> None:
    assert response_text([{**ASKS, "content": "hm"}, TOOL, says("408", reasoning_content="long")]) == (
        "hm\nThe answer is $408$\n" + THOUGHT + "408"
    )
    assert response_text("408") == "408"
