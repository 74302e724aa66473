"""math_reward against answers whose equality is plain mathematics, in and outside of the main thread."""

import logging
import sys
import threading

import cloudpickle
import pytest

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import RewardInput, RewardRunner, gsm8k_reward, math_reward

CASES = [
    (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
    ("The answer is 1/2.", r"\frac{1}{2}", 1.0),
    (r"$x^2+2x+1$", "(x+1)^2", 1.0),
    (r"\boxed{42}", "6 * 7 = 42 #### 42", 1.0),
    (r"\boxed{3}", "4", 0.0),
    (r"First \boxed{3}. That was wrong. Finally \boxed{4}", "4", 1.0),
    (r"<think>perhaps \boxed{3}</think> The answer is 4", "4", 1.0),
    (r"<think>perhaps \boxed{3}</think> The answer is 4", "3", 0.0),
    (r"\boxed{3}, \boxed{4}", r"\{3, 4\}", 1.0),
    (r"The roots are \boxed{3} and \boxed{4}, as asked.", r"\{3, 4\}", 1.0),
    (r"x = \boxed{3} or x = \boxed{4}", r"\{3, 4\}", 1.0),
    (r"It is \boxed{3}. No, it is \boxed{4}.", "4", 1.0),
    (r"It is \boxed{3}. No, it is \boxed{4}.", "3", 0.0),
    (r"It is \boxed{1}. Wrong, and too low: \boxed{3}, \boxed{4}", r"\{3, 4\}", 1.0),
    (r"\boxed{\{3, 4\}}", r"\{3, 4\}", 1.0),
    (r"\boxed{(1,2)}", "(1,2)", 1.0),
    (r"\boxed{(2,1)}", "(1,2)", 0.0),
    (r"\boxed{\sqrt{2}}", r"Squaring gives 2, so it is $\boxed{\sqrt{2}}$.", 1.0),
    (r"\boxed{7}", 7, 1.0),
    ("no number at all", "7", 0.0),
    (r"\boxed{7}", "the quick brown fox", None),
    (r"\boxed{7}", "", None),
    (r"\boxed{7}", None, None),
]


def score_all():
    return math_reward()(completions=[case[0] for case in CASES], answer=[case[1] for case in CASES])


def test_answers():
    assert score_all() == [case[2] for case in CASES]


def test_only_one_warning_is_silenced(caplog, monkeypatch):
    """math-verify gives it once in a process, and again after each reset of its own flags."""
    for name in ("parser", "grader"):
        monkeypatch.setattr(f"math_verify.{name}.TIMEOUT_WARNING_SHOWN", False)
    thread = threading.Thread(target=score_all)
    thread.start()
    thread.join()
    assert sys.modules["math_verify.parser"].TIMEOUT_WARNING_SHOWN and not caplog.records
    assert sys.modules["math_verify.grader"].TIMEOUT_WARNING_SHOWN
    logging.getLogger("math_verify.parser").warning("an expression was cut")
    assert caplog.messages == ["an expression was cut"]
    filters = logging.getLogger("math_verify.grader").filters
    assert filters and len(filters) == len(set(filters))


@pytest.mark.parametrize("num_processes", [0, 1], ids=["in a thread that gets no signals", "in a main thread"])
def test_as_a_reward_function(num_processes):
    inputs = [RewardInput(SampleKey(i), "p", text, [1], {"answer": gold}) for i, (text, gold, _) in enumerate(CASES)]
    with RewardRunner(math_reward(), num_processes=num_processes) as runner:
        result = runner.score(inputs, None)
    assert runner.names == ["math_reward"]
    assert [None if value != value else value for value in result.rewards] == [case[2] for case in CASES]
    assert {failure.reason for failure in result.failures} == {"none"}


def test_columns():
    assert math_reward("gold")(completions=["1", "2"], gold=["1", "1"]) == [1.0, 0.0]
    assert math_reward()(completions=["1", "2"], solution=["1", "1"]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="requires the parameter 'gold'"):
        RewardRunner(math_reward("gold"), available_columns=["answer"])
    with pytest.raises(ValueError, match="needs the dataset column answer or solution"):
        math_reward()(completions=["1"])
    copied = cloudpickle.loads(cloudpickle.dumps(math_reward("gold")))
    assert copied(completions=["1"], gold=["1"]) == [1.0]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="pip install math-verify"):
        math_reward()


def test_what_was_read_is_kept_for_votes() -> None:
    """0.5 and 1/2 are one answer; what cannot be read votes for nothing; so does a row without an expected answer."""
    kept: dict[str, list[str | None]] = {}
    texts = [r"so \boxed{0.5}", r"so \boxed{\frac12}", "no answer", r"\boxed{2}", r"\boxed{2}"]
    rewards = math_reward("answer")(completions=texts, answer=["1/2"] * 4 + [None], log_extra=kept.__setitem__)
    assert rewards == [1.0, 1.0, 0.0, 0.0, None]
    assert kept == {"extracted_answer": ["1/2", "1/2", None, "2", None]}


@pytest.mark.parametrize(
    ("text", "answer", "reward", "read"),
    [
        ("6 * 12 = 72\n#### 72", "72", 1.0, "72"),
        ("#### 72", "Natalia sold 48 + 24 = 72 clips.\n#### 72", 1.0, "72"),
        ("#### 1,234", "1234", 1.0, "1234"),
        ("#### -3", -3, 1.0, "-3"),
        ("#### 5\n#### 72", "72", 1.0, "72"),  # the last one counts
        ("#### 72\n#### 5", "72", 0.0, "5"),
        ("the answer is 72", "72", 0.0, None),  # what math_reward takes
        (r"\boxed{72}", "72", 0.0, None),
        ("####72", "72", 0.0, None),
        ("#### $72", "72", 0.0, None),
        ("#### 72.", "72", 0.0, "72."),  # compared as text
        ("#### 72.0", "72", 0.0, "72.0"),
        ("#### 72" + " " * 294, "72", 0.0, None),  # the mark is before the last 300 characters
        ("#### 72" + " " * 293, "72", 1.0, "72"),
        ("#### 72", None, None, "72"),
    ],
)
def test_the_strict_reward_of_gsm8k(text, answer, reward, read) -> None:
    """Values of verl's compute_score(text, answer, method="strict"), worked out by hand."""
    kept: dict[str, list[str | None]] = {}
    assert gsm8k_reward([text], [answer], log_extra=kept.__setitem__) == [reward]
    assert kept == {"extracted_answer": [read]}
