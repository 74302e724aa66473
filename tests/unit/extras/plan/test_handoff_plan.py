"""Bytes by link of handoffs between ranks that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.plan import handoff_plan
from hybrid_rl.extras.plan.handoff_plan import HandoffPlan, plan_handoff
from hybrid_rl.extras.plan.request import Machine, planned_config
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta

ROOT = Path(__file__).parents[4]
LAYOUTS = ROOT / "benchmarks" / "layouts"
MODEL = f"model.path={ROOT / 'docs' / 'plans' / 'models' / 'qwen2.5-0.5b'}"
PARAMETERS = 494_032_768


def made(num_gpus: int, *keys: str) -> tuple[TrainerConfig, PreTrainedModel]:
    config = planned_config([MODEL, *keys], Machine(num_gpus, "80GB"))
    return config, build_on_meta(ModelRecipe.of_folder(str(config.model.path)), DTYPES[config.model.dtype])


def test_replicas_of_vllm_take_all_but_their_own_shard_from_others() -> None:
    found = plan_handoff(*made(2, "rollout.engine=vllm"), ranks_per_host=8, layouts=LAYOUTS)
    local, host = found.links["local"], found.links["host"]
    # Every dim 0 of the model is even, so each rank holds exactly half: fp32 shards, a bf16 engine.
    assert (local.read_bytes, local.written_bytes) == (2 * PARAMETERS, PARAMETERS)
    assert (host.read_bytes, host.written_bytes) == (2 * PARAMETERS, PARAMETERS)
    assert found.links["remote"].read_bytes == 0 and found.staging_bytes == 0
    assert (found.minimum.read_bytes, found.minimum.written_bytes) == (4 * PARAMETERS, 2 * PARAMETERS)
    assert found.gathered_bytes == 2 * PARAMETERS
    assert found.bytes_by_link == {"local": 3 * PARAMETERS, "host": 2 * PARAMETERS, "remote": 0}
    assert "qwen2.5-0.5b-tp1-rank0.npz" in found.source and found.missing == ""


def test_other_hosts_send_in_the_dtype_of_the_engine() -> None:
    found = plan_handoff(*made(2, "rollout.engine=vllm"), ranks_per_host=1, layouts=LAYOUTS)
    assert found.bytes_by_link == {"local": 3 * PARAMETERS, "host": 0, "remote": PARAMETERS}
    assert 0 < found.staging_bytes <= 2 * 256 * 2**20


def test_shards_in_host_memory_cross_pcie_in_the_dtype_of_the_engine() -> None:
    found = plan_handoff(*made(2, "rollout.engine=vllm", "on_host=[shards]"), ranks_per_host=8, layouts=LAYOUTS)
    assert found.bytes_by_link == {"remote": 0, "pcie": 2 * PARAMETERS}
    assert found.words.endswith("its shards are in host memory") and not found.is_on_gpus


def test_one_rank_holds_the_compute_dtype() -> None:
    found = plan_handoff(*made(1, "rollout.engine=vllm"), ranks_per_host=8, layouts=LAYOUTS)
    assert found.bytes_by_link == {"local": 4 * PARAMETERS, "host": 0, "remote": 0} and found.gathered_bytes == 0


def test_embedded_engines_gather_or_share() -> None:
    alone = plan_handoff(*made(1), ranks_per_host=8)
    assert alone.links == {} and alone.missing == "" and "nothing is moved" in alone.words
    together = plan_handoff(*made(4), ranks_per_host=8)
    assert together.bytes_by_link["host"] == 2 * PARAMETERS * 3 / 4  # in bfloat16, which FSDP gathers
    # Two copies of the model, each on two ranks: only one other rank is needed.
    assert plan_handoff(*made(4, "dp_replicate=2"), ranks_per_host=8).bytes_by_link["host"] == PARAMETERS
    adopted = plan_handoff(*made(1, "rollout.engine=vllm", "handoff.adopt_weights=true"), ranks_per_host=8)
    assert adopted.links == {} and "share one copy" in adopted.words


@pytest.mark.parametrize("layouts", [None, LAYOUTS])
def test_without_traces_and_without_vllm_the_reason_is_given(
    layouts: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_plan.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    keys = ("rollout.engine=vllm", "tensor_parallel_size=7")  # of which there is no trace
    found = plan_handoff(*made(7, *keys), ranks_per_host=8, layouts=layouts)
    assert isinstance(found, HandoffPlan) and found.links == {}
    assert "vLLM is not installed" in found.missing and found.bytes_by_link is None
    assert ("give --layouts" in found.missing) == (layouts is None)
    assert ("has no trace of this model with tensor_parallel_size=7" in found.missing) == (layouts is not None)


def test_a_process_that_runs_vllm_traces_nothing() -> None:
    config = made(2, "rollout.engine=vllm", "tensor_parallel_size=2")
    found = plan_handoff(*config, ranks_per_host=8, may_trace=False)
    assert found.links == {} and "no folder of layouts was given (layouts=" in found.missing


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no traces \(MODEL-tpN-rankN.npz\); give the folder benchmarks/layouts"):
        plan_handoff(*made(1, "rollout.engine=vllm"), ranks_per_host=8, layouts=tmp_path)
