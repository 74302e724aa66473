"""The quickstart with any algorithm: its training rows, its checks, and the improvement of a model by a config."""

import contextlib
import copy
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM

from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.extras.quickstart.task import Row, Task, exact_answer
from hybrid_rl.extras.quickstart.warm_start import train_on_answers
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.run.agent_checks import AgentArguments
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.memory_plan import planned
from hybrid_rl.run.prepare import find_hardware, prepare
from hybrid_rl.run.trainer import Trainer

ARGUMENTS = ("reward_funcs", "train_dataset", "eval_dataset")  # of the Trainer; all others say what makes trajectories
TEACHER_STEPS = 50  # on right answers, after which the teacher has nearly all held-out sums right


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    curve: held-out greedy accuracy by training step, 0 = before; metrics: of the last step; run: the run folder;
    seconds: wall time; resumed_at: the step that it began with."""

    curve: Mapping[int, float]
    metrics: Mapping[str, float]
    steps: int
    seconds: float
    run: Path
    resumed_at: int = 0

    @property
    def accuracy(self) -> float:
        """Held-out greedy accuracy at the end."""
        return self.metrics["eval/accuracy"]


class Curve(Callback):
    """Keeps eval/accuracy by training step."""

    def __init__(self) -> None:
        self.accuracy: dict[int, float] = {}

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Record the accuracy of an evaluation."""
        self.accuracy[step] = metrics["eval/accuracy"]


def settings_of(file: Path, arguments: Sequence[str]) -> tuple[TrainerConfig, frozenset[str]]:
    """Read the settings of a recipe under `key=value` arguments, as `load_config` does. A run made shorter than the
    recipe's warm-up of the learning rate has a shorter warm-up too, unless one is given; an algorithm that learns from
    demonstrations draws no groups."""
    config, given_keys = load_config(file, arguments=arguments)
    _, own = load_config(arguments=arguments)
    steps, warmup, changes = config.max_steps, config.optimizer.warmup_steps, dict[str, int]()
    if steps is not None and 0 < steps <= warmup and "optimizer.warmup_steps" not in own:
        changes["warmup_steps"] = steps // 10
    if "demonstrations" in config.advantage.needs:
        defaults = type(config.algorithm)()
        groups = {"max_refills": defaults.max_refills, "num_generations": defaults.num_generations}
        changes |= {key: value for key, value in groups.items() if f"algorithm.{key}" not in own}
    return load_config(file, changes, arguments) if changes else (config, given_keys)


def check(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, config: TrainerConfig) -> None:
    """Refuse what `improve` would refuse before it starts, for a model of the same shape that may still be untrained,
    and is moved as `improve` would.

    Raises what the Trainer raises.
    """
    with teacher(model, tokenizer, task, config, is_taught=False) as settings:
        rows = {"train_dataset": training_rows(task, config), "eval_dataset": task.heldout}
        check_run(model, tokenizer, settings, reward_funcs=exact_answer, **rows)


def check_run(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, config: TrainerConfig, **arguments: Any
) -> None:
    """Refuse what `train` would refuse before it starts, given the same arguments, but for a model that need not be
    trained yet. Logs nothing: `train` will. Raises what the Trainer raises."""
    logger = logging.getLogger("hybrid_rl")
    level = logger.level
    rewards, train, evaluation = (arguments.pop(name, None) for name in ARGUMENTS)
    with contextlib.ExitStack() as closing:
        closing.callback(logger.setLevel, level)
        logger.setLevel(logging.ERROR)
        place(model, config)
        agents = AgentArguments(**arguments)
        planned(prepare(model, tokenizer, rewards, train, evaluation, config, {}, agents=agents, closing=closing))


def improve(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    config: TrainerConfig,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train a warm-started model in place, to the end of the config's steps; on the GPU, in bfloat16, if there is one
    and the config does not say otherwise."""
    with teacher(model, tokenizer, task, config) as settings:
        rows = {"train_dataset": training_rows(task, config), "eval_dataset": task.heldout}
        return train(model, tokenizer, settings, callbacks, reward_funcs=exact_answer, **rows)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainerConfig,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> Outcome:
    """Run a Trainer on a model, which is placed as the config says, to the end of the config's steps. arguments: its
    rows, reward functions and tools."""
    curve = Curve()
    place(model, config)
    started = time.perf_counter()
    with Trainer(model, tokenizer=tokenizer, config=config, callbacks=[curve, *callbacks], **arguments) as trainer:
        resumed_at = trainer.global_step
        # A resumed run may have nothing left to do, and then has no metrics either.
        metrics = trainer.fit() or trainer.evaluate()
    seconds = time.perf_counter() - started
    return Outcome(curve.accuracy, metrics, trainer.global_step, seconds, trainer.run_folder, resumed_at)


def place(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Give a model the device and the dtype in which the config trains."""
    where = resolve(config, hardware=find_hardware(config))
    module: nn.Module = model
    if where.controller.backend == "local":  # ranks on Ray copy it onto their own devices
        module.to(where.model.device)
    module.to(DTYPES[where.model.dtype])


def training_rows(task: Task, config: TrainerConfig) -> list[Row]:
    """Return the problems, with their right answers as completions if the algorithm learns from them."""
    if "demonstrations" not in config.advantage.needs:
        return task.train
    return [{**row, "completion": row["answer"]} for row in task.train]


@contextlib.contextmanager
def teacher(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    config: TrainerConfig,
    *,
    is_taught: bool = True,
) -> Iterator[TrainerConfig]:
    """Return the config with a teacher, if the algorithm needs one and none is named: the same model, trained further
    on right answers; just a copy if not is_taught."""
    wanted = "teacher_logprobs" in config.advantage.needs
    if not wanted or config.advantage.teacher_path is not None:  # type: ignore[attr-defined]
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="quickstart-teacher-") as folder:
        learned = copy.deepcopy(model)
        if is_taught:
            train_on_answers(learned, tokenizer, task, config.seed, TEACHER_STEPS)
        learned.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield load_config(config, {"advantage.teacher_path": folder})[0]
