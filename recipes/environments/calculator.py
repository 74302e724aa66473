"""A calculator as a tool: exact arithmetic, and nothing else of Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 1000
MAX_BITS = 10_000  # of a numerator or denominator: about 3,000 digits
MAX_DIGITS_SHOWN = 12  # of numbers that have no end

Number = Fraction | float


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly, such as (3 + 4) * 2/3 or sqrt(2) ** 3.

    Args:
        expression: Numbers, parentheses, + - * / // % ** (or ^), pi, e, and functions such as sqrt, abs, round, floor,
            ceil, min, max, gcd, lcm, factorial, comb, exp, log, log2, log10, sin, cos, tan.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are taken")
    text = expression.strip()
    for sign, written in (("^", "**"), ("×", "*"), ("÷", "/"), ("−", "-")):
        text = text.replace(sign, written)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression ({getattr(error, 'msg', error)})") from None
    try:
        return _shown(_value(tree.body, text))
    except ZeroDivisionError:
        raise ValueError(f"{expression!r} divides by zero") from None
    except OverflowError:
        raise ValueError(f"{expression!r} is too large") from None
    except RecursionError:
        raise ValueError(f"{expression!r} is nested too deeply") from None


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant() if type(node.value) in (int, float):
            return _literal(ast.get_source_segment(text, node) or "")
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text)
        case ast.BinOp(op=ast.Pow()):
            return _checked(_power(_value(node.left, text), _value(node.right, text)))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = _value(node.left, text), _value(node.right, text)
            return _checked(_OPERATORS[type(node.op)](left, right))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _checked(_call(name, [_value(argument, text) for argument in node.args]))
    raise ValueError(f"{(ast.get_source_segment(text, node) or text)!r} is not arithmetic")


def _literal(text: str) -> Fraction:
    """Return a number as it is written: 0.1 is one tenth."""
    if text[:2].lower() in ("0x", "0b", "0o"):
        return Fraction(int(text, 0))
    number = Decimal(text)
    if abs(number.adjusted()) > MAX_BITS / 4:
        raise ValueError(f"{text} is too large or too small")
    return Fraction(number)


def _checked(value: Number | int) -> Number:
    """Raise ValueError if a number is too long to go on with."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the result is not a finite number")
        return value
    exact = Fraction(value)
    if max(exact.numerator.bit_length(), exact.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"the result has more than {round(MAX_BITS * math.log10(2))} digits")
    return exact


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits > 1 and bits * abs(exponent.numerator) > 2 * MAX_BITS:  # too long for sure; else seen afterwards
            raise ValueError(f"a power with the exponent {exponent} is too long")
        if bits <= 1 and abs(exponent) > 2:  # 0, 1 and -1: only sign and parity matter, and Python would loop for long
            exponent = Fraction((2 - exponent.numerator % 2) * (1 if exponent > 0 else -1))
        return base ** int(exponent)
    result = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise ValueError("a root of a negative number is not real")
    return result


def _call(name: str, values: Sequence[Number]) -> Number | int:
    function, most = _FUNCTIONS[name]
    if not 1 <= len(values) <= most:
        raise ValueError(f"{name} takes {f'1 to {most} numbers' if most > 1 else 'one number'}, not {len(values)}")
    try:
        return function(*values)
    except (TypeError, ValueError) as error:
        arguments = ", ".join(map(_shown, values))
        raise ValueError(f"{name}({arguments}): {error}") from None


def _root(value: Number) -> Number:
    """Return the square root, exactly if it is a fraction."""
    if isinstance(value, Fraction) and value >= 0:
        parts = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if (parts[0] ** 2, parts[1] ** 2) == (value.numerator, value.denominator):
            return Fraction(*parts)
    return math.sqrt(value)


def _whole(value: Number) -> int:
    if value != int(value):
        raise ValueError(f"{_shown(value)} is no whole number")
    return int(value)


def _factorial(value: Number) -> int:
    return math.factorial(_small(value))


def _small(value: Number) -> int:
    if not -MAX_BITS <= 8 * value <= MAX_BITS:
        raise ValueError(f"{_shown(value)} is too large")
    return _whole(value)


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    places = _small(digits)
    return round(value, places) if isinstance(value, float) else _checked(round(value, places))


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NAMES: dict[str, Number] = {"pi": math.pi, "e": math.e}
_MANY = 100
# With the number of arguments that each takes at most.
_FUNCTIONS: dict[str, tuple[Callable[..., Number | int], int]] = {
    "abs": (abs, 1),
    "round": (_round, 2),
    "floor": (math.floor, 1),
    "ceil": (math.ceil, 1),
    "min": (lambda *values: min(values), _MANY),
    "max": (lambda *values: max(values), _MANY),
    "gcd": (lambda *values: math.gcd(*map(_whole, values)), _MANY),
    "lcm": (lambda *values: math.lcm(*map(_whole, values)), 2),
    "factorial": (_factorial, 1),
    "comb": (lambda n, k: math.comb(_small(n), _small(k)), 2),
    "sqrt": (_root, 1),
    **{
        name: (getattr(math, name), 1) for name in ("exp", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan")
    },
    "log": (math.log, 2),
}


def _shown(value: Number) -> str:
    """Write a number: whole, as a decimal that ends, or as a fraction with about what it is."""
    if isinstance(value, float):
        return f"{value:.{MAX_DIGITS_SHOWN}g}"
    if value.denominator == 1:
        return str(value.numerator)
    rest, places = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        places = max(places, power)
    if rest == 1 and places <= MAX_DIGITS_SHOWN:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{value} (about {float(value):.{MAX_DIGITS_SHOWN}g})"
