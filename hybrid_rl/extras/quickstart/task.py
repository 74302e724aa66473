"""The quickstart task: sums of two numbers below 100 asked as `37+48=`.

A row is `{"prompt": "37+48=", "answer": "85", "slip": "75"}`. `slip` is the answer of a careless worker who forgets the
carry of the ones. The supervised warm start imitates such a worker (`demonstrations`); GRPO then sees only whether a
completion equals `answer`.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.errors import ConfigError

Row = dict[str, Any]

MAX_COMPLETION_TOKENS = 6  # "198" takes four with <eos>; two more, so that overlong answers are seen
NUM_DRAWS = 30_000  # of 10,000 possible problems, so that nearly all of them are drawn
HELD_OUT_ROUNDS = 2  # each holds out ten operands that have every tens and every ones digit once
EASY_SHARE = 0.35  # problems without a carry, on which the careless worker is right; decides where the warm start ends
COPIES = ("answer", "answer", "slip", "slip", "slip")  # of each problem in the demonstrations


@dataclass(frozen=True)
class Task:
    """Rows to train on and held-out rows; no number that is an operand in one is an operand in the other."""

    train: list[Row]
    heldout: list[Row]


def build_task(seed: int, num_train: int = 4000, num_heldout: int = 200) -> Task:
    """Return the task for `seed`: distinct problems, the same for the same arguments.

    In both parts `EASY_SHARE` of the problems need no carry. Raises `ConfigError` when there are not enough distinct
    problems of a kind.
    """
    rng = random.Random(seed)
    heldout_operands = _choose_operands(rng)
    train: dict[str, Row] = {}
    heldout: dict[str, Row] = {}
    for row in _draw(seed):
        operands = {int(number) for number in re.findall(r"\d+", row["prompt"])}
        if operands.isdisjoint(heldout_operands):
            train[row["prompt"]] = row
        elif operands <= heldout_operands:
            heldout[row["prompt"]] = row
        # A problem that mixes both kinds would leak a held-out operand into training, so it is dropped.
    return Task(
        train=_choose(list(train.values()), num_train, "num_train", rng),
        heldout=_choose(list(heldout.values()), num_heldout, "num_heldout", rng),
    )


def slip(left: int, right: int) -> str:
    """The careless worker's answer: 75 for 37 and 48, 115 for 67 and 58, 73 for 31 and 42."""
    return str((left // 10 + right // 10) * 10 + (left % 10 + right % 10) % 10)


def demonstrations(rows: Sequence[Row]) -> list[Row]:
    """Return the careless worker's answers, as `{"prompt", "answer"}`: each problem five times, of which three slips.

    Slips in the majority make the imitator's most likely completion the slip, while the right one keeps enough
    probability to be sampled: this is the gap that a verifier can close and more imitation cannot.
    """
    return [{"prompt": row["prompt"], "answer": row[key]} for row in rows for key in COPIES]


def exact_answer(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return TRL-style rewards: 1.0 if the completion (without special tokens) equals the answer, else 0.0.

    Strict: a scorer that accepts `085` for `85`, or gives part marks, would reward the policy for leaving the format
    that it knows.
    """
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def _choose_operands(rng: random.Random) -> frozenset[int]:
    """Choose held-out operands with every tens digit and every ones digit equally often, so that training lacks none of
    them."""
    chosen: set[int] = set()
    while len(chosen) < 10 * HELD_OUT_ROUNDS:
        one_round = {10 * tens + ones for tens, ones in zip(range(10), rng.sample(range(10), 10), strict=True)}
        if not chosen & one_round:
            chosen |= one_round
    return frozenset(chosen)


def _draw(seed: int) -> list[Row]:
    """Draw `NUM_DRAWS` problems, with repetitions."""
    rows = []
    for number in range(seed * NUM_DRAWS, (seed + 1) * NUM_DRAWS):
        # Each problem has a generator of its own, whose first two numbers are not used: these are the sums that
        # reasoning-gym's basic_arithmetic draws for these seeds, with which all curves were recorded.
        rng = random.Random(number)
        _, _, left, right = (rng.randint(*bounds) for bounds in ((2, 2), (2, 2), (0, 100), (0, 100)))
        if max(left, right) < 100:
            rows.append({"prompt": f"{left}+{right}=", "answer": str(left + right), "slip": slip(left, right)})
    return rows


def _choose(rows: list[Row], count: int, name: str, rng: random.Random) -> list[Row]:
    """Choose `count` rows in random order, with a right slip in `EASY_SHARE` of them."""
    if count < 1:
        raise ConfigError(f"{name}={count} is not positive; ask for at least one problem")
    easy = [row for row in rows if row["slip"] == row["answer"]]
    hard = [row for row in rows if row["slip"] != row["answer"]]
    num_easy = round(EASY_SHARE * count)
    if num_easy > len(easy) or count - num_easy > len(hard):
        possible = min(int(len(easy) / EASY_SHARE), int(len(hard) / (1 - EASY_SHARE)))
        raise ConfigError(f"{name}={count} is more than the distinct problems drawn; use at most {possible}")
    chosen = rng.sample(easy, num_easy) + rng.sample(hard, count - num_easy)
    rng.shuffle(chosen)
    return chosen
