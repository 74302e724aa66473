import hashlib
import json
import re

import pytest

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.quickstart.task import Task, build_task, demonstrations, exact_answer, slip

pytestmark = pytest.mark.slow  # the file as a whole


@pytest.fixture(scope="module", params=[0, 1, 7])
def task(request: pytest.FixtureRequest) -> Task:
    return build_task(request.param)


def test_no_operand_is_shared_between_training_and_heldout(task: Task) -> None:
    train, heldout = (
        {int(number) for row in rows for number in re.findall(r"\d+", row["prompt"])}
        for rows in (task.train, task.heldout)
    )
    assert len(train) == 80 and len(heldout) == 20  # of the numbers 0 to 99
    for digit in range(10):  # no digit is rare in training, in either place
        assert sum(number % 10 == digit for number in heldout) == 2
        assert sum(number // 10 == digit for number in heldout) == 2
    assert train.isdisjoint(heldout)


def test_problems_are_distinct_as_many_as_asked_for_and_right(task: Task) -> None:
    for rows, count, num_easy in ((task.train, 4000, 1400), (task.heldout, 200, 70)):
        assert len({row["prompt"] for row in rows}) == count
        assert sum(row["slip"] == row["answer"] for row in rows) == num_easy  # 35 %
        for row in rows:
            assert int(row["answer"]) == sum(map(int, row["prompt"].removesuffix("=").split("+")))


@pytest.mark.parametrize(("seed", "digest"), [(42, "68ffa6b62c7a9973"), (7, "91e9ed7f65a36ce9")])
def test_the_rows_are_those_with_which_curves_were_recorded(seed: int, digest: str) -> None:
    """The digests are of the rows that reasoning-gym 0.1.25 drew."""
    task = build_task(seed)
    assert hashlib.sha256(json.dumps([task.train, task.heldout]).encode()).hexdigest()[:16] == digest


def test_a_seed_gives_one_task_and_another_seed_another() -> None:
    first, again, other = (build_task(seed, num_train=50, num_heldout=20) for seed in (3, 3, 4))
    assert first == again
    assert {row["prompt"] for row in first.heldout} != {row["prompt"] for row in other.heldout}


def test_slip() -> None:
    assert slip(37, 48) == "75"  # 7 + 8 = 15: the ten is forgotten
    assert slip(31, 42) == "73"  # nothing to forget
    assert (slip(67, 58), slip(5, 8), slip(99, 1)) == ("115", "3", "90")


def test_demonstrations_slip_three_times_in_five() -> None:
    rows = [{"prompt": "37+48=", "answer": "85", "slip": "75"}, {"prompt": "5+8=", "answer": "13", "slip": "3"}]
    shown = demonstrations(rows)
    assert [row["answer"] for row in shown] == ["85", "85", "75", "75", "75", "13", "13", "3", "3", "3"]
    assert {tuple(row) for row in shown} == {("prompt", "answer")}


def test_exact_answer_is_stricter_than_the_number() -> None:
    completions = ["85", "085", "85 ", "", "8", "-85"]
    scores = exact_answer(["37+48="] * 6, completions, answer=["85"] * 6, slip=["75"] * 6)
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_more_problems_than_there_are_is_an_error_before_training() -> None:
    with pytest.raises(ConfigError, match="num_heldout=2000"):
        build_task(0, num_heldout=2000)
    with pytest.raises(ConfigError, match="num_train=0"):
        build_task(0, num_train=0)
