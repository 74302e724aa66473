"""The command line of every recipe: the quickstart without a model, your own data with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_rl.cli import run_recipe
from hybrid_rl.cli.key_values import take
from hybrid_rl.cli.train import train_own
from hybrid_rl.errors import ConfigError


def start(script: str, doc: str | None, *, compares: bool = False) -> None:
    """Run a recipe as a script, with the settings in the YAML file beside it, and exit.

    compares: the quickstart ends with supervised learning for the same time.
    """
    settings = Path(script).with_suffix(".yaml")
    run_recipe(lambda arguments: main(arguments, settings, doc or "", compares=compares))


def main(arguments: list[str], settings: Path, doc: str, *, compares: bool = False) -> None:
    """Run on `key=value` arguments."""
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(doc.strip())
        print("Every key: hybrid-rl keys. With a model, config=FILE.yaml is read first.")
        return
    # Imported here, and the quickstart below, so that help answers at once: this imports PyTorch.
    from hybrid_rl.config import load_config

    rewards, arguments = take("reward", arguments)
    files, arguments = take("config", arguments)
    file = files[-1] if files else None
    config, given_paths = load_config(file, arguments=arguments)
    recipe, _ = load_config(settings)
    of_recipe: dict[str, Any] = {"algorithm.name": recipe.algorithm.name}
    if recipe.lora.is_on:
        of_recipe["lora.r"] = recipe.lora.r
    if missing := {path: value for path, value in of_recipe.items() if path not in given_paths}:
        config, _ = load_config(file, missing, arguments)
    if config.model.path is not None:
        train_own(config, rewards)
        return
    if rewards or file is not None or config.data.train_path is not None:
        raise ConfigError("reward=, config= and data.train_path need a model of your own: set model.path too")
    from hybrid_rl.extras.quickstart.command import quickstart

    quickstart(settings, arguments, compares=compares)
