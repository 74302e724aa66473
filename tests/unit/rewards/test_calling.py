"""Values for log_extra and log_metric, and the errors for wrong ones."""

import datetime
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_rl.rewards.calling import CallLog, check_values


@pytest.mark.parametrize(
    "values",
    [3, None, 1.5, "abc", b"abc", {0: 1, 1: 2, 2: 3}, {1, 2, 3}, torch.tensor(3.0), np.float32(3), object()],
    ids=["int", "None", "float", "text", "bytes", "dict", "set", "tensor", "numpy", "object"],
)
def test_log_extra_refuses_anything_but_a_value_per_sample(values):
    """The letters of a text, the keys of a dict and the members of a set are not the values of three samples."""
    log = CallLog(3)
    with pytest.raises(TypeError, match=r"^log_extra\('x', \.\.\.\) got .* of type \w+; give one value per sample$"):
        log.log_extra("x", values)
    assert log.extras == {}


def test_the_sentence_holds_the_value():
    with pytest.raises(TypeError, match=r"^log_extra\('x', \.\.\.\) got 3 of type int; give one value per sample$"):
        CallLog(2).log_extra("x", 3)
    with pytest.raises(TypeError, match=r"^log_extra\('x', \.\.\.\) got None of type NoneType; give one value"):
        CallLog(2).log_extra("x")
    with pytest.raises(TypeError, match=r"^log_metric\('x', \.\.\.\): None of type NoneType is not a number$"):
        CallLog(2).log_metric("x")
    with pytest.raises(ValueError, match="got 2 values for 1 samples; give one value per sample"):
        CallLog(1).log_extra("x", [1, 2])


def test_values_of_every_ordered_kind():
    log = CallLog(2)
    kinds = {"list": [1, 2], "tuple": (1, 2), "tensor": torch.tensor([1, 2]), "array": np.array([1, 2])}
    kinds |= {"generator": (n for n in (1, 2)), "range": range(1, 3), "keys": {1: 0, 2: 0}.values()}
    for name, values in kinds.items():
        log.log_extra(name, values)
    assert log.extras == {name: [0, 0] if name == "keys" else [1, 2] for name in kinds}


def endless():
    """The text of a lambda has `<locals>.<lambda>` in it as well as an address."""
    return lambda: None


@pytest.mark.parametrize("value", [object(), endless(), [object()], {"a": (1, object())}, iter([1])])
def test_an_address_is_not_logged(value):
    with pytest.raises(
        ValueError, match=r"^log_extra\('x', \.\.\.\): value 1 of type .* is only a memory address; log something"
    ):
        CallLog(2).log_extra("x", [1, value])


def test_values_are_logged_as_json_gives_them_back():
    """Objects with a text of their own as that text, numbers as numbers, infinities as None."""
    kinds = [datetime.date(2024, 2, 29), 1 + 2j, "<object at 0x7f00>", Path("x"), (1, {2: None})]
    kinds += [np.float32(1.5), torch.ones(2), math.nan, {"a": [math.inf, 1]}]
    log = CallLog(len(kinds))
    log.log_extra("x", kinds)
    assert log.extras["x"] == [
        *("2024-02-29", "(1+2j)", "<object at 0x7f00>", "x", [1, {"2": None}]),
        *(1.5, [1.0, 1.0], None, {"a": [None, 1]}),
    ]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        *((empty, ValueError, "the name is empty") for empty in ("", " ", "\n\t")),
        (("a", 1), TypeError, "the name is of type tuple; use text"),
        (None, TypeError, "the name is of type NoneType; use text"),
        (7, TypeError, "the name is of type int; use text"),
    ],
)
def test_a_name_says_something(name, error, message):
    log = CallLog(1)
    for function in (log.log_metric, log.log_extra):
        with pytest.raises(error, match=rf"^{function.__name__}\(.*, \.\.\.\): {message}"):
            function(name, [1])
    assert not log.metrics and not log.extras


def test_one_number_is_not_numbers():
    assert check_values(7, CallLog(1)).failure == (
        "type",
        "returned 7 of type int; expected a list of one number or None, one per completion",
    )
    assert "a list of 2 numbers or None" in check_values([math.pi], CallLog(2)).failure[1]
