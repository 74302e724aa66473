"""The reward for programs: the code of a completion is run against tests, in the sandbox."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, get_args

from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.programs.code_grader import Grader
from hybrid_rl.extras.sandbox import MIB, Sandbox
from hybrid_rl.rewards.completions import completion_text

logger = logging.getLogger("hybrid_rl")

Score = Literal["all", "share"]
OUTPUT_BYTES = 16 * MIB
_BLOCK = re.compile(r"```([^`\n]*)\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py")


def code_reward(
    tests: str = "tests",
    *,
    entry_point: str = "entry_point",
    setup: str = "test_setup_code",
    score: Score = "all",
    timeout_seconds: float = 5.0,
    total_seconds: float = 30.0,
    memory_bytes: int = 512 * MIB,
    file_bytes: int = 16 * MIB,
    packages: Sequence[str] = (),
    max_running: int | None = None,
    strict: bool = True,
) -> Callable[..., Coroutine[Any, Any, list[float | None]]]:
    """Make a reward: 1 if the program of a completion passes its tests, else 0. Programs are run in a sandbox.

    The program is the last block of Python in the completion (after </think>); without a block the whole text.

    tests: the dataset column with the tests of a row, as lists, dicts or JSON text: `{"inputs": [...], "outputs":
    [...]}` for programs that read their standard input and print (APPS, TACO), with `"fn_name"` for calls of a function
    or of a method of `Solution`; a list of `{"input", "output"}` (LiveCodeBench, open-r1); assertions as text, or as a
    list of texts (MBPP, HumanEval). entry_point: the column with the name of the function that HumanEval's `check`
    gets; setup: the column with Python before each assertion; both may be missing. score: "all" = 1 if all tests pass,
    "share" = the share that passes. timeout_seconds: of one run; total_seconds: of all runs of a completion, after
    which its other tests count as failed; waiting for a free core counts for neither. memory_bytes, file_bytes,
    packages, max_running, strict: see `hybrid_rl.extras.sandbox.Sandbox`.

    A test gets plain values from the program and nothing else: numbers, texts, bytes, lists, tuples, dicts and sets.
    Expected results never enter the program's process, so no program can read them, or pass by an object that equals
    everything or an exit at the right moment. Tests that hand the program functions or objects cannot be used this way,
    nor those that never call it, or need a package that is not there: their sample gets None, as with tests of no known
    form, and a warning names the first of them. A program that returns an object fails, `Solution()` excepted.

    The metrics `code/no_program_share` and `code/timeout_share` are logged.

    Raises ConfigError for limits that are too small, and for packages that are not installed; SandboxError if programs
    cannot be confined on this machine.
    """
    if score not in get_args(Score):
        raise ConfigError(f"code_reward(score={score!r}); use one of {', '.join(get_args(Score))}")
    if not total_seconds > 0:
        raise ConfigError(f"code_reward(total_seconds={total_seconds!r}): give a number above 0")
    limits: dict[str, Any] = {"timeout_seconds": timeout_seconds, "memory_bytes": memory_bytes}
    limits |= {"output_bytes": OUTPUT_BYTES, "file_bytes": file_bytes, "packages": packages}
    limits |= {"max_running": max_running, "strict": strict}
    # Two processes, so that no program is forked from one that has seen what is expected.
    grader = Grader(Sandbox("code_reward", **limits), Sandbox("code_reward", **limits), total_seconds)
    grader.check()
    has_warned = False

    async def code_reward(
        completions: Sequence[str | Messages],
        log_metric: Callable[[str, float], None],
        completion_openings: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        nonlocal has_warned
        if tests not in columns:
            raise ValueError(f"code_reward needs the dataset column {tests!r} with the tests; there is none")
        openings = completion_openings or [""] * len(completions)
        programs = [find_program(*pair) for pair in zip(completions, openings, strict=True)]
        nothing = [None] * len(completions)
        rows = zip(
            programs, columns[tests], columns.get(entry_point, nothing), columns.get(setup, nothing), strict=True
        )
        grades = await asyncio.gather(*(grader.grade(*row, is_share=score == "share") for row in rows))
        problems = [grade.problem for grade in grades if grade.problem]
        if problems and not has_warned:
            has_warned = True
            logger.warning("code_reward: %s; such samples get no reward, and this is said once", problems[0])
        log_metric("code/no_program_share", programs.count("") / len(programs))
        log_metric("code/timeout_share", sum(grade.is_late for grade in grades) / len(grades))
        return [grade.value for grade in grades]

    return code_reward


def find_program(completion: str | Messages, opening: str = "") -> str:
    """Return the program of a completion: its last block of Python, or its last block of no named language, or, without
    any block, all of its text; "" if there is nothing."""
    text = completion_text(completion, thinking=False, opening=opening)
    blocks = _BLOCK.findall(text)
    if not blocks:
        return text.strip("\n") if "```" not in text and text.strip() else ""
    for languages in (PYTHON, ("",)):
        programs = [code for language, code in blocks if language.strip().lower() in languages]
        if programs:
            return str(programs[-1])
    return ""
