"""Evaluation of a checkpoint, or of any model, without a Trainer: its engine and rewards, no optimizer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoint.reading import STATE_FILE, read_state
from hybrid_rl.config import TrainerConfig, load_config, to_yaml
from hybrid_rl.config.config_text import key_values
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.evaluations.evaluations import EVAL_FILE, Evaluation
from hybrid_rl.logging.run_folder import RunFolder
from hybrid_rl.metrics.metric_sums import finite
from hybrid_rl.rewards import TrainerState
from hybrid_rl.run.evaluation import are_sets, rows_of
from hybrid_rl.run.evaluator import Evaluator
from hybrid_rl.run.prepare import Run, prepare
from hybrid_rl.run.start import make_collector, start_workers
from hybrid_rl.run.tenancy import make_way

# What a checkpoint was trained with and is evaluated with, unless the user says otherwise.
KEPT = (
    "rollout.max_completion_length",
    "rollout.stop_token_ids",
    "rollout.stop_strings",
    "data.prompt_column",
    "data.system_prompt",
    "data.apply_chat_template",
    "data.chat_template_kwargs",
)
KEPT_EVAL = (
    "eval_temperature",
    "eval_repetition_penalty",
    "eval_top_p",
    "eval_top_k",
    "eval_min_p",
    "num_generations_eval",
)
SETTINGS = ("max_completion_length", *KEPT_EVAL, "seed", "success_reward")
# Nothing is trained, so keys of the steps do nothing.
NO_STEPS = {"mode": "rollout", "max_steps": 1}
OF_STEPS = {*NO_STEPS, "eval_steps", "num_train_epochs", "resume", "save_steps"}


def evaluate_checkpoint(
    model: str | Path,
    data: Any,
    reward_funcs: Any,
    *,
    config: TrainerConfig | Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    folder: str | Path | None = None,
    **overrides: Any,
) -> Evaluation:
    """Evaluate a checkpoint, or any model by name or folder, with an engine of the library and without an optimizer.

    data: a dataset, or several by name, as eval_dataset. reward_funcs: the first says what is right
    (success_functions). folder: where eval.json, all samples (eval-samples.jsonl) and config.yaml are written; it must
    not exist. None = a new one under output_dir. overrides: keys of the configuration; a checkpoint of this library
    brings its limits of tokens, stop strings, system prompt, template options and sampling of evaluation, which
    other keys override.

    The noise of samples depends on seed, set and place of the prompt only, so that two checkpoints are sampled with the
    same noise. Raises ConfigError, DataError, ModelError or RewardError before any work starts if something cannot be
    used.
    """
    if wrong := sorted({name.rpartition(".")[2] for name in overrides} & OF_STEPS):
        raise ConfigError(f"{', '.join(wrong)} cannot be set: an evaluation has no training steps")
    if folder is not None and Path(folder).exists() and (not Path(folder).is_dir() or any(Path(folder).iterdir())):
        raise ConfigError(f"{folder} exists; an evaluation is written to a new folder: choose another name")
    step, kept = _of_checkpoint(Path(model), overrides, config)
    settings = {**kept, **overrides, **NO_STEPS}
    if data is None:
        data = load_config(config, overrides)[0].data.eval_path
    if data is None or (are_sets(data) and not data):
        raise ConfigError("there is no data to evaluate on: give a dataset, or several by name, or set data.eval_path")
    first = next(iter(data.values()), None) if are_sets(data) else data
    with contextlib.ExitStack() as closing:
        run = prepare(model, tokenizer, reward_funcs, first, data, config, settings, closing=closing)
        make_way(run.config, None)
        target = _make_folder(run.config, folder, Path(model).name)
        return _evaluated(run, str(model), step, target, closing)


def _of_checkpoint(model: Path, overrides: Mapping[str, Any], config: Any) -> tuple[int | None, dict[str, Any]]:
    """Return the training steps of a checkpoint, and what of its configuration its evaluation keeps."""
    if not (model / STATE_FILE).is_file():
        return None, {}
    state = read_state(model)
    names = {name.rpartition(".")[2] for name in (*overrides, *load_config(config)[1])}
    settings: dict[str, Any] = {}
    saved = state.get("config", {})
    for path in (*KEPT, *(f"eval.{name}" for name in KEPT_EVAL)):
        section, _, name = path.rpartition(".")
        is_sampling = section == "eval" and names & set(KEPT_EVAL)  # of which one may exclude another
        if name in saved.get(section, {}) and name not in names and not is_sampling:
            settings[path] = saved[section][name]
    return state.get("global_step"), settings


def _make_folder(config: TrainerConfig, folder: str | Path | None, name: str) -> Path:
    """Make the folder of an evaluation."""
    if folder is None:
        return RunFolder(config.output_dir, config.run_name, f"eval-{name}").path
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error}; choose another one") from error
    return path


def _evaluated(run: Run, model: str, step: int | None, folder: Path, closing: contextlib.ExitStack) -> Evaluation:
    """Evaluate a prepared run, and write down what came of it."""
    policy, generating = start_workers(run, folder, closing, is_trained=False)
    (folder / "config.yaml").write_text(to_yaml(run.config), encoding="utf-8")
    sampler = PromptSampler(run.data.train, shuffle=False, seed=run.config.seed)
    evaluator = Evaluator(run, policy, make_collector(run, generating, sampler))
    generating.update_weights(0)
    policy.label = "the evaluation"
    metrics, sets = evaluator.evaluate(rows_of(run.data.eval), 0, TrainerState(0, 1, 0.0), folder, kept=None)
    leaves = {key.path.rpartition(".")[2]: key.value for key in key_values(run.config)}
    settings = {name: leaves[name] for name in SETTINGS if name in leaves} | {"rewards": run.rewards.entries.names}
    made = Evaluation(model, sets, settings, finite(metrics), step, folder)
    (folder / EVAL_FILE).write_text(json.dumps(made.to_json()) + "\n", encoding="utf-8")
    return made
