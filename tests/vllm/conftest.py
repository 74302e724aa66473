"""What tests of vLLM share: no processes of its own, and one that has not imported it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybrid_rl.vllm.library  # noqa: F401  # before the tests import from vLLM
from tests.support.inside.trainers import position_of
from tests.support.inside.workers import worker_of
from tests.support.libraries.vllm_names import inspect_here

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def inspected_here() -> Iterator[None]:
    """To see what a model can do vLLM imports its class in a process of its own, which takes ten seconds for every
    architecture, and again once another version of vLLM has run. Here the class is imported anyway."""
    with pytest.MonkeyPatch.context() as patch:
        inspect_here(patch)
        yield


@pytest.fixture(scope="session")
def fresh_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `fresh.py` prints."""
    # A variable that vLLM sets as it is imported, and that this process might have from it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AITER_")}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-m", "tests.vllm.fresh"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def worker(trainer):
    """The only rank of the module's trainer."""
    return worker_of(trainer)


@pytest.fixture
def publish(trainer):
    """Publish the next version. What a test broke is whole again afterwards."""

    def publish():
        position_of(trainer).policy_version += 1
        return trainer.generating.update_weights(trainer.policy_version)[0]

    yield publish
    publish()
