"""On-policy distillation: `python recipes/distillation.py [key=value ...]`.

The policy generates its own completions and learns from a teacher's logprobs of every token of them. In the quickstart,
as in recipes/grpo.py, the teacher is the warm-started model trained on right answers. With a model of your own, name a
teacher with the same tokenizer:

    python recipes/distillation.py model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_path=train.jsonl \\
        advantage.teacher_path=Qwen/Qwen2.5-7B-Instruct
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__)
