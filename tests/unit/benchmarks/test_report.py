"""The arithmetic of a comparison, against numbers worked out by hand."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from benchmarks import report

pytestmark = pytest.mark.slow


def test_spread_is_median_and_quartiles() -> None:
    expected = {"median": 3.0, "quartile_1": 2.0, "quartile_3": 4.0, "min": 1.0, "max": 10.0, "count": 5}
    assert report.spread([4.0, 1.0, 3.0, 2.0, 10.0]) == expected


def test_ratio_is_above_one_where_the_peer_takes_longer() -> None:
    assert report.ratio_of_medians(peer=[6.0, 3.0, 100.0], ours=[2.0, 1.0, 3.0]) == 3.0


def test_interval_by_students_t() -> None:
    # Mean 3, sample standard deviation sqrt(2.5), t(4 degrees, 97.5 %) = 2.776: 3 -+ 2.7764 * sqrt(0.5).
    found = report.t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["mean"] == 3.0
    assert found["low"] == pytest.approx(1.03676, abs=1e-4)
    assert found["high"] == pytest.approx(4.96324, abs=1e-4)
    assert report.t_interval([2.0]) == {"mean": 2.0, "low": None, "high": None, "count": 1}
    # Beyond the table the quantile goes on from it. Two values -+ 1 on average 0, n of them: the standard deviation is
    # sqrt(n / (n - 1)), the rest is the quantile.
    # t(39 degrees, 97.5 %) = 2.0227.
    found = report.t_interval([1.0, -1.0] * 20)
    assert found["high"] == pytest.approx(2.0227 / 39**0.5, abs=1e-3)


def test_first_place_that_reaches_a_goal() -> None:
    assert report.reached_at([0.1, 0.75, 0.6, 0.9], [10, 20, 30, 40], 0.75) == 20
    assert report.reached_at([0.1, 0.2], [10, 20], 0.75) is None


def test_value_seen_last_at_a_position() -> None:
    for position, value in ((0.5, 0.0), (1.0, 0.2), (2.9, 0.2), (3.0, 0.6), (9.0, 0.6)):
        assert report.value_at([0.2, 0.6], [1.0, 3.0], position, before=0.0) == value


def test_command_and_settings_name_no_path_of_the_machine() -> None:
    argv = ["somewhere/benchmarks/grpo_step.py", "--trl-python", "somewhere/python", "--work", "all"]
    assert report.command(argv) == "python benchmarks/grpo_step.py --work all"
    argv[1:3] = ["--trl-python=somewhere/python"]
    assert report.command(argv) == "python benchmarks/grpo_step.py --work all"

    found = report.settings(Namespace(trl_python="somewhere/python", steps=3), work="equal")
    assert found | {"command": ""} == {"steps": 3, "work": "equal", "command": ""}


def test_line_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    hardware, deep = report.hardware(1, {"trl": "1.16.0", "torch": "2.0"}), [{"value": 0.000123456789}]
    numbers = {"ours": 1.23456789, "peer": 2.0, "ratio": None, "unit": "seconds"}
    report.print_line("x", **numbers, hardware=hardware, settings={"threads": [1, 2]}, details={"deep": deep})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    found = json.loads(printed)
    assert (found["benchmark"], found["ours"], found["peer"], found["ratio"]) == ("x", 1.2346, 2.0, None)
    assert found["details"] == {"deep": [{"value": 0.00012346}]}
    assert (found["hardware"]["trl"], found["hardware"]["peer_torch"]) == ("1.16.0", "2.0")
    assert found["hardware"]["torch"] != "2.0"


def test_counts_are_positive() -> None:
    for text in ("0", "-1", "x"):
        with pytest.raises(ValueError, match=r"at least 1|invalid literal"):
            report.positive(text)
