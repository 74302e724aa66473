"""The grader: one program against its tests, run after run in the sandbox."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.errors import DataError
from hybrid_rl.extras.programs.code_programs import (
    ASSERTIONS,
    CALL,
    assertions_request,
    call_request,
    defined_names,
    read_answer,
    whole_program,
)
from hybrid_rl.extras.programs.code_tests import AssertionTest, CallTest, InputTest, Test, read_tests
from hybrid_rl.extras.programs.code_values import is_same, is_same_output, spell, unspell
from hybrid_rl.extras.sandbox import ProgramResult, Sandbox

MAX_QUESTIONS = 500  # calls of the program in one text of assertions
NO_ANSWER = {"error": "RuntimeError"}  # of a program that ends without one
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError)


class UnusableTestError(Exception):
    """A test that cannot be asked of any program."""


@dataclass(frozen=True)
class Grade:
    """What a program came to. value: 0 to 1; None if its tests cannot be used, for the reason `problem`. is_late: a run
    was ended by a limit of time."""

    value: float | None
    problem: str = ""
    is_late: bool = False


class Clock:
    """The time that is left to a program for all of its tests, in which only the time of its runs counts. is_late:
    whether a run was ended, or not begun, for lack of time."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self.is_late = False

    async def run(self, sandbox: Sandbox, code: str, stdin: str) -> ProgramResult | None:
        """Run a program; None if no time is left."""
        if self._left <= 0:
            self.is_late = True
            return None
        result = await asyncio.wrap_future(sandbox.start(code, stdin))
        self._left -= result.seconds
        self.is_late |= result.end == "time"
        return result


class Grader:
    """Grades programs. programs, tests: the sandboxes in which the policy's code and the tests run, apart from each
    other. total_seconds: for all tests of a program."""

    def __init__(self, programs: Sandbox, tests: Sandbox, total_seconds: float) -> None:
        self._programs, self._tests, self._total_seconds = programs, tests, total_seconds

    def check(self) -> None:
        """Raise SandboxError if programs cannot be confined on this machine."""
        for sandbox in (self._programs, self._tests):
            sandbox.strength()

    async def grade(
        self, program: str, given: Any, entry_point: str | None = None, setup: str | None = None, *, is_share: bool
    ) -> Grade:
        """Run a program against the tests of a row. is_share: the value is the share of tests that it passes, and all
        are run; else it is 0 or 1, and the first failure is the last run."""
        try:
            tests = read_tests(given, entry_point, setup or "")
        except DataError as error:
            return Grade(None, str(error))
        if not program:
            return Grade(0.0)
        clock, num_passed = Clock(self._total_seconds), 0
        try:
            for test in tests:
                has_passed = await self._passes(program, test, clock)
                num_passed += has_passed
                if not has_passed and not is_share:
                    break
        except UnusableTestError as error:
            return Grade(None, str(error))
        value = num_passed / len(tests) if is_share else float(num_passed == len(tests))
        return Grade(value, is_late=clock.is_late)

    async def _passes(self, program: str, test: Test, clock: Clock) -> bool:
        if isinstance(test, InputTest):
            result = await clock.run(self._programs, whole_program(program), test.stdin)
            has_ended_well = result is not None and not result.end and result.code == 0
            return has_ended_well and result is not None and is_same_output(result.output, test.output)
        if isinstance(test, CallTest):
            answer = await self._ask(program, test.name, spell(list(test.arguments)), spell({}), clock)
            try:
                return "value" in answer and is_same(unspell(answer["value"]), test.result)
            except UNREADABLE:
                return False
        return await self._holds(program, test, clock)

    async def _ask(self, program: str, name: str, arguments: Sequence[Any], keywords: Any, clock: Clock) -> Any:
        """Call a function of the program, and return its answer."""
        result = await clock.run(self._programs, CALL, call_request(program, name, arguments, keywords))
        answer = {} if result is None or result.end else read_answer(result.output)
        return answer if "value" in answer or isinstance(answer.get("error"), str) else NO_ANSWER

    async def _holds(self, program: str, test: AssertionTest, clock: Clock) -> bool:
        """Run assertions, asking the program whenever they call it with arguments of their own."""
        known: dict[str, Any] = {}
        mark = f"\x00{secrets.token_hex()}:"
        # A function of the program may have the name of one of Python's.
        names = sorted({*test.names, *(defined_names(program) & {*test.builtins})})
        while len(known) <= MAX_QUESTIONS:
            result = await clock.run(self._tests, ASSERTIONS, assertions_request(test, names, known, mark))
            answer = {} if result is None or result.end else read_answer(result.output, mark)
            if "unusable" in answer:
                raise UnusableTestError(f"{answer['unusable']}, in {test.source!r:.200}")
            if "question" not in answer:
                return answer.get("passed") is True
            name, arguments, keywords = json.loads(answer["question"])
            known[answer["question"]] = await self._ask(program, name, arguments, keywords, clock)
        raise UnusableTestError(f"a test calls the program more than {MAX_QUESTIONS} times: {test.source!r:.200}")
