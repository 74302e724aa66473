"""GRPO on the quickstart or on your own model: `make run`, or `python recipes/grpo.py [key=value ...]`.

Without a model it runs the quickstart (recipes/quickstart): a small Qwen2, its tokenizer, and sums to learn. A warm
start imitates demonstrations that mostly forget the carry; GRPO, which learns only from right or wrong, improves on
them. For comparison supervised learning continues for the same time: on the same demonstrations, and on right answers.

With a model it trains that model on your data, with your reward function, from the library's defaults:

    python recipes/grpo.py model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_path=train.jsonl reward=my_reward.py:score
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__, compares=True)
