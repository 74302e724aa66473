"""Products of two numbers of three digits, which the policy cannot compute, and a calculator, which can.

A row is `{"prompt": [{"role": "user", "content": "347*286"}], "answer": "99242"}`. The warm start imitates a careless
worker, who mostly guesses, at times types in something else, and seldom does it right.
"""

import random
import re
from typing import Any

from hybrid_rl.agents.schemas import tool_schema
from recipes.agents.chat import Message, call
from recipes.agents.task import AgentTask
from recipes.environments.calculator import calculator

Row = dict[str, Any]

NUM_TRAIN, NUM_HELDOUT = 4000, 200
MAX_LENGTH = 128  # tokens of a conversation; a right one has 73
WARM_START_STEPS = 250

# What the careless worker does with a problem, and how often: only the last is right.
HABITS = {"guess": 0.75, "mistype": 0.1, "doubt": 0.05, "calculate": 0.1}


def exact_answer(prompts: list[Any], completions: list[list[Message]], answer: list[str], **kwargs: Any) -> list[float]:
    """Return rewards: 1.0 if the conversation ends with the answer and nothing else, otherwise 0.0."""
    return [float(said[-1]["content"] == right) for said, right in zip(completions, answer, strict=True)]


def build_rows(seed: int, num_train: int, num_heldout: int) -> tuple[list[Row], list[Row]]:
    """Return rows to train on and held-out rows: different problems, the same for a seed."""
    rng = random.Random(seed)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < num_train + num_heldout:
        pairs[rng.randint(101, 999), rng.randint(101, 999)] = None
    rows = [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in pairs]
    return rows[:num_train], rows[num_train:]


def demonstration(row: Row, rng: random.Random) -> list[Message]:
    """Return what the careless worker does with a problem."""
    problem = row["prompt"][0]["content"]
    (habit,) = rng.choices(list(HABITS), list(HABITS.values()))
    said = list(row["prompt"])
    if habit != "guess":
        typed = mistyped(problem, rng) if habit == "mistype" else problem
        result = calculator(typed)
        said += [call("calculator", expression=typed), {"role": "tool", "name": "calculator", "content": result}]
    answer = guess(problem) if habit in ("guess", "doubt") else result
    return [*said, {"role": "assistant", "content": answer}]


def guess(problem: str) -> str:
    """The product of the rounded numbers: 347*286 is about 300*300, which is 90000."""
    a, b = map(int, problem.split("*"))
    return str(round(a, -2) * round(b, -2))


def mistyped(problem: str, rng: random.Random) -> str:
    """The problem with one digit more or less; none begins a number, which would leave a zero there at times."""
    place = rng.choice([digit.start() for digit in re.finditer(r"(?<=\d)\d", problem)])
    return problem[:place] + problem[place] * rng.choice((0, 2)) + problem[place + 1 :]


def build_task(seed: int) -> AgentTask:
    """Return the task of a seed."""
    train, heldout = build_rows(seed, NUM_TRAIN, NUM_HELDOUT)
    rng = random.Random(seed)
    return AgentTask(
        train,
        heldout,
        [demonstration(row, rng) for row in train],
        [tool_schema(calculator)],
        {"tools": [calculator], "reward_funcs": exact_answer},
        WARM_START_STEPS,
        MAX_LENGTH,
    )
