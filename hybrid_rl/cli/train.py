"""`hybrid-rl train`: a Trainer from the command line, on your model, data and rewards."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rl.cli.key_values import Settings, take
from hybrid_rl.data.gym_rows import is_gym
from hybrid_rl.errors import ConfigError
from hybrid_rl.process.stopping import own_process

if TYPE_CHECKING:
    from hybrid_rl.config import TrainerConfig

# Of hybrid_rl.rewards: those that need nothing but the columns of the data.
PLAIN_REWARDS = ("exact_match", "gsm8k_reward", "reasoning_gym_reward")
MADE_REWARDS = ("math_reward", "format_reward", "tag_count_reward")


def train(settings: Settings = None) -> None:
    """Train a model of yours, on your data, with your reward.

    Besides the keys of the configuration there are two words: config=FILE.yaml is read first, and reward= is a function
    FILE.py:FUNCTION, or a ready-made one: exact_match, math_reward, gsm8k_reward (verl's, strict), format_reward,
    tag_count_reward. Several are added up: reward=math_reward reward=mine.py:brevity.

    Examples:
      hybrid-rl train model.path=Qwen/Qwen2.5-0.5B-Instruct \\
          data.train_path=train.jsonl reward=math_reward
      hybrid-rl train config=run.yaml reward=mine.py:score max_steps=10
      hybrid-rl train config=run.yaml resume=auto run_name=first

    Status 75: it was stopped by a signal or by save_before, and the same command goes on with resume=auto. 143 and the
    like: it was stopped by a signal, and there is no checkpoint.
    """
    from hybrid_rl.config import load_config

    rewards, arguments = take("reward", settings or [])
    files, arguments = take("config", arguments)
    config, _ = load_config(files[-1] if files else None, arguments=arguments)
    if config.model.path is None and config.resume is not None:
        raise ConfigError(
            f"resume={config.resume}: the model is missing; a run that goes on is given model, data and reward= as at "
            "its start: repeat them, or read its keys with config=runs/NAME/config.yaml"
        )
    if config.model.path is None:
        raise ConfigError(
            "the model is missing: set model.path to its name or folder; without a model of your own try "
            "hybrid-rl quickstart"
        )
    train_own(config, rewards)


def train_own(config: TrainerConfig, rewards: Sequence[str]) -> None:
    """Train the model of a config to the end of its steps. rewards: as `load_reward` takes them."""
    scores_itself = isinstance(config.data.train_path, str | dict) and is_gym(config.data.train_path)
    if not rewards and config.advantage.needs_rewards and not scores_itself:
        raise ConfigError(
            "reward=FILE.py:FUNCTION is missing: the function that scores completions, or the name of a ready-made "
            f"one: {', '.join((*PLAIN_REWARDS, *MADE_REWARDS))}"
        )
    functions = [load_reward(reference) for reference in rewards]
    # Imported here, after what can be refused without it.
    from hybrid_rl import Trainer

    with own_process(), Trainer(reward_funcs=functions or None, config=config) as trainer:
        trainer.fit()


def load_reward(reference: str) -> Callable[..., Any]:
    """Import FUNCTION from FILE.py, or make a ready-made reward by its name. Raises ConfigError if it is missing."""
    file, _, name = reference.rpartition(":")
    if not file and reference in (*PLAIN_REWARDS, *MADE_REWARDS):
        from hybrid_rl import rewards

        reward = getattr(rewards, reference)
        ready: Callable[..., Any] = reward() if reference in MADE_REWARDS else reward
        return ready
    if not file or not Path(file).is_file():
        known = (*PLAIN_REWARDS, *MADE_REWARDS)
        near = difflib.get_close_matches(reference, known, n=1)
        raise ConfigError(
            f"reward={reference!r} is not FILE.py:FUNCTION with an existing file, and not one of {', '.join(known)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward={reference!r}: {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # What lies beside the file can be imported by it, as in a script.
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # sys.exit() in the file would end the command without a word
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = f" in line {frames[-1].lineno}" if frames else ""
        why = f"{type(error).__name__}{line}: {error}"
        raise ConfigError(f"reward={reference!r}: {file} cannot be imported: {why}; correct the file") from error
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"reward={reference!r}: {file} has no {name!r}")
    function: Callable[..., Any] = getattr(module, name)
    return function
