"""The configuration of a live run with some keys changed, checked as at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybrid_rl.algos.options import field_types
from hybrid_rl.config import EvalConfig, TrainerConfig, load_config, resolve, to_dict
from hybrid_rl.config.changes import differing
from hybrid_rl.config.choices import number
from hybrid_rl.config.config_text import key_values
from hybrid_rl.config.eval_keys import SampledEvalConfig
from hybrid_rl.errors import ConfigError
from hybrid_rl.run.prepare import Run, device_of

SAMPLED = frozenset(field_types(SampledEvalConfig)) - frozenset(field_types(EvalConfig))  # of sampled evaluation
ANOTHER = (
    "Make another one: Trainer(..., resume=trainer.save()) keeps the optimizer state, Trainer(str(trainer.save()), "
    "...) starts a new run from these weights"
)


def changed_config(run: Run, keys: Mapping[str, Any], first_length: int) -> TrainerConfig:
    """Return the configuration of a run with these keys changed, checked as at the start. first_length:
    max_completion_length at the start. Raises ConfigError."""
    before = run.config
    if not keys:
        return before
    base: Any = before
    # Greedy evaluation lacks the keys of sampling.
    if "eval_temperature" in keys and number(keys["eval_temperature"]) <= 0:
        base = to_dict(before)
        base["eval"] = {name: value for name, value in base["eval"].items() if name not in SAMPLED}
    loaded = load_config(base, keys)[0]
    paths = frozenset(key.path for key in key_values(loaded) if key.path.rpartition(".")[2] in keys)
    machine: Any = {"hardware": run.hardware, "module_device": device_of(run.choice.module)}
    # The checkpoint that the run came from may be gone by now.
    after = resolve(dataclasses.replace(loaded, resume=None), paths, has_eval=bool(run.data.eval), **machine)
    after = dataclasses.replace(after, resume=before.resume)
    inside = tuple(f"{path}." for path in paths)  # a key may be a mapping
    beside = [
        f"{path} {was} -> {now}"
        for path, was, now in differing(to_dict(before), to_dict(after))
        if path not in paths and not path.startswith(inside)
    ]
    asked = ", ".join(f"{name}={value!r}" for name, value in keys.items())
    if beside:
        raise ConfigError(
            f"{asked} would change {', '.join(beside)} too, which is fixed when a Trainer is made. {ANOTHER}"
        )
    length = after.rollout.max_completion_length
    if length > first_length:
        raise ConfigError(
            f"max_completion_length={length} is above {first_length}, for which engine and memory were planned; set "
            f"one up to that. {ANOTHER}"
        )
    if length != before.rollout.max_completion_length and after.rewards.overlong_buffer is not None:
        raise ConfigError(
            f"max_completion_length={length}: overlong_buffer={after.rewards.overlong_buffer} is a reward that counts "
            f"from the old one, so both are fixed when a Trainer is made. {ANOTHER}"
        )
    return after
