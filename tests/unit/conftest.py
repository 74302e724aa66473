"""Trainers on the tiny model, closed when the test ends; programs in processes that need not import everything."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kills.forked import Forked

if TYPE_CHECKING:  # tests of functions need neither transformers nor a Trainer, which take four seconds to import
    from hybrid_rl import Trainer

# Different between two runs that are otherwise bit for bit the same. A resumed run probes its first handoffs again.
CLOCK_AND_MEMORY = ("timing/", "perf/", "memory/", "step_time", "handoff/probe_gap")


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs programs; one for all tests of a pytest process."""
    server = Forked()
    yield server
    server.close()


@contextlib.contextmanager
def trainers(folder: Path) -> Iterator[Callable[..., Trainer]]:
    """What `make_trainer` gives, with runs in this folder, for fixtures of other scopes."""
    from hybrid_rl import Trainer
    from tests.support.tiny import build_model, build_tokenizer, spread, sums

    made: list[Trainer] = []
    missing = object()

    def make(model: Any = missing, reward_funcs: Any = missing, train_dataset: Any = missing, **keys: Any) -> Trainer:
        if model is missing:
            model = build_model()
        if reward_funcs is missing:
            reward_funcs = spread
        if hasattr(model, "parameters"):
            keys.setdefault("tokenizer", build_tokenizer())
        if "config" not in keys:
            defaults = {
                "prompts_per_step": 4,
                "num_generations": 2,
                "max_completion_length": 5,
                "learning_rate": 1e-2,
                "output_dir": str(folder / "runs"),
            }
            if keys.get("algorithm") == "sft":  # one demonstration per prompt
                del defaults["num_generations"]
            if "num_train_epochs" not in keys:
                defaults["max_steps"] = 2
            keys = defaults | keys
        made.append(Trainer(model, reward_funcs, sums(12) if train_dataset is missing else train_dataset, **keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """A Trainer of 2 steps x 4 prompts x 2 samples, unless said otherwise. `model=None` leaves the model to the keys;
    any other argument is passed on."""
    with trainers(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run that nothing befalls, which several tests hold theirs against: trained once for all that ask
    with equal keys."""
    runs: dict[str, Path] = {}

    def folder_of(**keys: Any) -> Path:
        name = repr(sorted(keys.items()))
        if name not in runs:
            with trainers(tmp_path_factory.mktemp("straight")) as make:
                trainer = make(**keys)
                trainer.fit()
                runs[name] = trainer.run_folder
        return runs[name]

    return folder_of


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Model and tokenizer as a user has them on disk."""
    from tests.support.tiny import build_model, build_tokenizer

    folder = tmp_path / "model"
    build_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def records() -> Callable[..., list[dict[str, Any]]]:
    """metrics.jsonl of a run, optionally without what differs from run to run."""

    def read(trainer: Trainer | Path, *, comparable: bool = False, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        folder = trainer if isinstance(trainer, Path) else trainer.run_folder
        found = read_lines(folder / name)
        if comparable:
            found = [{k: v for k, v in line.items() if not k.startswith(CLOCK_AND_MEMORY)} for line in found]
        return found

    return read


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of what has been synchronised with the disk since the test began, and "rename PATH" for each path
    that something was renamed to."""
    found: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def recording_rename(path: Path, target: Path) -> Path:
        found.append(f"rename {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    return found
