"""GRPO through adapters (LoRA): `python recipes/lora.py [key=value ...]`.

The model is frozen and adapters are trained; the reference of the KL penalty is the policy without them. Without
model.path it runs the quickstart, as recipes/grpo.py does; with one it trains adapters of that model on your data.
"""

import sys
from pathlib import Path

# A script is started with its own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.runner import start  # noqa: E402

if __name__ == "__main__":
    start(__file__, __doc__)
