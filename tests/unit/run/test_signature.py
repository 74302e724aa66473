"""What tab completion and help() see."""

import inspect
import subprocess
import sys

import hybrid_rl
from hybrid_rl import Trainer
from hybrid_rl.config.load import leaf_names


def test_dir_of_the_package_has_the_public_names() -> None:
    assert dir(hybrid_rl) == sorted(hybrid_rl.__all__)
    assert all(hasattr(hybrid_rl, name) for name in dir(hybrid_rl))
    code = "import sys, hybrid_rl; dir(hybrid_rl); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_signature_has_every_key_once() -> None:
    parameters = inspect.signature(Trainer).parameters
    own = [name for name in inspect.signature(Trainer.__init__).parameters if name not in ("self", "overrides")]
    assert list(parameters)[: len(own)] == own
    assert set(parameters) - {*own, "overrides"} == (leaf_names() - {"name"}) | {
        *("algorithm", "advantage", "policy_loss", "kl", "correction", "rollout", "controller")
    }
    assert parameters["learning_rate"].default == 1e-6 and parameters["algorithm"].default == "grpo"
    assert parameters["critic_learning_rate"].kind is inspect.Parameter.KEYWORD_ONLY


def test_help_shows_the_keys_and_what_can_be_set() -> None:
    import pydoc

    text = pydoc.render_doc(Trainer, renderer=pydoc.plaintext)
    assert "num_generations: int = 8" in text and "set(self, **changes" in text and "train = fit" in text


def test_a_class_of_the_users_keeps_its_own_arguments() -> None:
    class Mine(Trainer):
        def __init__(self, mine: int, **keys) -> None:
            super().__init__(**keys)

    assert list(inspect.signature(Mine).parameters)[0] == "mine"
