"""A recorded step of a run, trained once more in one process: `hybrid_rl.replay` and `hybrid-rl replay`."""

from __future__ import annotations

import copy
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from hybrid_rl.batch import AnyBatch, Batch
from hybrid_rl.batch.rollout_files import load_rollout, rollout_steps, save_rollout
from hybrid_rl.batch.samples import TOKEN_COLUMNS, Sample, Token
from hybrid_rl.checkpoint.finding import checkpoints_of, is_checkpoint
from hybrid_rl.config import load_config
from hybrid_rl.config.config_text import key_values
from hybrid_rl.errors import CheckpointError, ConfigError, DataError
from hybrid_rl.metrics.metric_sums import number
from hybrid_rl.run.step_results import Metrics
from hybrid_rl.run.trainer import Trainer

logger = logging.getLogger("hybrid_rl")

# What a run says of machines, records and other work than training on samples: a replay has its own.
OWN_SECTIONS = ("controller", "fsdp", "memory", "eval", "checkpoints", "agents")
OWN_KEYS = {"num_ranks", "max_restarts", "save_before", "enable_jit_checkpoint", "log_level", "log_completions"}
OWN_KEYS |= {"report_to", "output_dir", "run_name", "resume", "save_steps", "save_rollouts", "mode", "rollouts_path"}
OWN_KEYS |= {"data.eval_path", "model.device", "model.attention", "max_steps", "num_train_epochs"}
# Scores are those of the run, penalties and weights included.
OWN_KEYS |= {"rewards.reward_processes", "rewards.reward_timeout_seconds", "rewards.reward_weights"}
OWN_KEYS |= {"rewards.overlong_buffer", "rewards.score_by"}
# Of the section rollout: how samples were made, and how old they may be, from which the correction follows.
OF_SAMPLES = {"max_completion_length", "temperature", "stop_token_ids", "stop_strings", "partial", "async_level"}
IDLE_SECTIONS = (*OWN_SECTIONS, "rollout", "buffer")
IDLE_KEYS = OWN_KEYS | {"seed"}
COMPARED = ("loss", "grad_norm", "entropy", "kl", "critic/value_loss", "clip_ratio/region_mean")
NUM_SHOWN = 8  # tokens that differ
ROUNDING = 1e-3
NEAR = 1e-9  # numbers that are as near are shown as equal

Rescore = Callable[[Sample], float | None]


@dataclass(frozen=True, repr=False)
class Replay:
    """A step as it was trained once more. batch: with columns of what the update did with every token (ratio, clipped,
    loss_weight, gradient_share); metrics: of the step; recorded: those that the run logged; changes: keys that are not
    those of the run."""

    run: Path
    step: int
    batch: AnyBatch
    metrics: Metrics
    recorded: Mapping[str, float]
    changes: Mapping[str, Any]

    @property
    def loss(self) -> float:
        """The loss of the step."""
        return self.metrics["loss"]

    @property
    def grad_norm(self) -> float:
        """The norm of its gradient before clipping; the mean over its optimizer steps."""
        return self.metrics["grad_norm"]

    def is_near(self, name: str) -> bool:
        """Return whether a metric is that of the run, but for rounding."""
        if name not in self.recorded or name not in self.metrics:
            return True
        return math.isclose(self.metrics[name], self.recorded[name], rel_tol=ROUNDING, abs_tol=ROUNDING / 100)

    def tokens(self, sample: int) -> tuple[Token, ...]:
        """Return the tokens of a sample, by its place in the batch, with all that is known of each."""
        samples = self.batch.samples()
        if not 0 <= sample < len(samples):
            raise DataError(f"sample={sample}: step {self.step} has {len(samples)} samples, from 0")
        return samples[sample].tokens

    def table(self, sample: int) -> str:
        """Return the numbers of a sample's tokens as lines of text, those that are known."""
        tokens = self.tokens(sample)
        names = [name for name in TOKEN_COLUMNS if any(getattr(token, name) is not None for token in tokens)]
        lines = [f"{'token':>14} " + " ".join(f"{name:>15}" for name in names)]
        for token in tokens:
            values = (getattr(token, name) for name in names)
            shown = ["" if value is None or not token.is_policy else number(float(value)) for value in values]
            lines.append(f"{token.text!r:>14.14} " + " ".join(f"{value:>15}" for value in shown))
        return "\n".join(lines)

    def show(self, color: str = "gradient_share", **options: Any) -> Any:
        """Show samples with their tokens coloured: by gradient_share, ratio, clipped, loss_weight, advantage, logprob,
        gap, kl, value, reward, version. options: as of `batch.show`."""
        return self.batch.show(color=color, **options)

    def compare(self, other: Replay) -> str:
        """Return, as text, the metrics in which another replay differs, and the tokens whose share of the gradient
        differs most."""
        return "\n".join(self._differences(other))

    def _differences(self, other: Replay) -> Iterator[str]:
        names = [name for name in COMPARED if name in self.metrics or name in other.metrics]
        yield f"{'':24} {'this':>12} {'other':>12}"
        for name in names:
            mine, theirs = (which.metrics.get(name, math.nan) for which in (self, other))
            yield f"{name:24} {number(mine):>12} {number(theirs):>12}"
        shares = [
            (place, index, token.text, token.gradient_share or 0.0, twin.gradient_share or 0.0)
            for place, (left, right) in enumerate(zip(self.batch.samples(), other.batch.samples(), strict=False))
            for index, (token, twin) in enumerate(zip(left.tokens, right.tokens, strict=False))
        ]
        if shares:
            yield "share of the gradient"
        for place, index, text, share, its in sorted(shares, key=lambda row: -abs(row[3] - row[4]))[:NUM_SHOWN]:
            if abs(share - its) > NEAR:
                yield f"{f'sample {place}, token {index} {text!r}':24.24} {number(share):>12} {number(its):>12}"

    def __repr__(self) -> str:
        changed = "".join(f", {key}={value!r}" for key, value in self.changes.items())
        lines = [f"Replay of step {self.step} of {self.run}{changed}"]
        for name in COMPARED:
            if name in self.metrics:
                then = f"   (in the run {number(self.recorded[name])})" if name in self.recorded else ""
                lines.append(f"  {name:24} {number(self.metrics[name])}{then}")
        return "\n".join(
            [
                *lines,
                f"  .batch  {self.batch._described()}",
                "  .show(color=...), .table(sample), .tokens(sample), .compare(other)",
            ]
        )


def replay(
    run_folder: str | Path,
    step: int,
    model: Any = None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    *,
    rescore: Rescore | None = None,
    tokenizer: Any = None,
    **changes: Any,
) -> Replay:
    """Train a recorded step of a run once more, in this process, and return what it did with every token.

    The run was made with save_rollouts=true, on any number of ranks, with any engine. Its samples are read, not
    generated again. The weights are those of the last checkpoint before the step, after the steps in between have been
    replayed, too; without a checkpoint those that the run began with. Nothing is written to the run folder. Of keys
    that were set on the live Trainer the last values count.

    model, train_dataset, tokenizer: as they were passed to the Trainer, if they were; a module is copied, and must hold
    the weights that the run began with, unless there is a checkpoint and no reference. reward_funcs: not called, and
    seldom needed: the scores are those of the run. rescore: gives each sample of the step another reward. changes:
    keys that shall be other than in the run, such as beta=0.1, in this step only. Rows without a prompt, of a run whose
    environment made it, need no environment here.

    Warns if loss or gradient norm are not those that the run logged. Raises ConfigError for keys that say how samples
    are made, or how a run is carried out: they would change nothing. Raises DataError, CheckpointError, or what the
    Trainer raises.
    """
    run = Path(run_folder).resolve()
    given, names = _keys_of(run), _about(run)["reward_functions"]
    _check_changes(given, changes)
    train_dataset = _with_prompts(train_dataset)
    (begun, start), max_steps = _start_of(run, step), _num_steps(run)
    if reward_funcs is None:
        reward_funcs = [_named(name) for name in names]
    arguments = {"tokenizer": tokenizer} if tokenizer is not None else {}
    with tempfile.TemporaryDirectory(prefix="hybrid-rl-replay-") as folder:
        rollouts = _linked(run / "rollouts", Path(folder) / "rollouts", step, max_steps, rescore)
        own: dict[str, Any] = {"mode": "train", "rollouts_path": str(rollouts), "max_steps": max_steps}
        own |= {"output_dir": str(Path(folder) / "runs"), "log_level": "quiet", "log_completions": 0}

        def trainer(name: str, begin: Path | None, **keys: Any) -> Trainer:
            module = copy.deepcopy(model) if isinstance(model, nn.Module) else model
            resumed = {} if begin is None else {"resume": str(begin)}
            config = {**given, **own, "run_name": name, **resumed}
            return Trainer(module, reward_funcs, train_dataset, config=config, **arguments, **keys)

        if changes and begun < step - 1:
            with trainer("before", start) as plain:  # other keys are for the step itself
                while plain.global_step < step - 1:
                    plain.step()
                start = plain.save()
        with trainer("replay", start, **changes) as training:
            while training.global_step < step - 1:
                training.step()
            training.policy.record_tokens()
            result = training.step()
    if "loss" not in result.metrics:
        raise DataError(f"step {step} of {run} did not train the policy, only its critic (critic_warmup_steps)")
    replayed = Replay(run, step, result.batch.load(), result.metrics, _recorded(run, step), changes)
    far = [name for name in ("loss", "grad_norm") if not replayed.is_near(name)]
    if far and not changes and rescore is None:
        logger.warning(
            "step %d of %s is not what the run logged: %s. Is the model the one that the run began with (the reference "
            "is a copy of it), and are data, tokenizer and version of the library those of the run?",
            *(step, run, ", ".join(f"{n} {replayed.metrics[n]:.6g}, not {replayed.recorded[n]:.6g}" for n in far)),
        )
    return replayed


def _check_changes(given: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that change nothing of a recorded step. given: keys of the run."""
    known = {key.path.rpartition(".")[2]: key.path for key in key_values(load_config(given)[0])}
    paths = (known.get(name, name) for name in changes)
    idle = [path for path in paths if path in IDLE_KEYS or path.partition(".")[0] in IDLE_SECTIONS]
    if idle:
        raise ConfigError(
            f"replay({idle[0].rpartition('.')[2]}=...) would change nothing: the samples of a step are those of the "
            "run, and it is trained once more in one process. Change keys of loss, advantage, KL or optimizer, or give "
            "other rewards by rescore="
        )


def _with_prompts(train_dataset: Any) -> Any:
    """Return rows of which each has a prompt: those that an environment completed may have none, and samples have
    theirs."""
    is_rows = isinstance(train_dataset, list) and all(isinstance(row, Mapping) for row in train_dataset)
    if not is_rows or any("prompt" in row for row in train_dataset):
        return train_dataset
    return [{"prompt": [{"role": "user", "content": "."}], **row} for row in train_dataset]  # it is read nowhere


def _keys_of(run: Path) -> dict[str, Any]:
    """Return the keys that the run was given, by path, but for those that are a replay's own."""
    try:
        config, about = yaml.safe_load((run / "config.yaml").read_text()), _about(run)
        given = about["given"]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{run} is not the folder of a run: {error}; give the one with config.yaml and rollouts/"
        ) from error
    keys: dict[str, Any] = {"algorithm": config["algorithm"]["name"]}
    # What is known without having been set: arguments that were paths, and what followed from the machine.
    keys |= {key: config[key.split(".")[0]][key.split(".")[1]] for key in ("model.path", "data.train_path")}
    keys = {key: value for key, value in keys.items() if value is not None}
    if "model.path" in keys:
        keys["model.dtype"] = config["model"]["dtype"]
    if config["rollout"].get("async_level"):
        keys["rollout.async_level"] = config["rollout"]["async_level"]
    if config["rollout"]["engine"] == "hf" or config["model"]["attention"] == "unpacked":
        keys["rollout.engine"] = "hf"  # whose trainer runs the model's own forward, as that of the run did
    for key in given:
        section, _, name = key.partition(".")
        if key in OWN_KEYS or section in OWN_SECTIONS or (section == "rollout" and name not in OF_SAMPLES):
            continue
        value: Any = config
        for part in key.split("."):
            value = value[part]
        keys[key] = value
    return keys


def _about(run: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((run / "environment.json").read_text())
    return about


def _num_steps(run: Path) -> int:
    """Return of how many steps the run was, as far as is known: the learning rate follows from it."""
    return _about(run).get("max_steps") or max(rollout_steps(run / "rollouts"))


def _start_of(run: Path, step: int) -> tuple[int, Path | None]:
    """Return the last checkpoint before a step, and the step that it is of; 0 and None for the beginning. Raises
    DataError without samples of the step, CheckpointError without those of the steps in between."""
    steps = rollout_steps(run / "rollouts") if (run / "rollouts").is_dir() else []
    if step not in steps:
        raise DataError(
            f"{run} has no samples of step {step}; "
            + (f"it has steps {steps}" if steps else "they are kept with save_rollouts=true")
        )
    before = {number: path for number, path in checkpoints_of(run).items() if number < step and is_checkpoint(path)}
    start = max(before, default=0)
    missing = sorted({*range(start + 1, step)} - {*steps})
    if missing:
        begun = before[start] if before else "the beginning of the run"
        raise CheckpointError(
            f"the weights of step {step} cannot be made again: the last checkpoint before it is {begun}, and the "
            f"samples of step {missing[0]} are missing"
        )
    return start, before.get(start)


def _named(name: str) -> Callable[..., Any]:
    """Return a function of that name in the place of a reward function whose scores are recorded."""

    def scored_then(**_: Any) -> Any:
        raise ConfigError(f"{name} is not called in a replay: its scores are those of the run")

    scored_then.__name__ = scored_then.__qualname__ = name
    return scored_then


def _linked(source: Path, target: Path, step: int, max_steps: int, rescore: Rescore | None) -> Path:
    """Make a folder of the samples up to a step, with other rewards for its own if they are given. Later steps have a
    name there and no samples: the learning rate follows from the number of all steps, and a run that ended early has
    fewer."""
    target.mkdir(parents=True)
    files = {file: int(file.name.split("-")[1]) for file in source.glob("step-*.safetensors")}
    for file, number_of in files.items():
        if number_of <= step and (rescore is None or number_of != step):
            (target / file.name).symlink_to(file)
    if rescore is not None:
        save_rollout(target, step, 0, 1, _rescored(load_rollout(source, step), rescore))
    last = max([max_steps, *files.values()])
    for later in range(step + 1, last + 1):
        (target / f"step-{later:06d}-rank-0000-of-0001.safetensors").touch()
    return target


def _rescored(batch: Batch, rescore: Rescore) -> Batch:
    """Return samples with other rewards. A trajectory of several turns gets that of its last one."""
    if "baseline_rewards" in batch:
        raise DataError(
            "rescore= gives samples other rewards, but the algorithm compares them with those of greedy ones"
        )
    trajectories = batch["trajectory"].tolist()
    by_trajectory = dict[int, float]()
    for trajectory, sample in zip(trajectories, batch.samples(), strict=True):
        score = rescore(sample)
        by_trajectory[trajectory] = math.nan if score is None else float(score)  # None: it has no reward
    rewards = [by_trajectory[trajectory] for trajectory in trajectories]
    functions = [[reward] * len(scores) for reward, scores in zip(rewards, batch["function_rewards"], strict=True)]
    changed = batch.without(*({"rewards", "function_rewards", "token_rewards"} & set(batch)))
    return changed.with_columns(rewards=batch["rewards"].new_tensor(rewards), function_rewards=functions)


def _recorded(run: Path, step: int) -> dict[str, float]:
    """Return the metrics that the run logged for a step."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return next((line for line in lines if line.get("step") == step), {})
