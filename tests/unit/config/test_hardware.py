"""What `auto` stands for on each kind of machine, and what is refused there."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.hardware import NO_GPU, Hardware
from hybrid_rl.errors import ConfigError

NODE, BOX, OLD = Hardware(8, "H100"), Hardware(1, "L4"), Hardware(2, "Tesla T4", has_bfloat16=False)


def settled(hardware: Hardware, module_device: Any = None, **keys: Any) -> TrainerConfig:
    return resolve(*load_config(None, keys), hardware=hardware, module_device=module_device)


def choice(config: TrainerConfig) -> tuple[Any, ...]:
    return config.num_ranks, config.controller.backend, config.model.device, config.model.dtype


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
        (NODE, {"num_ranks": 6, "beta": 0.1, "reference_ranks": 2}, (6, "ray", "cuda", "bfloat16")),
    ],
)
def test_auto(hardware: Hardware, keys: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert choice(settled(hardware, **keys)) == expected


@pytest.mark.parametrize(
    ("module_device", "hardware", "keys", "expected"),
    [
        ("cpu", NODE, {}, (1, "local", "cpu", "float32")),
        ("cuda", NODE, {"dtype": "bfloat16"}, (1, "local", "cuda", "bfloat16")),
        ("cpu", NODE, {"device": "cpu"}, (1, "local", "cpu", "float32")),
        # Ranks on Ray hold copies.
        ("cpu", NODE, {"num_ranks": "auto", "dtype": "float32"}, (8, "ray", "cuda", "float32")),
        ("cpu", BOX, {"num_ranks": "auto", "dtype": "float32"}, (1, "local", "cpu", "float32")),
        ("cpu", NODE, {"num_ranks": 2, "device": "cuda"}, (2, "ray", "cuda", "bfloat16")),
    ],
)
def test_a_module_stays_where_it_is(
    module_device: str, hardware: Hardware, keys: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert choice(settled(hardware, module_device, **keys)) == expected


@pytest.mark.parametrize(
    ("hardware", "module_device", "keys", "message"),
    [
        (Hardware(missing="torch 2.11 is built without CUDA"), None, {"device": "cuda"}, "torch 2.11 is built without"),
        (
            OLD,
            None,
            {"dtype": "bfloat16"},
            "dtype=bfloat16, but Tesla T4 has no hardware support for it; use dtype=float",
        ),
        (NODE, "cpu", {"device": "cuda"}, r'device=cuda, but the module .* is on cpu; move it with \.to\("cuda"\)'),
        (NODE, "cuda", {"device": "cpu"}, r'device=cpu, but the module .* is on cuda; move it with \.to\("cpu"\)'),
        (
            BOX,
            None,
            {"num_ranks": 8},
            "num_ranks=8 needs 8 GPUs, one per rank, but there is 1; use num_ranks=auto for one rank per GPU, or "
            "device=cpu for ranks on CPU cores",
        ),
        (
            NODE,
            None,
            {"num_ranks": 7, "beta": 0.1, "reference_ranks": 2},
            "num_ranks=7 and reference_ranks=2 need 9 GPUs, one per rank, but there are 8; use num_ranks=auto",
        ),
        (NODE, None, {"num_ranks": "auto", "engine": "vllm", "tensor_parallel_size": 3}, "does not divide num_ranks=8"),
        (
            NODE,
            None,
            {"num_ranks": 2, "ray.env_vars": {"CUDA_VISIBLE_DEVICES": "3"}},
            "controller.ray.env_vars sets CUDA_VIS",
        ),
    ],
)
def test_what_the_machine_cannot_do(
    hardware: Hardware, module_device: str | None, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(hardware, module_device, **keys)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("most", "num_ranks='most' must be of type int or auto"),
        (0, "num_ranks=0 must be at least 1"),
        (1.5, "num_ranks=1.5"),
    ],
)
def test_numbers_of_ranks(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"num_ranks": value})


def test_what_was_settled_stays() -> None:
    once = settled(NODE, num_ranks="auto")
    assert resolve(once, hardware=NODE) == once
