"""One call of one reward function: its log, its values and its exceptions.

Reward processes load this file by its path (`process/call_main.py`), so it imports nothing of this package.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
import re
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

RESERVED_METRICS = frozenset({"step"})
ADDRESS = re.compile(r"<.+ at 0x[0-9a-f]+>", re.DOTALL | re.IGNORECASE)  # an object without its own text


class CallOutcome(NamedTuple):
    """The result of one call over K samples. Exactly one of `failure` and `values` is meaningful.

    `values`: [K] floats; None if the function does not apply; nan if the sample is listed in `errors`; the sum if there
    is one number per token.
    `errors`: position in the call -> (reason, detail), for samples whose value is not a finite number.
    `failure`: (reason, detail) if the call as a whole gave nothing; then `values`, `extras`, `metrics` are empty.
    `extras`: column -> [K] values from `log_extra`. `metrics`: (name, value) from `log_metric`, in order.
    `tokens`: position in the call -> one number per token, for samples that got these.
    `repeats`: (reason, detail) of the failed call over several samples that this one repeats for one of them.
    `is_left_behind`: the call could not be ended and may still run; it is not repeated.
    """

    values: list[float | None]
    errors: dict[int, tuple[str, str]]
    failure: tuple[str, str] | None
    extras: dict[str, list[Any]]
    metrics: list[tuple[str, float]]
    tokens: dict[int, list[float]]
    repeats: tuple[str, str] | None = None
    is_left_behind: bool = False


def failed_call(reason: str, detail: str, *, is_left_behind: bool = False) -> CallOutcome:
    """Make the outcome of a call that gave no values at all."""
    return CallOutcome([], {}, (reason, detail), {}, [], {}, is_left_behind=is_left_behind)


class CallLog:
    """The `log_extra` and `log_metric` that one call receives. What a failed call logged is dropped with it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.extras: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: Any = None) -> None:
        """Add a column to the log of samples: one value per sample of the call, kept as JSON gives it back: tuples as
        lists, numpy and torch as numbers and lists, NaN and infinities as None, and any other object as its text, if
        that says more than its address.

        Raises TypeError for anything but a value per sample (a single value, a text, a dict), ValueError if the
        length differs from the number of samples, and for a value that cannot be written.
        """
        check_name("log_extra", column)
        column_values = one_per_sample(values, column)
        if len(column_values) != self.num_samples:
            raise ValueError(
                f"log_extra({column!r}, ...) got {len(column_values)} values for {self.num_samples} samples; "
                "give one value per sample"
            )
        self.extras[column] = [as_json(value, column, position) for position, value in enumerate(column_values)]

    def log_metric(self, name: str, value: Any = None) -> None:
        """Log one number; the numbers of a training step are averaged. If a metric of the library has
        this name (reward, loss), or it begins with eval/, it is logged as log_metric/<name>: neither hides the other.

        Raises TypeError for anything but a number, ValueError for a name that is empty, or that the record itself uses.
        """
        check_name("log_metric", name)
        if name in RESERVED_METRICS:
            raise ValueError(f"log_metric({name!r}, ...) would hide the {name} of the record; choose another name")
        try:
            self.metrics.append((name, to_number(value)))
        except TypeError as error:
            raise TypeError(f"log_metric({name!r}, ...): {error}") from None

    def functions(self, names: Sequence[str]) -> dict[str, Callable[..., None]]:
        """Return the log functions with these names, as keyword arguments."""
        return {name: getattr(self, name) for name in names}


def check_name(function: str, name: Any) -> None:
    """Raise TypeError for a name that is not text, ValueError for an empty one."""
    if not isinstance(name, str):
        raise TypeError(f"{function}({name!r}, ...): the name is of type {type(name).__name__}; use text")
    if not name.strip():
        raise ValueError(f"{function}({name!r}, ...): the name is empty; choose one that says what it is")


def one_per_sample(values: Any, column: str) -> list[Any]:
    """Return the values of log_extra as a list. Raises TypeError for anything without an order of samples: the letters
    of a text, or the keys of a dict, would be taken for values."""
    try:
        entries = None if isinstance(values, str | bytes | Mapping | Set) else iter(values)
    except TypeError:  # also of an array without dimensions, which has the method
        entries = None
    if entries is None:
        raise TypeError(
            f"log_extra({column!r}, ...) got {values!r:.100} of type {type(values).__name__}; give one value per sample"
        )
    return list(entries)


def as_json(value: Any, column: str, position: int) -> Any:
    """Return a value of log_extra as it is written and read again. Done now, while its function can get the error:
    records are written at the end of the step, and later changes by the function must not reach them."""
    try:
        return json.loads(json.dumps(value, default=plain), parse_constant=lambda _: None)
    except Exception as error:  # from JSON, or from an object's own __str__
        raise ValueError(
            f"log_extra({column!r}, ...): value {position} of type {type(value).__name__} cannot be written as JSON "
            f"({type(error).__name__}: {error}); give text, numbers, None, lists, or dicts with text as keys"
        ) from error


def plain(value: Any) -> Any:
    """Convert a value that JSON does not know: numbers and arrays of numpy and torch to numbers and lists, all else to
    its text. Raises TypeError for an object whose text is only its address."""
    if hasattr(value, "tolist"):
        return value.tolist()
    text = str(value)
    if ADDRESS.fullmatch(text):
        raise TypeError(f"str({text}) is only a memory address; log something readable")
    return text


def to_number(value: Any) -> float:
    """Convert a scalar of Python or numpy, or a tensor without dimensions; bool counts. Raises TypeError otherwise."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{value!r} of type {type(value).__name__} is not a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def to_numbers(value: Any) -> float | list[float]:
    """Convert a scalar to a float; a sequence, 1-d array or tensor to one per entry. Raises TypeError otherwise."""
    num_dims = getattr(value, "ndim", None)
    if isinstance(num_dims, int) and num_dims > 1:
        raise TypeError(f"an array of shape {tuple(value.shape)} is neither a number nor one number per token")
    if num_dims == 1:
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_number(entry) for entry in value]
    return to_number(value)


def check_values(returned: Any, log: CallLog) -> CallOutcome:
    """Turn what a reward function returned into an outcome.

    Accepts a sequence or a 1-d array or tensor of the right length, with entries that `to_numbers` takes. Whether a
    sample may have numbers per token, and how many, is checked by the caller. An exception in the place of a value
    (as `asyncio.gather(..., return_exceptions=True)` gives) fails its sample, as if it had been raised. A wrong
    container is a failure "type", a wrong length "count"; both concern every sample of the call, because nothing says
    which value belongs to which.
    """
    count = "one number" if log.num_samples == 1 else f"{log.num_samples} numbers"
    expected = f"expected a list of {count} or None, one per completion"
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        return failed_call("type", "returned a coroutine from a plain function; declare the function with `async def`")
    if hasattr(returned, "tolist"):
        if getattr(returned, "ndim", 1) != 1:
            return failed_call("type", f"returned an array of shape {tuple(returned.shape)}; {expected}")
        returned = returned.tolist()
    if callable(returned) and not isinstance(returned, Sequence):
        made = getattr(returned, "__name__", type(returned).__name__)
        return failed_call("type", f"returned a function ({made}); call what makes it, and pass what that returns")
    if isinstance(returned, str | bytes) or not isinstance(returned, Sequence):
        return failed_call("type", f"returned {returned!r} of type {type(returned).__name__}; {expected}")
    if len(returned) != log.num_samples:
        return failed_call("count", f"returned {len(returned)} value{'s' * (len(returned) != 1)}; {expected}")

    values: list[float | None] = []
    errors: dict[int, tuple[str, str]] = {}
    tokens: dict[int, list[float]] = {}
    for position, value in enumerate(returned):
        values.append(None if value is None else math.nan)
        if value is None:
            continue
        if isinstance(value, Exception):
            errors[position] = ("raised", "".join(traceback.format_exception(value)).rstrip())
            continue
        try:
            reward = to_numbers(value)
        except TypeError as error:
            errors[position] = ("type", str(error))
            continue
        numbers_of_sample = reward if isinstance(reward, list) else [reward]
        if wrong := [number for number in numbers_of_sample if not math.isfinite(number)]:
            errors[position] = ("nan", f"returned {wrong[0]}; rewards must be finite")
            continue
        # Plain addition, unlike fsum, gives inf rather than an error if the sum is out of range.
        values[position] = total = float(sum(numbers_of_sample))
        if not math.isfinite(total):
            values[position], errors[position] = math.nan, ("nan", f"token rewards add up to {total}; keep them finite")
        elif isinstance(reward, list):
            tokens[position] = reward
    return CallOutcome(values, errors, None, log.extras, log.metrics, tokens)


def user_traceback(error: BaseException) -> str:
    """Format the traceback from the user's first frame on: the frame of this library's call is left out."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def raised(error: BaseException) -> CallOutcome:
    """Make the outcome of a call that raised: "raised" for failures of the samples, including a cancellation by the
    function itself; "interrupt" and "ended" if it asks the program to end. That comes from the function: signals do not
    arrive in the threads and processes where functions run."""
    if isinstance(error, KeyboardInterrupt):
        return failed_call("interrupt", user_traceback(error))
    is_failure = isinstance(error, Exception | asyncio.CancelledError)
    return failed_call("raised" if is_failure else "ended", user_traceback(error))


def call_sync(
    function: Callable[..., Any], arguments: dict[str, Any], num_samples: int, log_names: Sequence[str]
) -> CallOutcome:
    """Call a plain function once. Whatever it raises becomes an outcome (`raised`)."""
    log = CallLog(num_samples)
    try:
        # The returned object may run the user's code too: repr(), tolist(), item().
        return check_values(function(**arguments, **log.functions(log_names)), log)
    except BaseException as error:
        return raised(error)


async def call_async(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    num_samples: int,
    log_names: Sequence[str],
    timeout_seconds: float | None = None,
) -> CallOutcome:
    """Await an `async def` function once; it is cancelled after `timeout_seconds` (None: no limit)."""
    log = CallLog(num_samples)
    limit = asyncio.timeout(timeout_seconds)
    try:
        async with limit:
            returned = await function(**arguments, **log.functions(log_names))
        return check_values(returned, log)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # this library is closing
            raise
        return failed_call("raised", user_traceback(error))  # the function's own cancellation, leaking out
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return failed_call("timeout", f"gave no answer within {timeout_seconds} s and was cancelled")
        return raised(error)
