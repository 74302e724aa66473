"""The questions to judges, and the scores in their answers."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hybrid_rl.batch.messages import message_content, prompt_text
from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.completions import conversation_text

JudgeMode = Literal["pointwise", "pairwise"]
# A template, or a function of the same names as keywords that gives the text or the chat messages.
JudgePrompt = str | Callable[..., str | Messages]
JudgeParser = Callable[[str], float | None]

MAX_GRADE = 10.0
POINTWISE_PROMPT = """Grade how well the response answers the request.

<request>
{prompt}
</request>

<response>
{completion}
</response>

Judge correctness first, then helpfulness and clarity; do not reward length. Think briefly, then give your \
grade, a number from 0 (useless) to 10 (perfect), on the last line: <score>grade</score>"""
PAIRWISE_PROMPT = """Compare two responses to the same request.

<request>
{prompt}
</request>

<response_a>
{completion_a}
</response_a>

<response_b>
{completion_b}
</response_b>

Judge correctness first, then helpfulness and clarity; ignore length and the order of the responses. Think \
briefly, then name the better one, A, B or tie, on the last line: <winner>A</winner>, <winner>B</winner> or \
<winner>tie</winner>"""

_SCORE = re.compile(r"<score>\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*(?:/\s*10\s*)?</score>", re.IGNORECASE)
_WINNER = re.compile(r"<winner>\s*(A|B|tie)\s*</winner>", re.IGNORECASE)
_SHARES = {"a": 1.0, "b": 0.0, "tie": 0.5}


def parse_grade(text: str) -> float | None:
    """Read the number in the last <score></score>; None if there is none, or it is not from 0 to 10."""
    grades = _SCORE.findall(text)
    grade = float(grades[-1]) if grades else None
    return grade if grade is not None and 0.0 <= grade <= MAX_GRADE else None


def parse_winner(text: str) -> float | None:
    """Read the last <winner></winner>: 1 if it names A, 0 for B, 0.5 for a tie; None if there is none."""
    winners = _WINNER.findall(text)
    return _SHARES[winners[-1].lower()] if winners else None


@dataclass(frozen=True)
class Question:
    """One question to a judge. samples: the index of the one to grade, or the indices of A and B."""

    samples: tuple[int, ...]
    prompt: str | Messages


SHOWN_ANSWERS = 3  # of a process: enough to see what is wrong with prompt or parser
_unreadable = itertools.count()
_logger = logging.getLogger("hybrid_rl")


@dataclass(frozen=True)
class JudgeStyle:
    """The questions and the parser of a judge.

    prompt: a template with {prompt}, {completion} (pairwise {completion_a}, {completion_b}) and names of dataset
    columns, or a function that takes these keywords. parser: turns an answer into a number, the grade, or pairwise the
    share of the win (0 to 1) that goes to A; None if the answer holds nothing usable.
    """

    mode: JudgeMode
    prompt: JudgePrompt
    parser: JudgeParser

    def read(self, text: str | None) -> float | None:
        """Return the number in a judge's answer, None if there is none; the first few such answers are logged."""
        value = None if text is None else self.parser(text)
        if value is None and next(_unreadable) < SHOWN_ANSWERS:
            _logger.warning("the parser of a judge found nothing in the answer %.300r", text)
        return value

    @classmethod
    def of(cls, mode: JudgeMode, prompt: JudgePrompt | None, parser: JudgeParser | None) -> JudgeStyle:
        """Fill in the defaults for None. Raises ConfigError for an unknown mode and an unusable prompt or parser."""
        if mode not in get_args(JudgeMode):
            raise ConfigError(f"mode={mode!r}; use one of {', '.join(get_args(JudgeMode))}")
        is_pair = mode == "pairwise"
        prompt = (PAIRWISE_PROMPT if is_pair else POINTWISE_PROMPT) if prompt is None else prompt
        parser = (parse_winner if is_pair else parse_grade) if parser is None else parser
        wanted = ("{completion_a}", "{completion_b}") if is_pair else ("{completion}",)
        if isinstance(prompt, str) and (missing := [name for name in wanted if name not in prompt]):
            raise ConfigError(f"the judge's prompt lacks {missing[0]}: the judge would not see what to judge")
        if not callable(parser) or not (isinstance(prompt, str) or callable(prompt)):
            raise ConfigError(f"a judge takes a text or function as prompt and a function as parser, not {prompt!r}")
        return cls(mode, prompt, parser)

    def questions(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        columns: Mapping[str, Sequence[Any]],
        groups: Sequence[int],
        openings: Sequence[str] | None = None,
    ) -> list[Question]:
        """Write all questions about N samples: one each, or one for each ordered pair of a group. Both orders of a pair
        are asked, so that a preference for the first or second place cancels out. columns: name -> N values. openings:
        what the prompts have opened of the completions, None: nothing."""
        pairs = zip(completions, openings or [""] * len(completions), strict=True)
        texts = [conversation_text(*pair) for pair in pairs]

        def render(sample: int, **shown: str) -> str | Messages:
            values = {name: values[sample] for name, values in columns.items()}
            values |= {"prompt": _request(prompts[sample]), **shown}
            if not isinstance(self.prompt, str):
                return self.prompt(**values)
            try:
                return self.prompt.format(**values)
            except (KeyError, IndexError) as error:
                raise ConfigError(
                    f"the judge's prompt has the placeholder {error}, but there are only {', '.join(sorted(values))}; "
                    f"double all other braces"
                ) from error

        if self.mode == "pointwise":
            return [Question((i,), render(i, completion=text)) for i, text in enumerate(texts)]
        return [
            Question((a, b), render(a, completion_a=texts[a], completion_b=texts[b]))
            for a in range(len(texts))
            for b in range(len(texts))
            if a != b and groups[a] == groups[b]
        ]

    def scores(
        self, questions: Sequence[Question], answers: Sequence[float | None | Exception], num_samples: int
    ) -> list[Any]:
        """Score each sample: its grade, or the mean share of wins over its comparisons.

        answers: the parser's number for each question, or the exception in its place. A comparison without a number is
        left out; a sample without any gets the first of its exceptions, else None, as does one without a question.
        """
        if self.mode == "pointwise":
            grades: list[Any] = [None] * num_samples
            for question, answer in zip(questions, answers, strict=True):
                grades[question.samples[0]] = answer
            return grades
        shares: list[list[float]] = [[] for _ in range(num_samples)]
        errors: dict[int, Exception] = {}
        for question, answer in zip(questions, answers, strict=True):
            a, b = question.samples
            if isinstance(answer, Exception):
                for sample in (a, b):
                    errors.setdefault(sample, answer)
            elif answer is not None:
                shares[a].append(float(answer))
                shares[b].append(1.0 - float(answer))
        return [sum(own) / len(own) if own else errors.get(sample) for sample, own in enumerate(shares)]


def _request(prompt: str | Messages) -> str:
    """Write a prompt as text: chat messages with their roles; of a single message of the user only what it says."""
    if not isinstance(prompt, str) and len(prompt) == 1 and prompt[0].get("role") == "user":
        return message_content(prompt[0])
    return prompt_text(prompt)
