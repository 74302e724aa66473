"""A Trainer among others of its process, and what may be set on it."""

import dataclasses
import gc
import logging
import os
import re
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.errors import ConfigError, HybridRLError
from tests.support.inside.workers import worker_of
from tests.support.libraries.python_names import end_at_once
from tests.support.tiny import build_model, build_tokenizer, spread, sums

KEYS = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 2}

# ------------------------------------------------------------------------------------------------------------ setting


def test_what_would_do_nothing_or_was_given_at_the_start_cannot_be_assigned(make_trainer) -> None:
    """Keys of whatever section, and arguments."""
    trainer = make_trainer()
    for name in ("adam_beta1", "num_ranks", "entropy_target", "prompts_per_step", "rollouts_path", "seed"):
        with pytest.raises(ConfigError, match=f"trainer.{name} would do nothing"):
            setattr(trainer, name, 1e-4)
        assert not hasattr(trainer, name)
    for name in ("config", "tokenizer", "train_dataset", "eval_dataset", "model"):
        before = getattr(trainer, name, None)
        with pytest.raises(ConfigError, match=r"Trainer\(\.\.\., resume=trainer.save\(\)\) keeps the optimizer"):
            setattr(trainer, name, spread)
        assert getattr(trainer, name, None) is before
    for name in ("global_step", "num_tokens", "policy_version", "optimizer_path", "learning_rat", "max_new_tokens"):
        with pytest.raises(AttributeError, match=name):
            setattr(trainer, name, 3)


def test_the_advice_is_good(make_trainer) -> None:
    trainer = make_trainer(max_steps=3, learning_rate=1e-3)
    trainer.step()
    other = make_trainer(max_steps=3, learning_rate=1e-4, resume=trainer.save())
    assert other.global_step == 1 and other.step().metrics["learning_rate"] == 1e-4
    again = make_trainer(str(other.save()), max_steps=3, learning_rate=1e-2)
    assert again.global_step == 0 and again.step().metrics["learning_rate"] == 1e-2


def test_classes_of_the_users_have_attributes_of_their_own(make_trainer, tmp_path) -> None:
    class Mine(Trainer):
        def __init__(self, *arguments, **keys):
            self.before = 1
            super().__init__(*arguments, **keys)
            self.after = 2

    keys = KEYS | {"tokenizer": build_tokenizer(), "output_dir": str(tmp_path)}
    with Mine(build_model(), spread, sums(4), **keys) as trainer:
        trainer.noted = 3
        assert (trainer.before, trainer.after, trainer.noted) == (1, 2, 3)
        with pytest.raises(ConfigError):
            trainer.seed = 1


def test_a_configuration_says_what_to_do_instead(make_trainer) -> None:
    config = make_trainer().config
    for section, name in (
        *((config, "seed"), (config.optimizer, "learning_rate"), (config.rollout, "temperature")),
        *((config.rollout.engine_args, "block_size"), (config.advantage, "scale_rewards"), (config.kl, "beta")),
    ):
        with pytest.raises(
            dataclasses.FrozenInstanceError, match=rf"{name}=0.5: .*resume=trainer.save\(\), {name}=0.5"
        ):
            setattr(section, name, 0.5)
    assert dataclasses.replace(config.optimizer, learning_rate=0.5).learning_rate == 0.5


# --------------------------------------------------------------------------------------------------------- one folder


def test_a_cell_that_is_run_again_takes_the_run_over(make_trainer, caplog) -> None:
    """The Trainer of its first run is still there: it has the run folder."""
    keys = {"run_name": "run", "resume": "auto", "save_steps": 1, "max_steps": 3}
    first = make_trainer(**keys)
    first.step()
    second = make_trainer(**keys)
    assert second.global_step == 1 and "closing the Trainer of" in caplog.text
    with pytest.raises(
        HybridRLError, match="this Trainer is closed: a later one of this process needed the run folder"
    ):
        first.step()
    second.step()


def test_a_trainer_is_not_taken_from_below_its_own_step(make_trainer) -> None:
    made = []

    def reward(completion_ids, **_):
        if not made:
            made.append(0)
            with pytest.raises(ConfigError, match=r"has the run folder .*, and its step\(\) is running; wait"):
                make_trainer(build_model(), **keys)
            made.append(1)
        return spread(completion_ids)

    keys = {"run_name": "run", "resume": "auto"}
    trainer = make_trainer(reward_funcs=reward, **keys)
    trainer.step()
    assert made == [0, 1]


def test_a_trainer_that_was_dropped_is_closed(make_trainer, tmp_path) -> None:
    keys = KEYS | {"tokenizer": build_tokenizer(), "output_dir": str(tmp_path)}
    trainer = Trainer(build_model(), spread, sums(4), **keys)
    trainer.step()
    folder, gone = trainer.run_folder, weakref.ref(trainer)
    assert (folder / ".lock").exists()
    del trainer
    gc.collect()
    assert gone() is None and not (folder / ".lock").exists()


# --------------------------------------------------------------------------------------------------------- one module


def test_two_trainers_of_one_module_are_told_of(make_trainer, caplog) -> None:
    """The optimizer of the first one goes by weights that the second one changes."""
    module = build_model()
    first = make_trainer(module, max_steps=3)
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        first.step()
        assert caplog.text == ""
        second = make_trainer(module, max_steps=3)
        assert f"the Trainer of {first.run_folder} is open and trains the same module" in caplog.text
        assert "was trained before, 1 step in this process" in caplog.text
        caplog.clear()
        second.step()
        second.step()
        assert caplog.text == ""
        worker = worker_of(first)
        published, publish = [], worker.update_weights
        worker.update_weights = lambda version: published.append(version) or publish(version)
        first.step()
        told = f"the Trainer of {second.run_folder} has trained the module of this one ({first.run_folder})"
        assert caplog.text.count(told) == 1 and "close() this one and make another" in caplog.text
        assert published == [1, 2]  # an engine with a copy of the weights had those of before
        caplog.clear()
        first.step()
        assert caplog.text == "" and published == [1, 2, 3]


def test_a_module_that_was_trained_before_is_told_of_unless_its_weights_come_from_a_checkpoint(
    make_trainer, caplog
) -> None:
    module, other = build_model(), build_model()
    first = make_trainer(module)
    first.step()
    saved = first.save()
    first.close()
    make_trainer(other).step()
    assert "was trained before" not in caplog.text
    make_trainer(module).close()
    assert caplog.text.count("the module was trained before, 1 step in this process: training continues") == 1
    assert "is open and trains the same module" not in caplog.text
    make_trainer(module, resume=str(saved), max_steps=3)
    assert caplog.text.count("was trained before") == 1
    assert torch.isfinite(next(module.parameters())).all()


# ------------------------------------------------------------------------------------------------------------- forks


def in_child(action: Callable[[], object]) -> int:
    """Do it in a fork of this process; 0 if it raised nothing and came to an end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(20)
            action()
            status = 0
        finally:
            end_at_once(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def leave(trainer: Trainer) -> None:
    with trainer:
        pass


@pytest.mark.parametrize("let_go", [Trainer.close, leave, Trainer.__del__])
def test_a_fork_that_lets_go_of_a_trainer_takes_nothing_from_its_parent(make_trainer, let_go: Any) -> None:
    """The run goes on as one that nobody forked: in its folder, with its reward process."""

    def pid_of(completions, log_metric, **_: Any) -> list[float]:
        log_metric("pid", os.getpid())
        return [float(len(text)) for text in completions]

    keys = {"reward_funcs": pid_of, "reward_processes": 1, "max_steps": 3}
    undisturbed = [step.metrics for step in make_trainer(**keys).steps()]
    trainer = make_trainer(**keys)
    found = [trainer.step().metrics]
    lock = (trainer.run_folder / ".lock").read_text()
    assert in_child(lambda: let_go(trainer)) == 0
    assert (trainer.run_folder / ".lock").read_text() == lock
    found += [step.metrics for step in trainer.steps()]
    assert len({metrics["pid"] for metrics in found}) == 1
    for name in ("loss", "grad_norm", "reward", "completions/mean_length"):
        assert [metrics[name] for metrics in found] == [metrics[name] for metrics in undisturbed], name


def test_a_fork_cannot_use_the_trainer_of_its_parent(make_trainer) -> None:
    trainer = make_trainer(run_name="mine")

    def use() -> None:
        message = f"this is process {os.getpid()}, a fork of process {os.getppid()}, to which the Trainer belongs"
        for action in (trainer.step, trainer.fit, trainer.save, lambda: trainer.generate("1+2=")):
            with pytest.raises(HybridRLError, match=message):
                action()

    def write_there_too() -> None:
        with pytest.raises(ConfigError, match=f"{re.escape(str(trainer.run_folder))} is in use by process"):
            make_trainer(run_name="mine", resume="auto")

    assert in_child(use) == in_child(write_there_too) == 0
    assert trainer.step().metrics["grad_norm"] > 0


def test_a_fork_drops_nothing_of_what_it_inherits(make_trainer) -> None:
    """What is dropped may reach others by itself, as Ray's handles do."""
    trainer = make_trainer()

    def drop() -> None:
        held = weakref.ref(trainer.policy)
        trainer.close()
        for name in Trainer.__slots__[:-1]:
            delattr(trainer, name)
        gc.collect()
        assert held() is not None

    assert in_child(drop) == 0
