"""Rewards with the names and the meaning of trl.rewards, for scripts that come from there.

They take what TRL's take, and completions that are plain text besides. Of a conversation they read the last answer
with its thinking: what the prompt has opened of it, and `reasoning_content` in its tags. `math_reward`,
`format_reward`, `cosine_reward` and `overlong_penalty` are this library's own, which read more kinds of answers.
"""

from __future__ import annotations

import importlib
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.completions import THINK_END, completion_texts
from hybrid_rl.rewards.marks import shaping_reward
from hybrid_rl.rewards.verifiers import MATH_SECONDS, answer_text, load_math_verify

PARSING_SECONDS = 10  # TRL's limit; that of the comparison is MATH_SECONDS, as there
THOUGHT_FIRST = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)

Completions = Sequence[str | Messages]
Openings = Sequence[str] | None
LogExtra = Callable[[str, list[Any]], None] | None


def accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    log_extra: LogExtra = None,
    completion_openings: Openings = None,
    **kwargs: Any,
) -> list[float | None]:
    """Give 1.0 if the completion's answer equals the `solution` column as mathematics, else 0.0, by math-verify.

    An answer must be LaTeX: in a box, which counts first, or between dollars or other delimiters. A sample whose
    solution cannot be parsed gets None. Raises ConfigError if math-verify is not installed.
    """
    return _compared(completion_texts(completions, completion_openings), solution, log_extra)


def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra = None,
    completion_openings: Openings = None,
    **kwargs: Any,
) -> list[float | None]:
    """Give what `accuracy_reward` gives for the text after the reasoning, and 0.0 if the reasoning does not end.

    reasoning_delimiters: texts that end it, the first one that occurs counts; None = </think>.
    """
    delimiters = [THINK_END] if reasoning_delimiters is None else list(reasoning_delimiters)
    texts: list[str | None] = []
    for text in completion_texts(completions, completion_openings):
        end = next((delimiter for delimiter in delimiters if delimiter in text), None)
        texts.append(None if end is None else text.rpartition(end)[2])
    return _compared(texts, solution, log_extra)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Make a reward of correctness (as `accuracy_reward`) that falls with the length: with t tokens, at most max_len,

        low + (high - low) (1 + cos(pi t / max_len)) / 2

    where low and high are the values of correct completions; for wrong ones they change places, so that a longer one
    loses less.
    """

    def cosine_scaled_reward(
        completions: Completions,
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        completion_openings: Openings = None,
        **kwargs: Any,
    ) -> list[float | None]:
        rewards: list[float | None] = []
        are_correct = accuracy_reward(completions, solution, completion_openings=completion_openings)
        for correct, ids in zip(are_correct, completion_ids, strict=True):
            if correct is None:
                rewards.append(None)
                continue
            low, high = (min_value_correct, max_value_correct) if correct else (max_value_wrong, min_value_wrong)
            share = (1 + math.cos(math.pi * min(len(ids) / max_len, 1.0))) / 2
            rewards.append(low + (high - low) * share)
        return rewards

    return cosine_scaled_reward


def think_format_reward(completions: Completions, completion_openings: Openings = None, **kwargs: Any) -> list[float]:
    """Give 1.0 if the completion begins with one thought between <think> and </think>, else 0.0."""
    texts = completion_texts(completions, completion_openings)
    return [float(THOUGHT_FIRST.match(text) is not None) for text in texts]


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Make a penalty for repeated runs of ngram_size tokens: max_penalty times the share of runs that were there
    before. Raises ConfigError for a positive max_penalty."""
    if max_penalty > 0:
        raise ConfigError(f"max_penalty={max_penalty} would reward repetition; use a number of at most 0")

    @shaping_reward
    def repetition_penalty_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        rewards = []
        for ids in completion_ids:
            runs = [tuple(ids[start : start + ngram_size]) for start in range(len(ids) - ngram_size + 1)]
            rewards.append((1 - len(set(runs)) / len(runs)) * max_penalty if runs else 0.0)
        return rewards

    return repetition_penalty_reward


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Make DAPO's overlong penalty (arXiv:2503.14476, eq. 13): 0 up to max_completion_len - soft_punish_cache tokens,
    then in a straight line to -1 at max_completion_len, and -1 beyond. The key overlong_buffer adds it by itself."""

    @shaping_reward
    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        free = max_completion_len - soft_punish_cache
        rewards = []
        for ids in completion_ids:
            if len(ids) <= free:
                rewards.append(0.0)
            else:
                rewards.append((free - len(ids)) / soft_punish_cache if len(ids) <= max_completion_len else -1.0)
        return rewards

    return soft_overlong_punishment_reward


def _compared(texts: Sequence[str | None], solutions: Sequence[str], log_extra: LogExtra) -> list[float | None]:
    """Compare the answers in texts with solutions. A text that is None is wrong, whatever the solution is."""
    library: Any = load_math_verify("accuracy_reward")
    normalised = importlib.import_module("latex2sympy2_extended").NormalizationConfig(units=True)
    form = library.LatexExtractionConfig(
        normalization_config=normalised, boxed_match_priority=0, try_extract_without_anchor=False
    )
    # math-verify's limits are signals, which only the main thread can get.
    is_main = threading.current_thread() is threading.main_thread()
    parsing, comparing = (PARSING_SECONDS, MATH_SECONDS) if is_main else (None, None)
    rewards: list[float | None] = []
    answers: list[str | None] = []
    for text, solution in zip(texts, solutions, strict=True):
        gold = [] if text is None else library.parse(solution, parsing_timeout=parsing)
        if not gold:
            rewards.append(0.0 if text is None else None)
            answers.append(None)
            continue
        parsed_answer = library.parse(text, [form], extraction_mode="first_match", parsing_timeout=parsing)
        rewards.append(float(library.verify(gold, parsed_answer, timeout_seconds=comparing)))
        answers.append(answer_text(parsed_answer))
    if log_extra is not None:
        log_extra("extracted_answer", answers)
    return rewards
