"""Guessing a number: each guess narrows down what is left, and few guesses suffice only if all of them are well chosen.

A row is `{"prompt": [{"role": "user", "content": "1 to 7"}], "secret": 6}`; a guess of 4 is answered by "5 to 7". The
warm start imitates a careless player, who often guesses what is ruled out, and all else as readily as the middle.
"""

import random
from typing import Any

from hybrid_rl.agents.schemas import tool_schema
from recipes.agents.chat import Message, call
from recipes.agents.task import AgentTask

HIGHEST = 7
MOST_GUESSES = 3  # enough for 7 numbers, if each guess halves what is left
NUM_GAMES = 2000  # of the careless player
CARELESS = 0.5  # share of guesses that forget what is left
COPIES = 100  # of each number in the training rows
MAX_LENGTH = 160
WARM_START_STEPS = 120


class Guessing:
    """One game: find a number with few guesses."""

    def __init__(self) -> None:
        self._secret, self._low, self._high = 0, 0, 0
        self._num_guesses, self._is_found = 0, False

    def reset(self, secret: int, **row: Any) -> None:
        """Begin a game."""
        self._secret, self._low, self._high = secret, 1, HIGHEST
        self._num_guesses, self._is_found = 0, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The number.
        """
        if self._num_guesses == MOST_GUESSES:  # one answer may hold many calls
            raise ValueError("no guess is left")
        self._num_guesses += 1
        if number == self._secret:
            self._is_found = True
            return "right"
        if number < self._secret:
            self._low = max(self._low, number + 1)
        else:
            self._high = min(self._high, number - 1)
        return f"{self._low} to {self._high}"

    def get_reward(self) -> float:
        """1.0 if the number was found, otherwise 0.0."""
        return float(self._is_found)


def build_task(seed: int) -> AgentTask:
    """Return the task of a seed. All numbers are in the held-out rows: the policy never sees them, only answers."""
    rng = random.Random(seed)
    prompt = [{"role": "user", "content": f"1 to {HIGHEST}"}]
    rows = [{"prompt": prompt, "secret": secret} for secret in range(1, HIGHEST + 1)]
    return AgentTask(
        rows * COPIES,
        rows,
        [careless_game(row, rng) for row in rng.choices(rows, k=NUM_GAMES)],
        [tool_schema(Guessing().guess)],
        {"environment_factory": Guessing},
        WARM_START_STEPS,
        MAX_LENGTH,
    )


def careless_game(row: dict[str, Any], rng: random.Random) -> list[Message]:
    """Return a game of the careless player, who goes on until the number is found or no guess is left."""
    game = Guessing()
    game.reset(row["secret"])
    said, heard = list(row["prompt"]), f"1 to {HIGHEST}"
    for _ in range(MOST_GUESSES):
        low, high = (1, HIGHEST) if rng.random() < CARELESS else map(int, heard.split(" to "))
        number = rng.randint(low, high)
        heard = game.guess(number)
        said += [call("guess", number=number), {"role": "tool", "name": "guess", "content": heard}]
        if heard == "right":
            break
    return [*said, {"role": "assistant", "content": heard}]
