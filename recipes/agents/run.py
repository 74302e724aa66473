"""The recipes of agents: a policy that imitates a careless worker, and the Trainer that improves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.cli import run_recipe
from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.quickstart.command import console, warming
from hybrid_rl.extras.quickstart.kept import KeepStart, take_up
from hybrid_rl.extras.quickstart.model import build_model
from hybrid_rl.extras.quickstart.run import Outcome, check_run, settings_of, train
from hybrid_rl.extras.quickstart.warm_start import SupervisedTrainer
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.prepare import find_hardware
from recipes.agents.chat import encode_conversations
from recipes.agents.task import AgentTask

WARM_START_LR = 3e-3
BATCH_SIZE = 64

BuildTask = Callable[[int], AgentTask]


def start(script: str, doc: str | None, build_task: BuildTask) -> None:
    """Run a recipe as a script, with the settings in the YAML file beside it, and exit."""
    settings = Path(script).with_suffix(".yaml")
    run_recipe(lambda arguments: main(arguments, settings, doc or "", build_task))


def main(arguments: Sequence[str], settings: Path, doc: str, build_task: BuildTask) -> None:
    """Run on `key=value` arguments: with the small policy, or with the user's model and data."""
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        console.print(doc, markup=False, soft_wrap=True)
        console.print("Every key: hybrid-rl keys.")
        return
    own, _ = load_config(None, arguments=arguments)
    if own.model.path is not None:
        with Trainer(config=own, **build_task(own.seed).arguments) as trainer:
            trainer.fit()
        return
    if own.data.train_path is not None:
        raise ConfigError("data.train_path needs a model of your own: set model.path too")
    config, given_paths = settings_of(settings, arguments)
    torch.set_num_threads(1)  # half a million parameters: a second thread would mostly wait for the first
    task = build_task(config.seed)
    check(task, config, given_paths)
    model, tokenizer = warm_started(task, config)
    outcome = improve(model, tokenizer, task, config, [KeepStart(model, config.seed)])
    for step, accuracy in sorted(outcome.curve.items()):
        console.print(f"step {step:3}: {accuracy:.1%} of the held-out rows")
    console.print(f"{outcome.steps} steps in {outcome.seconds:.0f} s; curves, metrics and samples: {outcome.run}")


def check(task: AgentTask, config: TrainerConfig, given: frozenset[str]) -> None:
    """Refuse what the Trainer would refuse after the warm start. given: paths of keys that were set, some of which may
    do nothing. Raises what the Trainer raises."""
    resolve(config, given, hardware=find_hardware(config))
    tokenizer = task.tokenizer()
    check_run(build_model(tokenizer, config.seed), tokenizer, config, **task.given)


def warm_started(task: AgentTask, config: TrainerConfig) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Return a warm-started model and its tokenizer, with progress on the console: the model of the run that is
    resumed, if it has kept that."""
    tokenizer = task.tokenizer()
    model = build_model(tokenizer, config.seed)
    if take_up(model, config) is not None:
        console.print("warm start: that of the run that is resumed")
        return model, tokenizer
    console.print(f"warm start: {len(task.conversations)} careless conversations to imitate")
    with warming(task.warm_start_steps) as show:
        return warm_start(task, config.seed, on_progress=show)


def warm_start(
    task: AgentTask, seed: int, num_steps: int | None = None, on_progress: Callable[[int, float], None] | None = None
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Return a small Qwen2 that imitates the task's conversations, and its tokenizer. num_steps: None = the task's.
    on_progress: gets steps done and last loss, after every step."""
    tokenizer = task.tokenizer()
    model = build_model(tokenizer, seed)
    total = task.warm_start_steps if num_steps is None else num_steps

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / 50) * min(1.0, (total - step) / (0.4 * total))

    examples = encode_conversations(tokenizer, task.conversations, task.tools)
    trainer = SupervisedTrainer(model, examples, seed, WARM_START_LR, BATCH_SIZE, schedule)

    for done in range(1, total + 1):
        loss = trainer.step()
        if on_progress is not None:
            on_progress(done, loss)
    return model, tokenizer


def improve(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: AgentTask,
    config: TrainerConfig,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train a warm-started model in place, to the end of the config's steps; on the GPU, if there is one."""
    return train(model, tokenizer, config, callbacks, **task.given)
