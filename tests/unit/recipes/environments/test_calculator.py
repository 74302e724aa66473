"""The calculator is exact, takes nothing but arithmetic, and always ends soon."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest

from hybrid_rl.agents.schemas import tool_schema
from recipes.environments.calculator import calculator

BY_HAND = {
    "1 + 2 * 3": "7",
    "0.1 + 0.2": "0.3",
    "1/3": "1/3 (about 0.333333333333)",
    "-0.05": "-0.05",
    "2^3+1": "9",
    "7 ÷ 2 × 3 − 1": "9.5",
    "-7 // 2": "-4",
    "2 ** -3": "0.125",
    "(-1)**(10**30 + 1)": "-1",
    "(-1)**(10**30)": "1",
    "0**(10**50)": "0",
    "sqrt(16/9)": "4/3 (about 1.33333333333)",
    "sqrt(2)": "1.41421356237",
    "round(2.567, 2)": "2.57",
    "max(1, 2.5, 3/7)": "2.5",
    "comb(50, 25)": "126410606437752",
    "factorial(25) / factorial(23)": "600",
    "1e3 + 0x10 + 1_000": "2016",
}
REFUSED = [
    *("9**9**9", "2**10**9", "10**4000", "factorial(10**9)", "factorial(2.5)", "1e99999999", "exp(1000)"),
    "comb(10**8, 5)",
    *("1/0", "0**-1", "log(0)", "sqrt(-1)", "(-8)**0.5", "round(1, 10**9)", "min()", "sqrt(1, 2)"),
    *("", "(((", "()", "1,000", "1j", "True + 1", "'a' * 3", "[1]", "x", "1 if 1 else 2", "(lambda: 1)()", "x := 1"),
    *("__import__('os')", "(1).__class__", "abs.__self__", "max(*[1])", "round(1, ndigits=2)", "f'{1}'", "1 < 2"),
    *("1" * 1001, "(" * 150 + "1" + ")" * 150 + "**" * 2 + "9**9**9", "1\0", "007"),
]


@pytest.mark.parametrize("expression", BY_HAND)
def test_by_hand(expression: str) -> None:
    assert calculator(expression) == BY_HAND[expression]


@pytest.mark.parametrize("expression", REFUSED, ids=lambda text: text[:20] or "empty")
def test_refused(expression: str) -> None:
    start = time.thread_time()
    with pytest.raises(ValueError, match="."):
        calculator(expression)
    assert time.thread_time() - start < 0.5


def test_against_fractions() -> None:
    draw = random.Random(1)

    def term(depth: int) -> str:
        if depth == 0:
            return str(draw.randint(0, 99))
        return f"({term(depth - 1)} {draw.choice('+-*/')} {term(depth - 1)})"

    for _ in range(300):
        text = term(3)
        try:
            expected = eval("".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(text)))
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="divides by zero"):
                calculator(text)
            continue
        assert Fraction(calculator(text).split(" ")[0]) == expected


def _parts(text: str) -> list[str]:
    return text.replace("(", "( ").replace(")", " )").split(" ")


def test_it_is_a_tool() -> None:
    assert tool_schema(calculator)["function"]["parameters"]["required"] == ["expression"]
