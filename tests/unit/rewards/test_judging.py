"""Questions to judges, and the scores in their answers."""

import pytest

from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import EngineJudge
from hybrid_rl.rewards.judging import JudgeStyle, Question, parse_grade, parse_winner


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("good. <score>7</score>", 7.0),
        ("<score>3</score> no, <score> 8.5 </score>", 8.5),
        ("<SCORE>9/10</SCORE>", 9.0),
        ("<score>10</score>", 10.0),
        ("<score>0</score>", 0.0),
        ("<score>11</score>", None),
        ("<score>-1</score>", None),
        ("<score>seven</score>", None),
        ("7", None),
        ("", None),
    ],
)
def test_grades(text, grade):
    assert parse_grade(text) == grade


def test_winners():
    texts = ["<winner>A</winner>", "<winner> b </winner>", "A is fine. <winner>tie</winner>", "A", "<winner>C</winner>"]
    assert [parse_winner(text) for text in texts] == [1.0, 0.0, 0.5, None, None]


def test_questions_of_single_samples_show_prompt_completion_and_columns():
    style = JudgeStyle.of("pointwise", "{prompt}|{completion}|{answer}", None)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u {x}"}]
    found = style.questions(["p", chat], ["c {0}", [{"role": "assistant", "content": "d"}]], {"answer": [4, 5]}, [0, 1])
    assert found == [Question((0,), "p|c {0}|4"), Question((1,), "system: s\nuser: u {x}|d|5")]


CALL = {"function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([{"role": "user", "content": "alone"}], "alone"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "blocks"}]}],
            "in blocks",
        ),
        ([{"role": "user", "content": {"type": "text", "text": "one block"}}], "one block"),
        ([{"role": "user", "content": None}], ""),
        (
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
            ],
            "user: q\nassistant: add(a=1)\ntool: 2",
        ),
        (
            [{"role": "user", "content": "q"}, {"role": "assistant", "function_call": CALL["function"]}],
            "user: q\nassistant: add(a=1)",
        ),
    ],
)
def test_a_judge_reads_prompts_in_every_form_of_messages(prompt, text):
    style = JudgeStyle.of("pointwise", "{prompt}|{completion}", None)
    (question,) = style.questions([prompt], ["c"], {}, [0])
    assert question.prompt == f"{text}|c"


def test_a_judge_reads_answers_without_a_role():
    style = JudgeStyle.of("pointwise", "{completion}", None)
    (question,) = style.questions(["p"], [[{"content": "a"}, {"role": "user", "content": "b"}]], {}, [0])
    assert question.prompt == "assistant: a\nuser: b"


def test_a_function_may_write_the_prompt():
    style = JudgeStyle.of("pointwise", lambda prompt, completion, **_: [{"role": "user", "content": completion}], None)
    (found,) = style.questions(["p"], ["c"], {"more": [1]}, [0])
    assert found.prompt == [{"role": "user", "content": "c"}]


def test_pairs_are_asked_in_both_orders_and_only_within_groups():
    style = JudgeStyle.of("pairwise", "{completion_a}>{completion_b}", None)
    found = style.questions(["p"] * 4, ["x", "y", "z", "w"], {}, [0, 1, 0, 1])
    assert [(q.samples, q.prompt) for q in found] == [
        ((0, 2), "x>z"),
        ((1, 3), "y>w"),
        ((2, 0), "z>x"),
        ((3, 1), "w>y"),
    ]


def test_shares_of_wins():
    style = JudgeStyle.of("pairwise", None, None)
    questions = style.questions(["p"] * 3, ["x", "y", "z"], {}, [0] * 3)
    assert [q.samples for q in questions] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    # x beats y in both orders, ties with z once, loses to it once; y and z: whoever comes first wins.
    assert style.scores(questions, [1.0, 0.5, 0.0, 1.0, 1.0, 1.0], 3) == [2.5 / 4, 1 / 4, 2.5 / 4]
    # A judge that always says A says nothing.
    assert style.scores(questions, [1.0] * 6, 3) == [0.5] * 3
    # What cannot be read is left out; nothing read: no score.
    assert style.scores(questions, [None, 1.0, None, None, 0.0, None], 3) == [1.0, None, 0.0]


def test_a_sample_without_comparison_gets_the_error_of_one():
    style, error = JudgeStyle.of("pairwise", None, None), ValueError("down")
    questions = style.questions(["p"] * 3, ["x", "y", "z"], {}, [0] * 3)
    assert style.scores(questions, [error, 1.0, None, error, 0.0, error], 3) == [1.0, error, 0.0]
    assert style.scores([], [], 1) == [None]  # a group of one


def test_unusable_questions_are_refused():
    with pytest.raises(ConfigError, match="mode='listwise'"):
        JudgeStyle.of("listwise", None, None)
    with pytest.raises(ConfigError, match=r"lacks \{completion_b\}"):
        JudgeStyle.of("pairwise", "{completion_a}", None)
    with pytest.raises(ConfigError, match="placeholder 'answr', but there are only answer, completion, prompt"):
        JudgeStyle.of("pointwise", "{completion} {answr}", None).questions(["p"], ["c"], {"answer": [1]}, [0])
    with pytest.raises(ConfigError, match="function as parser"):
        JudgeStyle.of("pointwise", 3, None)
    with pytest.raises(ConfigError, match="max_tokens=0"):
        EngineJudge(max_tokens=0)
