"""Formats of published datasets: recognised by their columns, and read as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.data.prompts import PROMPT_COLUMN, shorten
from hybrid_rl.errors import DataError

ANSWER_COLUMN = "answer"
GSM8K_MARK = "####"
# Names that other libraries and published datasets give to the column with the prompt.
PROMPT_HABITS = (
    *("question", "problem", "messages", "conversations", "instruction", "input", "query", "text", "context_messages"),
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


@dataclass(frozen=True)
class Format:
    """A form in which datasets are published.

    name: of the dataset or library that made it common.
    prompt_column: the column with the prompt.
    source: the column from which the expected answer is made; it reaches reward functions as `answer`.
    answer_of: returns the answer in a value of that column. Raises ValueError, with the reason, if there is none.
    is_question: whether prompts are plain questions, which belong into a user's message.
    moved_to: the name under which a source column called `answer` stays available.
    said: how it is read, in a line.
    """

    name: str
    prompt_column: str
    source: str
    answer_of: Callable[[Any], Any]
    said: str
    is_question: bool = False
    moved_to: str | None = None

    @property
    def made(self) -> tuple[str, ...]:
        """The columns that reading adds."""
        return (ANSWER_COLUMN, *([] if self.moved_to is None else [self.moved_to]))

    def answer(self, value: Any, row: int) -> Any:
        """Return the expected answer of a row. value: of the source column. Raises DataError if there is none."""
        try:
            return self.answer_of(value)
        except ValueError as error:
            raise DataError(
                f"row {row}, column {self.source!r}: {error} (the dataset looks like {self.name}; correct the row, or "
                f"set data.prompt_column={self.prompt_column} to read the columns as they are)"
            ) from None


def recognise(columns: Sequence[str], first: Mapping[str, Any]) -> Format | None:
    """Return the format of a dataset; None if it has none of these, or needs no reading. first: its first row."""
    names = set(columns)
    if names >= {PROMPT_COLUMN, "reward_model"} and isinstance(decoded_mapping(first["reward_model"]), Mapping):
        return None if ANSWER_COLUMN in names else VERL
    if PROMPT_COLUMN in names:
        return None
    if names >= {"question", ANSWER_COLUMN} and "solution" not in names:
        return GSM8K if isinstance(first[ANSWER_COLUMN], str) and GSM8K_MARK in first[ANSWER_COLUMN] else None
    if names >= {"problem", "solution"} and names & {"level", "subject", "type"}:
        return MATH_ANSWERED if ANSWER_COLUMN in names else MATH
    return None


def hint(columns: Sequence[str]) -> str:
    """Return what to set for a dataset without a column `prompt`; empty if no column has a name that is known."""
    names = [name for name in PROMPT_HABITS if name in columns]
    return f"set data.prompt_column={names[0]}" if names else ""


def final_number(text: Any) -> str:
    """Return what follows the last #### of a solution of GSM8K, without commas between thousands.

    Raises ValueError if there is nothing.
    """
    if not isinstance(text, str):
        raise ValueError(f"{shorten(text)} is of type {type(text).__name__}, not a text that ends in {GSM8K_MARK} 42")
    before, mark, answer = text.rpartition(GSM8K_MARK)
    if not mark or not answer.strip():
        raise ValueError(f"no answer follows {GSM8K_MARK} in {shorten(text)}")
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())


def boxed(text: Any) -> str:
    r"""Return the content of the last \boxed{...} (or \fbox{...}, or `\boxed 7`) of a worked solution, braces matched.

    Raises ValueError if there is none, or if it does not end.
    """
    if not isinstance(text, str):
        raise ValueError(f"{shorten(text)} is of type {type(text).__name__}, not a text with \\boxed{{...}}")
    boxes = list(_BOX.finditer(text))
    if not boxes:
        raise ValueError(f"no \\boxed{{...}} in {shorten(text)}")
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        answer = re.match(r"[^\s$.]+", text[start:])
        if answer is None:
            raise ValueError(f"the last \\boxed of {shorten(text[-60:])} is empty")
        return answer[0]
    depth = 0
    for place in range(start, len(text)):
        escaped = text[place - 1] == "\\" and text[place - 2] != "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            answer_text = text[start + 1 : place].strip()
            if not answer_text:
                break
            return answer_text
    raise ValueError(f"the last \\boxed of {shorten(text[-60:])} is empty or does not end")


def decoded_mapping(value: Any) -> Any:
    """Return a mapping that was stored as a text of JSON; anything else as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _ground_truth(value: Any) -> Any:
    mapping = decoded_mapping(value)
    if not isinstance(mapping, Mapping) or "ground_truth" not in mapping:
        raise ValueError(f"{shorten(value)} has no ground_truth")
    return mapping["ground_truth"]


VERL = Format(
    "verl's parquet",
    PROMPT_COLUMN,
    "reward_model",
    _ground_truth,
    "answer = reward_model.ground_truth; all columns reach rewards as they are",
)
GSM8K = Format(
    "GSM8K as published",
    "question",
    ANSWER_COLUMN,
    final_number,
    f"prompt = question; answer = what follows {GSM8K_MARK}; solution = the whole text",
    is_question=True,
    moved_to="solution",
)
MATH = Format(
    "MATH as published",
    "problem",
    "solution",
    boxed,
    "prompt = problem; answer = the last \\boxed{...} of solution",
    is_question=True,
)
MATH_ANSWERED = Format(
    "MATH with answers (MATH-500)",
    "problem",
    ANSWER_COLUMN,
    lambda value: value,
    "prompt = problem; answer as it is",
    is_question=True,
)
