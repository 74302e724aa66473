"""Rejection sampling: `python recipes/rejection_sampling.py [key=value ...]`.

The best of a prompt's completions is imitated if it is right; the others are dropped. Without model.path it runs the
quickstart, as recipes/grpo.py does; with one it trains that model on your data.
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__)
