"""A policy learns a game of several turns: `python recipes/agent_game.py [key=value ...]`.

It guesses a number from 1 to 7 and hears what is left; only who halves that finds every number in three
guesses. The warm start imitates a careless player; GRPO sees only whether the number was found. With a model of your
own it learns the same game on your data, rows with `prompt` (chat messages) and `secret` (a whole number):

    python recipes/agent_game.py model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_path=train.jsonl
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.agents.guessing import build_task  # noqa: E402
from recipes.agents.run import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__, build_task)
