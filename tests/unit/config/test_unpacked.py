"""Whether the trainer packs rows, apart from which engine generates."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.errors import ConfigError
from hybrid_rl.training.batch_plan import PlanSpec


def resolved(**keys: Any) -> Any:
    return resolve(*load_config({}, {"device": "cpu", **keys}))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, True),
        ({"engine": "vllm"}, True),
        ({"engine": "vllm", "attention": "sdpa"}, True),
        ({"engine": "vllm", "attention": "unpacked"}, False),
        ({"engine": "hf"}, False),
    ],
    ids=str,
)
def test_vllm_generates_for_a_trainer_that_packs_and_for_one_that_does_not(
    keys: dict[str, Any], expected: bool
) -> None:
    config = resolved(**keys)
    assert config.is_packed is PlanSpec.of(config).is_packed is expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "inplace"}, "rollout.engine=inplace decodes packed rows; set rollout.engine=vllm, or .*engine=hf"),
        ({"engine": "hf"}, "attention='unpacked' would do nothing: rollout.engine=hf"),
        ({"engine": "vllm", "torch_compile": True}, "compiles packed blocks, and model.attention=unpacked runs"),
        ({"engine": "vllm", "policy_loss": "rspo"}, "from packed rows, which model.attention=unpacked does not make"),
    ],
    ids=str,
)
def test_what_only_packed_rows_can_do_is_refused_without_them(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(attention="unpacked", **keys)
