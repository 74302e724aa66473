"""vLLM's share of tests/distributed/test_asynchrony.py: with nothing ahead every form is the synchronous run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from hybrid_rl.logging.run_folder import read_jsonl
from tests.distributed.test_asynchrony import FORMS, OF_FORMS, Run, assert_same, weights_at
from tests.support.kills.killed import without_chance
from tests.support.tiny import build_model, build_tokenizer, spread, sums
from tests.vllm.test_partial import KEYS, SHAPE
from tests.vllm.test_trainer_ranks import short_folder as short_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """What a run logs of each step but what chance decides, and its last weights."""

    def run(**keys: Any) -> Run:
        folder = tmp_path_factory.mktemp("runs")
        without = {name: value for name, value in KEYS.items() if name not in ("rollout.partial", "oversample")}
        keys = {**without, "max_steps": 2, "save_steps": 2, "output_dir": str(folder), "run_name": "run", **keys}
        with Trainer(build_model(**SHAPE), spread, sums(40), tokenizer=build_tokenizer(), **keys) as trainer:
            trainer.fit()
            lines = read_jsonl(trainer.run_folder / "metrics.jsonl")
        return [without_chance(line) for line in lines if line["step"]], weights_at(folder, 2)

    return run


@pytest.fixture(scope="module")
def synchronous(run_of: Callable[..., Run]) -> Run:
    """The synchronous run."""
    return run_of()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["partial", pytest.param("ranks apart", marks=pytest.mark.sweep)])
def test_with_nothing_ahead_every_form_is_the_synchronous_run(
    form: str, run_of: Callable[..., Run], synchronous: Run, short_folder: Path
) -> None:
    """To the bit, on one rank; and beside one that only generates."""
    apart = {"rollout_ranks": 1, "ray.env_vars": {"TMPDIR": str(short_folder)}} if form == "ranks apart" else {}
    assert_same(run_of(**FORMS[form], **apart), synchronous, OF_FORMS)
