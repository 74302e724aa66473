"""VAPO: `python recipes/vapo.py [key=value ...]`.

PPO's critic with several completions per prompt: at first only the critic learns, from undiscounted rewards; the
policy's lambda follows the length, and right completions are imitated in addition. Without model.path it runs the
quickstart, as recipes/grpo.py does; with one it trains that model on your data.
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__)
