"""Runs over vLLM with held groups that are killed at random moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hybrid_rl import Trainer
from tests.distributed.ranks import forking
from tests.killed import HOLDING, KEYS, Killed, long
from tests.no_pictures import draw_nothing
from tests.tiny import build_model, build_tokenizer, sums
from tests.vllm.test_partial import KEYS as OF_VLLM
from tests.vllm.test_partial import SHAPE

pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(3600)]
ENGINE = {name: OF_VLLM[name] for name in OF_VLLM if name not in {*KEYS, "rollout.partial", "oversample"}}


def train(folder: Path, keys: dict[str, Any], mark: Path) -> None:
    """The whole program of a process that may be killed. mark: made when training begins."""
    from vllm.model_executor.models import registry

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())  # as `inspected_here`
        keys = {**KEYS, **ENGINE, "output_dir": str(folder), **keys}
        with Trainer(build_model(**SHAPE), long, sums(60), tokenizer=build_tokenizer(), **keys) as trainer:
            mark.touch()
            trainer.fit()


@pytest.mark.parametrize("holding", HOLDING)
def test_a_run_over_vllm_that_is_killed_at_random_moments_is_the_uninterrupted_one(holding, tmp_path):
    """SIGKILL after a random part of the CPU time in which the whole run trains, with per_request_seeds=true."""
    assert ENGINE["per_request_seeds"]
    mark, began = tmp_path / "mark", [0.0]

    def cpu_seconds(process: Any) -> float:
        return sum(psutil.Process(process.pid).cpu_times()[:2]) - began[0] if process.is_alive() else 0.0

    def start(folder: Path, keys: dict[str, Any]) -> Any:
        mark.unlink(missing_ok=True)
        process = forking().Process(target=train, args=(folder, {**HOLDING[holding], **keys}, mark), daemon=True)
        process.start()
        while process.is_alive() and not mark.exists():
            process.join(0.01)
        began[0] = 0.0
        began[0] = cpu_seconds(process)
        return process

    Killed(tmp_path, start, cpu_seconds, seed=2).play(2)
