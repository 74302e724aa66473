"""Guessing a number: after each guess the policy hears whether the number is lower or higher, and few guesses suffice
only if all of them are well chosen.

A row is `{"prompt": [{"role": "user", "content": "1 to 15"}], "secret": 11}`. The warm start imitates a careless
player, who at times guesses what earlier answers have ruled out, and anything else as readily as the middle.
"""

import random
from typing import Any

from hybrid_rl.agents.schemas import tool_schema
from recipes.agents.chat import Message, call
from recipes.agents.task import AgentTask

HIGHEST = 15
MOST_GUESSES = 4  # enough for 15 numbers, if each guess halves what is left
NUM_GAMES = 2000  # of the careless player
CARELESS = 0.5  # share of guesses that forget all that was heard
COPIES = 100  # of each number in the training rows
MAX_LENGTH = 192
WARM_START_STEPS = 150


class Guessing:
    """One game: find a number with few guesses."""

    def __init__(self) -> None:
        self._secret = 0
        self._left = 0
        self._is_found = False

    def reset(self, secret: int, **row: Any) -> None:
        """Begin a game."""
        self._secret, self._left, self._is_found = secret, MOST_GUESSES, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The number.
        """
        self._left -= 1
        self._is_found = self._is_found or (number == self._secret and self._left >= 0)
        if number == self._secret:
            return "right"
        return "lower" if self._secret < number else "higher"

    def get_reward(self) -> float:
        """1.0 if the number was found in time, otherwise 0.0."""
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
    said, low, high = list(row["prompt"]), 1, HIGHEST
    for _ in range(MOST_GUESSES):
        number = rng.randint(1, HIGHEST) if rng.random() < CARELESS else rng.randint(low, high)
        heard = game.guess(number)
        said += [call("guess", number=number), {"role": "tool", "name": "guess", "content": heard}]
        if heard == "right":
            break
        low, high = (low, min(high, number - 1)) if heard == "lower" else (max(low, number + 1), high)
    return [*said, {"role": "assistant", "content": heard}]
