"""Ready-made reward functions."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction
from types import ModuleType
from typing import Any

from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.completions import completion_text, completion_texts

MATH_SECONDS = 5  # math-verify's own limits
GSM8K_CHARS = 300
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_BOX = re.compile(r"\\boxed\s*\{")
# Between two boxes that are one answer: a comma, "and" or "or", and the name of an unknown.
_BESIDE = re.compile(r"\}\s*\$?\s*(?:[,;]|,?\s*(?:and|or)\b)\s*\$?\s*(?:\\?\w+\s*=\s*)?$")


def exact_match(
    completions: Sequence[str | Messages],
    answer: Sequence[Any],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    completion_openings: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Give 1.0 if the completion equals the `answer` column, both as text without surrounding white space, else 0.0.

    Of a completion with </think> what follows it is compared. A sample whose answer is None gets None: the function
    does not apply to it. The text of a completion is also its answer in majority votes (`extracted_answer`); one that
    says nothing has no vote. Raises TypeError for an answer of several values (a list, a dict).
    """
    texts = [text.strip() for text in completion_texts(completions, completion_openings, thinking=False)]
    if log_extra is not None:
        log_extra("extracted_answer", [text or None for text in texts])
    return [
        None if expected is None else float(text == single(expected, "exact_match").strip())
        for text, expected in zip(texts, answer, strict=True)
    ]


def gsm8k_reward(
    completions: Sequence[str | Messages],
    answer: Sequence[Any],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Give 1.0 if the number after the last "#### " equals that of the `answer` column as text, else 0.0.

    It is verl's reward for GSM8K (verl/utils/reward_score/gsm8k.py, method "strict"): commas aside, digits are compared
    as they stand (4.0 is not 4), only the last GSM8K_CHARS characters of a completion are read, and without the mark it
    is wrong. Expected answers are GSM8K's texts with "####", or numbers alone. None for an answer that is None.
    """
    answers = [_gsm8k_number(completion_text(completion)[-GSM8K_CHARS:]) for completion in completions]
    if log_extra is not None:
        log_extra("extracted_answer", list(answers))
    golds = [None if gold is None else single(gold, "gsm8k_reward") for gold in answer]
    wanted = [None if gold is None else gold.rpartition("####")[2].replace(",", "").strip() for gold in golds]
    return [None if gold is None else float(text == gold) for text, gold in zip(answers, wanted, strict=True)]


def _gsm8k_number(text: str) -> str | None:
    numbers = _GSM8K_ANSWER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def single(expected: Any, wanted_by: str) -> str:
    """Return an expected answer as text. Raises TypeError for a container, whose text no completion would equal."""
    if isinstance(expected, Mapping | list | tuple | Set) or getattr(expected, "shape", ()) != ():
        raise TypeError(
            f"{wanted_by}: the answer {expected!r:.100} is of type {type(expected).__name__}, which cannot be compared "
            "with a text; give one text or number per row, or write a reward function that reads this one"
        )
    return str(expected)


def math_reward(column: str | None = None) -> Callable[..., list[float | None]]:
    """Make a reward: 1 if the completion's final answer equals the expected one as mathematics, else 0; by math-verify.

    column: the dataset column with the expected answer: a number, LaTeX, a worked solution that ends in \\boxed{...},
    or GSM8K's text after "####". None: `answer`, or `solution` if there is none. A sample whose expected answer is
    missing or cannot be parsed gets None. Of a completion with </think> only what follows it is read, and nothing of
    one that ends within its thought. Of several answers the last one counts; answers in boxes side by side are a set.
    What was read is kept with the sample (`extracted_answer`), and is its answer in majority votes.

    math-verify stops an expression that takes longer than MATH_SECONDS by a signal, which only the main thread can get.
    In reward processes (reward_processes=1 or more) this works, and it protects a run from an answer that takes for
    ever. In the trainer's process functions run in a thread; there reward_timeout_seconds is the limit. math-verify
    warns of this (naming an option that users of this function do not have); only this warning is silenced.
    Raises ConfigError if math-verify is not installed.
    """
    load_math_verify()

    def score(
        said: Sequence[str], golds: Sequence[Any], log_extra: Callable[[str, list[Any]], None] | None
    ) -> list[float | None]:
        library: Any = load_math_verify()
        seconds = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
        targets = (library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig())

        def parse(text: str) -> list[Any]:
            return list(library.parse(text, targets, extraction_mode="first_match", parsing_timeout=seconds))

        texts = [None if gold is None else single(gold, "math_reward") for gold in golds]
        parsed = {text: parse(delimited(text)) for text in set(texts) if text is not None}
        rewards: list[float | None] = []
        answers: list[str | None] = []
        for answer, gold in zip(said, texts, strict=True):
            if gold is None or not parsed[gold]:
                rewards.append(None)
                answers.append(None)
                continue
            parsed_answer = parse(last_boxes(answer))
            rewards.append(float(library.verify(parsed[gold], parsed_answer, timeout_seconds=seconds)))
            answers.append(answer_text(parsed_answer))
        if log_extra is not None:
            log_extra("extracted_answer", answers)
        return rewards

    def math_reward(
        completions: Sequence[str | Messages], completion_openings: Sequence[str] | None = None, **columns: Any
    ) -> list[float | None]:
        names = ("answer", "solution") if column is None else (column,)
        for name in names:
            if name in columns:
                said = completion_texts(completions, completion_openings, thinking=False)
                return score(said, columns[name], columns.get("log_extra"))
        raise ValueError(f"math_reward needs the dataset column {' or '.join(names)}; there is none")

    if column is not None:  # the check before the run then sees that it is needed
        kinds = inspect.Parameter
        parameters = [kinds(name, kinds.KEYWORD_ONLY) for name in ("completions", column)]
        parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in ("completion_openings", "log_extra")]
        math_reward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return math_reward


def answer_text(parsed: Sequence[Any]) -> str | None:
    """Write an answer that math-verify has read so that equal ones are mostly written alike, to be counted: 0.5 and
    1/2 are, expressions that need algebra to be equal are not. None if nothing was read."""
    if not parsed:
        return None
    answer = parsed[0]
    is_decimal = type(answer).__name__ == "Float" and bool(answer.is_finite)
    return str(Fraction(str(answer))) if is_decimal else str(answer)


def last_boxes(text: str) -> str:
    """Cut a text to its last box, or to the last of several side by side; without a box it stays as it is.

    math-verify 0.9.0 reads boxes as a set if fewer than 70 characters with a comma, "and" or "or" lie between them, so
    that "it is \\boxed{1}. No, it is \\boxed{2}" equals neither (`findings/math_verify_comma.sh`).
    """
    starts = reversed([match.start() for match in _BOX.finditer(text)])
    return text[next((start for start in starts if not _BESIDE.search(text[max(0, start - 70) : start])), 0) :]


def delimited(gold: str) -> str:
    """Write an expected answer so that math-verify finds it: the text after "####", and between dollars if it is a
    formula without delimiters."""
    gold = gold.rpartition("####")[2].strip()
    has_delimiters = any(sign in gold for sign in ("$", "\\boxed", "\\(", "\\["))
    is_prose = re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?", "", gold)) is not None
    return gold if has_delimiters or is_prose else f"${gold}$"


def _is_other_warning(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Timeout is disabled as ")


def load_math_verify(wanted_by: str = "math_reward") -> ModuleType:
    """Import math-verify, without its warning of a limit that threads do not have. Raises ConfigError if it is not
    installed."""
    try:
        library = importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(f"{wanted_by} needs math-verify, which is not installed: pip install math-verify") from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_is_other_warning)  # the same filter is not added twice
    return library
