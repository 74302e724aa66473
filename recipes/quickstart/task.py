"""The quickstart task: two-digit sums and differences from reasoning-gym's `chain_sum`, asked as `37+48=`.

A row is `{"prompt": "37+48=", "answer": "85", "slip": "75"}`. `slip` is what a careless worker writes who treats each
column on its own: forgets the carry in a sum, and in a difference takes the smaller digit from the larger (the
"smaller-from-larger" bug of Brown and VanLehn, Repair Theory, 1980). The supervised warm start imitates such a worker
(`demonstrations`); GRPO then sees only whether a completion equals `answer`.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import reasoning_gym

from hybrid_rl.errors import ConfigError, DataError

Row = dict[str, Any]

MAX_COMPLETION_TOKENS = 6  # "198" and "-89" take four with <eos>; two spare, so that running on is seen
NUM_DRAWS = 30_000  # of 16,200 possible problems, enough to meet about 84 % of them
NUM_HELD_OUT_OPERANDS = 15  # of 90
EASY_SHARE = 0.3  # problems on which the careless worker is right all the same; fixes where the warm start ends
COPIES = ("answer", "answer", "slip", "slip", "slip")  # of each problem in the demonstrations
_SUM = re.compile(r"(\d\d)([+-])(\d\d)=")


@dataclass(frozen=True)
class Task:
    """Rows to train on and held-out rows; no number that is an operand in one is an operand in the other."""

    train: list[Row]
    heldout: list[Row]


def build_task(seed: int, num_train: int = 7000, num_heldout: int = 200) -> Task:
    """The task for `seed`: distinct problems, the same for the same arguments.

    In both parts `EASY_SHARE` of the problems need no carry, no borrow and no sign. Raises `ConfigError` when there
    are not enough distinct problems of a kind.
    """
    rng = random.Random(seed)
    heldout_operands = _choose_operands(rng)
    train: dict[str, Row] = {}
    heldout: dict[str, Row] = {}
    for row in _draw(seed):
        num_held_operands = sum(operand in heldout_operands for operand in operands(row["prompt"]))
        if num_held_operands == 0:
            train[row["prompt"]] = row
        elif num_held_operands == 2:
            heldout[row["prompt"]] = row
        # A problem that mixes both kinds would leak a held-out operand into training: it is dropped.
    task = Task(
        train=_choose(list(train.values()), num_train, "num_train", rng),
        heldout=_choose(list(heldout.values()), num_heldout, "num_heldout", rng),
    )
    check_disjoint(task)
    return task


def operands(prompt: str) -> tuple[int, int]:
    """The two numbers in a prompt such as `37+48=`; `DataError` if it does not look like that."""
    left, _, right = _parse(prompt)
    return left, right


def slip(prompt: str) -> str:
    """The careless worker's answer: `37+48=` gives 75, `67+58=` 115, `52-17=` 45 and `17-52=` 45."""
    left, operator, right = _parse(prompt)
    (left_tens, left_ones), (right_tens, right_ones) = divmod(left, 10), divmod(right, 10)
    if operator == "+":
        return str((left_tens + right_tens) * 10 + (left_ones + right_ones) % 10)
    return str(abs(left_tens - right_tens) * 10 + abs(left_ones - right_ones))


def demonstrations(rows: Sequence[Row]) -> list[Row]:
    """What the careless worker shows, as `{"prompt", "answer"}`: each problem five times, of which three slips.

    Slips in the majority make the imitator's most likely completion the slip, while the right one keeps enough
    probability to be sampled: this is the gap that a verifier can close and more imitation cannot.
    """
    return [{"prompt": row["prompt"], "answer": row[key]} for row in rows for key in COPIES]


def check_disjoint(task: Task) -> None:
    """Raises `DataError` if a number is an operand both in a training and in a held-out problem."""
    seen = {operand for row in task.train for operand in operands(row["prompt"])}
    shared = sorted(seen & {operand for row in task.heldout for operand in operands(row["prompt"])})
    if shared:
        raise DataError(f"operands {shared} occur in training and in held-out problems; keep the two sets disjoint")


def exact_answer(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """TRL-style reward: 1.0 where the completion (decoded without special tokens) equals the answer, else 0.0.

    Stricter than reasoning-gym's own scorer, which gives part marks and takes `085` for `85`: those would pay the
    policy for leaving the format that it knows.
    """
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def _choose_operands(rng: random.Random) -> frozenset[int]:
    """The held-out operands: each tens digit and each ones digit once or twice, so that training lacks none of them."""
    tens, ones = list(range(1, 10)), list(range(10))
    while True:
        chosen = frozenset(
            10 * ten + one
            for ten, one in zip(
                rng.sample(tens, 9) + rng.sample(tens, NUM_HELD_OUT_OPERANDS - 9),
                rng.sample(ones, 10) + rng.sample(ones, NUM_HELD_OUT_OPERANDS - 10),
                strict=True,
            )
        )
        # A pair of digits may come up twice: then draw again.
        if len(chosen) == NUM_HELD_OUT_OPERANDS:
            return chosen


def _draw(seed: int) -> list[Row]:
    """`NUM_DRAWS` problems, with repetitions."""
    # reasoning-gym seeds item i with seed + i: neighbouring seeds would share nearly all items, hence the stride.
    dataset = reasoning_gym.create_dataset(
        "chain_sum",
        seed=seed * NUM_DRAWS,
        size=NUM_DRAWS,
        min_terms=2,
        max_terms=2,
        min_digits=2,
        max_digits=2,
    )
    rows = []
    for index in range(NUM_DRAWS):
        item = dataset[index]
        # Spaces would be a third of the tokens and carry nothing.
        prompt = item["metadata"]["expression"].replace(" ", "") + "="
        rows.append({"prompt": prompt, "answer": item["answer"], "slip": slip(prompt)})
    return rows


def _choose(rows: list[Row], count: int, name: str, rng: random.Random) -> list[Row]:
    """`count` rows in random order, `EASY_SHARE` of them such that the slip is right."""
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


def _parse(prompt: str) -> tuple[int, str, int]:
    match = _SUM.fullmatch(prompt)
    if match is None:
        raise DataError(f"prompt {prompt!r} is not a two-digit sum or difference; write it like '37+48='")
    return int(match[1]), match[2], int(match[3])
