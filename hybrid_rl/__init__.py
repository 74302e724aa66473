"""hybrid_rl: reinforcement learning for language models, training and generating with the same weights."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hybrid_rl.process.hooks import FormerNames
from hybrid_rl.process.importing import told

if TYPE_CHECKING:
    from hybrid_rl.config import TrainerConfig
    from hybrid_rl.extras.evaluations.checkpoints import evaluate_checkpoint
    from hybrid_rl.extras.evaluations.evaluations import Evaluation
    from hybrid_rl.extras.preview.run_preview import preview
    from hybrid_rl.extras.replay.step_replay import replay
    from hybrid_rl.process.stopping import RunStopped
    from hybrid_rl.rollout.generations import Generation
    from hybrid_rl.run.callbacks import Callback
    from hybrid_rl.run.step_results import StepResult
    from hybrid_rl.run.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Evaluation",
    "Generation",
    "RunStopped",
    "StepResult",
    "Trainer",
    "TrainerConfig",
    "__version__",
    "evaluate_checkpoint",
    "preview",
    "replay",
]

_HOMES = {
    "Callback": "hybrid_rl.run.callbacks",
    "Evaluation": "hybrid_rl.extras.evaluations.evaluations",
    "Generation": "hybrid_rl.rollout.generations",
    "RunStopped": "hybrid_rl.process.stopping",
    "StepResult": "hybrid_rl.run.step_results",
    "Trainer": "hybrid_rl.run.trainer",
    "TrainerConfig": "hybrid_rl.config",
    "preview": "hybrid_rl.extras.preview.run_preview",
    "replay": "hybrid_rl.extras.replay.step_replay",
    "evaluate_checkpoint": "hybrid_rl.extras.evaluations.checkpoints",
}

# Names by which others know what is here.
_ELSEWHERE = {
    "GRPOTrainer": "from hybrid_rl import Trainer as GRPOTrainer",
    **dict.fromkeys(("RLOOTrainer", "PPOTrainer"), "from hybrid_rl import Trainer, and pass algorithm='rloo' or 'ppo'"),
    "SFTTrainer": "from hybrid_rl import Trainer, and pass algorithm='sft'",
    **dict.fromkeys(
        ("GRPOConfig", "RLOOConfig", "PPOConfig", "TrainingArguments"),
        "settings are keywords of Trainer, and args= takes TRL's own GRPOConfig",
    ),
    "TrainerCallback": "from hybrid_rl import Callback",
    "accuracy_reward": "from hybrid_rl.rewards import accuracy_reward",
    **dict.fromkeys(("Batch", "BatchRef"), "from hybrid_rl.batch import Batch, BatchRef"),
}

sys.meta_path.insert(0, FormerNames())


def __getattr__(name: str) -> Any:
    # Lazy, so that `import hybrid_rl.algos` loads only torch.
    if name in _HOMES:
        with told("PyTorch and transformers"):
            return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ELSEWHERE:  # `from hybrid_rl import X` would not show an AttributeError
        raise ImportError(f"hybrid_rl has no {name}: {_ELSEWHERE[name]}", name="hybrid_rl")
    raise AttributeError(f"module 'hybrid_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)  # what completion offers
