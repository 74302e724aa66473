"""Supervised fine-tuning: `python recipes/sft.py [key=value ...]`.

Completions come from the dataset; only evaluation generates. In the quickstart, as in recipes/grpo.py, they are right
answers. With a model it trains that model on your data, prompts with a column `completion`:

    python recipes/sft.py model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_path=train.jsonl learning_rate=1e-5
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__)
