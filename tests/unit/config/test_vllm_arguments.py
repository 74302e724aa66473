"""Arguments of vLLM that cannot be given: refused by name, with the reason, while the keys are read."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.vllm_arguments import reserved
from hybrid_rl.errors import ConfigError


def resolved(**arguments: Any) -> Any:
    keys = {
        "engine": "vllm",
        "device": "cpu",
        **{f"rollout.engine_args.{name}": value for name, value in arguments.items()},
    }
    return resolve(*load_config({}, keys)).rollout


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("revision", "nonsense", "the model is read by the trainer; set model.path"),
        ("tokenizer_revision", "main", "the engine takes and gives token ids"),
        ("max_logprobs", 0, "a sample has the logprobs of its own tokens and no others"),
        ("hf_overrides", {"rope_theta": 77}, "vLLM reads the trainer's own config.json"),
        ("enable_expert_parallel", True, "experts are cut over the ranks of a replica"),
        ("enable_return_routed_experts", True, "nothing reads what vLLM would return"),
        ("kv_offloading_size", 4.0, "keys of old weights in it would outlive a handoff"),
        ("logits_processors", ["a.b"], "the trainer could not tell how likely its samples were"),
        ("stream_interval", 10, "tokens are taken as they are drawn"),
        ("limit_mm_per_prompt", {"image": 0}, "samples are texts"),
        ("decode_context_parallel_size", 2, "parallel over tensors, and over replicas"),
    ],
)
def test_what_would_change_nothing_or_the_samples_is_refused_by_name(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.engine_args\.{name} cannot be set: .*{reason}"):
        resolved(**{name: value})


def test_every_reason_is_that_of_a_name_of_its_own() -> None:
    assert all(name.isidentifier() and reason for name, reason in reserved().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"cudagraph_capture_sizes": [1, 2]},
            "cudagraph_capture_sizes would do nothing: there are no CUDA graphs",
        ),
        ({"max_cudagraph_capture_size": 8, "enforce_eager": True}, "max_cudagraph_capture_size would do nothing"),
        ({"disable_custom_all_reduce": True}, "would do nothing with tensor_parallel_size=1"),
    ],
    ids=str,
)
def test_what_other_keys_leave_without_effect_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**arguments)


def test_what_has_an_effect_passes() -> None:
    arguments = {"cudagraph_capture_sizes": [1, 2], "enforce_eager": False, "block_size": 64}
    engine_args = resolved(**arguments).engine_args.others
    assert engine_args == {"cudagraph_capture_sizes": [1, 2], "block_size": 64}
