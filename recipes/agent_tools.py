"""A policy learns to use a calculator: `python recipes/agent_tools.py [key=value ...]`.

It is asked for products of two numbers of three digits, which it cannot compute. The warm start imitates a careless
worker, who mostly guesses; GRPO, which learns only from right or wrong, improves on that. With a model of your own it
learns the same tool on your data, rows with `prompt` (chat messages) and `answer` (text):

    python recipes/agent_tools.py model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_path=train.jsonl
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.agents.calculator import build_task  # noqa: E402
from recipes.agents.run import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__, build_task)
