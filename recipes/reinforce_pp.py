"""REINFORCE++: `python recipes/reinforce_pp.py [key=value ...]`.

One completion per prompt and no critic: rewards, with a KL penalty at every token, are normalised over the whole batch.
Without model.path it runs the quickstart, as recipes/grpo.py does; with one it trains that model on your data.
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__)
