"""What `auto` stands for on each kind of machine."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.hardware import NO_GPU, Hardware

NODE, BOX, OLD = Hardware(8, "H100"), Hardware(1, "L4"), Hardware(2, "Tesla T4", has_bfloat16=False)


def settled(hardware: Hardware, module_device: Any = None, **keys: Any) -> TrainerConfig:
    return resolve(*load_config(None, keys), hardware=hardware, module_device=module_device)


@pytest.mark.parametrize(
    ("hardware", "keys", "expected"),
    [
        (NO_GPU, {}, (1, "local", "cpu", "float32")),
        (NODE, {}, (1, "local", "cuda", "bfloat16")),
        (OLD, {}, (1, "local", "cuda", "float32")),
        (NODE, {"device": "cpu"}, (1, "local", "cpu", "float32")),
        (NODE, {"device": "cpu", "dtype": "bfloat16"}, (1, "local", "cpu", "bfloat16")),
        (NODE, {"dtype": "float32"}, (1, "local", "cuda", "float32")),
        (NO_GPU, {"num_ranks": 4}, (4, "ray", "cpu", "float32")),
        (NODE, {"num_ranks": 4}, (4, "ray", "cuda", "bfloat16")),
        (BOX, {"num_ranks": 4, "device": "cpu"}, (4, "ray", "cpu", "float32")),
        (NODE, {"num_ranks": "auto"}, (8, "ray", "cuda", "bfloat16")),
        (BOX, {"num_ranks": "auto"}, (1, "local", "cuda", "bfloat16")),
        (NO_GPU, {"num_ranks": "auto"}, (1, "local", "cpu", "float32")),
        (NODE, {"num_ranks": "auto", "device": "cpu"}, (1, "local", "cpu", "float32")),
        # Where Ray was asked for it is Ray, on any machine.
        (BOX, {"num_ranks": "auto", "backend": "ray"}, (1, "ray", "cuda", "bfloat16")),
        (NO_GPU, {"num_ranks": "auto", "ray.watchdog_seconds": 60}, (1, "ray", "cpu", "float32")),
        (NODE, {"backend": "ray"}, (1, "ray", "cuda", "bfloat16")),
        # A reference of its own takes some of the GPUs, if there is one.
        (NODE, {"num_ranks": "auto", "beta": 0.1, "reference_ranks": 2}, (6, "ray", "cuda", "bfloat16")),
        (NODE, {"num_ranks": "auto", "rollout_ranks": 2}, (6, "ray", "cuda", "bfloat16")),
        (NODE, {"num_ranks": 6, "beta": 0.1, "reference_ranks": 2}, (6, "ray", "cuda", "bfloat16")),
        # A module stays where it is; ranks on Ray hold copies.
        (NODE, {"module_device": "cpu"}, (1, "local", "cpu", "float32")),
        (NODE, {"module_device": "cuda", "dtype": "bfloat16"}, (1, "local", "cuda", "bfloat16")),
        (NODE, {"module_device": "cpu", "device": "cpu"}, (1, "local", "cpu", "float32")),
        (NODE, {"module_device": "cpu", "num_ranks": "auto", "dtype": "float32"}, (8, "ray", "cuda", "float32")),
        (BOX, {"module_device": "cpu", "num_ranks": "auto", "dtype": "float32"}, (1, "local", "cpu", "float32")),
        (NODE, {"module_device": "cpu", "num_ranks": 2, "device": "cuda"}, (2, "ray", "cuda", "bfloat16")),
    ],
)
def test_auto(hardware: Hardware, keys: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = settled(hardware, **keys)
    assert (config.num_ranks, config.controller.backend, config.model.device, config.model.dtype) == expected


def test_what_was_settled_stays() -> None:
    once = settled(NODE, num_ranks="auto")
    assert resolve(once, hardware=NODE) == once
