"""Why rewards are all alike: only causes that there are, and whose rewards they are."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from hybrid_rl.config import TrainerConfig
from hybrid_rl.data.prompts import PromptEncoder, PromptRow
from hybrid_rl.rewards import EngineJudge, RewardList, cosine_reward, exact_match, format_reward, math_reward
from hybrid_rl.run.causes import Scoring
from tests.support.tiny import build_tokenizer

CUT = {"completions/clipped_ratio": 1.0}
LISTS, FORM = "as lists of messages", "have the form that the reward looks for"
OPENS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


def mine(completions: Any, **_: Any) -> list[float]:
    return [0.0] * len(completions)


class Mine:
    def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [0.0] * len(completions)


def compute_score(data_source: Any, solution_str: str, ground_truth: str) -> float:
    return 0.0


def run_of(functions: Any, tokenizer: Any = None, prompt: Any = "1+2=") -> Any:
    """As much of a run as is asked for."""
    tokenizer = tokenizer or build_tokenizer()
    ids = tuple(PromptEncoder(tokenizer, max_prompt_length=None).encode([prompt])[0])
    return SimpleNamespace(
        config=TrainerConfig(),
        rewards=SimpleNamespace(entries=RewardList.of(functions)),
        choice=SimpleNamespace(tokenizer=tokenizer),
        data=SimpleNamespace(first=PromptRow(0, prompt, ids, {})),
        is_chat=not isinstance(prompt, str),
        agents=None,
    )


@pytest.mark.parametrize(
    ("scoring", "metrics", "told", "not_told"),
    [
        (Scoring(limit=24), CUT, ["cut off by a limit", "max_completion_length=24)", FORM], [LISTS, "agents"]),
        (Scoring(limit=24), {"completions/clipped_ratio": 0.9}, [FORM], ["cut off"]),
        (Scoring(has_tools=True), {"tools/call_frequency": 0.0}, ["No answer called a tool"], []),
        (Scoring(has_tools=True), {"tools/call_frequency": 0.1}, [FORM], ["called a tool"]),
        (Scoring(), {"tools/call_frequency": 0.0}, [FORM], ["called a tool"]),  # an agent without tools of ours
        (Scoring(has_functions=False, is_chat=True), {}, ["agent or environment gives"], [LISTS, FORM]),
        (Scoring(is_chat=True), {}, [FORM], [LISTS]),
        (Scoring(is_chat=True, own=frozenset({"f"})), {}, [LISTS, "and the reward functions"], [FORM]),
        (Scoring(opening="<think>\\n"), {}, [FORM], ["completion_openings"]),
        (Scoring(opening="<think>", own=frozenset({"f"})), {}, ["'<think>', which is", "completion_openings"], [LISTS]),
        (Scoring(hidden=("<think>", "</think>")), {}, ["<think> and </think> are special tokens"], []),
        (Scoring(hidden=("<think>",), has_functions=False), {}, [], ["special"]),
    ],
)
def test_only_causes_that_there_are(scoring: Scoring, metrics: Any, told: list[str], not_told: list[str]) -> None:
    said = scoring.advice(metrics)
    assert all(part in said for part in told) and not any(part in said for part in not_told), said


def test_of_one_function_only_what_concerns_it() -> None:
    scoring = Scoring(is_chat=True, own=frozenset({"f"}))
    assert LISTS in scoring.advice({}, frozenset({"f", "g"})) and LISTS not in scoring.advice({}, frozenset({"g"}))


@pytest.mark.parametrize(
    ("functions", "own"),
    [
        ([math_reward(), exact_match, format_reward(), cosine_reward(exact_match, 9)], set()),
        ([mine, exact_match], {"mine"}),
        ([functools.partial(mine), Mine()], {"mine", "Mine"}),
        ([compute_score], set()),  # verl's, which get texts
        ([EngineJudge()], set()),
    ],
)
def test_whose_functions_they_are(functions: list[Any], own: set[str]) -> None:
    assert Scoring.of(run_of(functions)).own == own


def test_what_a_run_knows_of_its_prompts_and_tags() -> None:
    tokenizer = build_tokenizer(chat=True)
    tokenizer.chat_template = OPENS
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_tokens([AddedToken("<answer>", special=True)], special_tokens=True)
    scoring = Scoring.of(run_of([mine], tokenizer, [{"role": "user", "content": "1+2"}]))
    assert (scoring.opening, scoring.hidden, scoring.is_chat) == ("<think>", ("<answer>",), True)
    tokenizer.add_tokens([AddedToken("<think>", special=True)], special_tokens=True)
    scoring = Scoring.of(run_of([mine], tokenizer, [{"role": "user", "content": "1+2"}]))
    assert (scoring.opening, scoring.hidden) == ("", ("<think>", "<answer>"))  # nowhere in a text
