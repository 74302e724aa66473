"""PPO with a critic: `python recipes/ppo.py [key=value ...]`.

One completion per prompt; what it is worth at every token a second model says, which learns beside the policy. Without
model.path it is the quickstart, as in recipes/grpo.py; with one it trains that on your data.
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__)
