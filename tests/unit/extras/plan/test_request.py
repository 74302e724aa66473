"""What a plan is asked about, read from words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.plan.request import Machine, planned_config

ROOT = Path(__file__).parents[4]
NODE = Machine(8, "80GB")
MODEL = "model.path=some/model"


def test_gpus_become_ranks_in_bfloat16() -> None:
    config = planned_config(["dapo", MODEL, "max_completion_length=2048"], NODE)
    assert (config.num_ranks, config.model.device, config.model.dtype) == (8, "cuda", "bfloat16")
    assert config.algorithm.name == "dapo" and config.rollout.max_completion_length == 2048
    assert config.memory.device_memory == "80GB" and config.memory.host_memory is None

    assert [planned_config([MODEL], Machine(number, "80GB")).num_ranks for number in (3, 16)] == [3, 16]


def test_what_is_given_as_a_key_stays_and_a_named_gpu_brings_its_memory() -> None:
    config = planned_config([MODEL, "num_ranks=4", "device_memory=60GB"], Machine(8, "80GB", host_memory="1TB"))
    assert (config.num_ranks, config.memory.device_memory, config.memory.host_memory) == (4, "60GB", "1TB")

    assert planned_config([MODEL], Machine(8, gpu="h200")).memory.device_memory == "141GB"
    assert planned_config([MODEL], Machine(8, "100GB", "h200")).memory.device_memory == "100GB"


def test_a_run_on_cpus_needs_no_gpus() -> None:
    config = planned_config([MODEL, "device=cpu", "num_ranks=2"], Machine())
    assert (config.num_ranks, config.model.dtype, config.memory.device_memory) == (2, "float32", None)


def test_recipes_are_read_as_they_would_run(tmp_path: Path) -> None:
    """With a model of your own: the algorithm of the recipe, and the library's defaults for all else."""
    config = planned_config([str(ROOT / "recipes" / "ppo.py"), MODEL, "reward=mine.py:score"], NODE)
    assert config.algorithm.name == "ppo" and config.rollout.max_completion_length == 512
    own = tmp_path / "mine.yaml"
    own.write_text("max_completion_length: 99\n")
    config = planned_config([str(ROOT / "recipes" / "ppo.py"), MODEL, f"config={own}"], NODE)
    assert config.algorithm.name == "ppo" and config.rollout.max_completion_length == 99
    for first in (str(own), f"config={own}"):
        assert planned_config([first, MODEL], NODE).rollout.max_completion_length == 99
    assert planned_config([str(ROOT / "recipes" / "ppo.py"), MODEL, "algorithm=grpo"], NODE).algorithm.name == "grpo"


@pytest.mark.parametrize(
    ("words", "machine", "message"),
    [
        (["grpo"], NODE, "the model is missing: set model.path"),
        (["recipes/none.py", MODEL], NODE, "recipes/none.py does not exist"),
        ([str(ROOT / "recipes" / "ppo.py")], NODE, "without model.path runs the quickstart"),
        (["none.yaml", MODEL], NODE, "config file 'none.yaml' does not exist"),
        (["grpoo", MODEL], NODE, "is no recipe .*did you mean 'grpo'"),
        (["grpo", "dapo", MODEL], NODE, "argument 'dapo' is not of the form key=value"),
        (["learning_rat=1", MODEL], NODE, "unknown key 'learning_rat'; did you mean"),
        (["grpo", "model=some/model"], NODE, "model is a section of keys.*did you mean model.path=some/model"),
        (["some/model"], NODE, "did you mean model.path=some/model"),
        (["docs"], NODE, "did you mean model.path=docs"),
        ([MODEL], Machine(0, "80GB"), "--gpus 0 must be at least 1; plan a run on CPUs with device=cpu"),
        (
            [MODEL],
            Machine(8, "80GB", gpus_per_host=0),
            "--gpus-per-host 0 must be at least 1; it is 8 if",
        ),
        ([MODEL], Machine(12, "80GB"), "--gpus 12 is no multiple of --gpus-per-host 8.*give --gpus 16"),
        ([MODEL], Machine(8, "80"), "--gpu-memory='80' has no unit; write 80GB"),
        ([MODEL, "device_memory=81GB"], NODE, "memory.device_memory=81GB is more .*--gpu-memory 80GB"),
        ([MODEL, "device_memory=81GB"], Machine(8, gpu="H100"), "memory.device_memory=81GB is more .*--gpu H100: 80GB"),
        (
            [MODEL, "host_memory=2TB"],
            Machine(8, "80GB", host_memory="1TB"),
            "memory.host_memory=2TB is more .*--host-memory 1TB",
        ),
        ([MODEL], Machine(8, "80XB"), "--gpu-memory='80XB' is not a size of memory"),
        ([MODEL], Machine(8, "80GB", host_memory="0B"), "--host-memory='0B' is not a size of memory"),
        ([MODEL], Machine(8), "the memory of a GPU is missing: give --gpu-memory 80GB, or --gpu H100"),
        ([MODEL], Machine(8, gpu="H10"), "did you mean H100"),
        ([MODEL], Machine(), "the GPUs are missing: give --gpus 8 .* or add device=cpu for the run that"),
        ([MODEL, "device=cpu"], NODE, "exclude each other"),
        ([MODEL, "num_ranks=9"], NODE, "num_ranks=9 needs 9 GPUs, one per rank, but there are 8"),
        (
            [MODEL, "rollout.engine=vllm", "tensor_parallel_size=3"],
            NODE,
            "tensor_parallel_size=3 does not divide num_ranks=8; use 1, 2, 4, 8",
        ),
    ],
)
def test_what_cannot_be_planned_is_an_error(words: list[str], machine: Machine, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_config(words, machine)
