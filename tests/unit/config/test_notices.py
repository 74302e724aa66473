"""What a run tells of its configuration when it starts."""

from typing import Any

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.validate import notices


def told(**keys: Any) -> str:
    config, given = load_config(None, keys)
    return " ".join(notices(resolve(config, given), given))


@pytest.mark.parametrize(
    ("keys", "inert"),
    [
        ({"epsilon": 0.1}, "epsilon=0.1"),
        ({"epsilon_high": 0.28, "dual_clip": 3}, "epsilon_high=0.28, dual_clip=3.0"),
        ({"delta": 4}, "delta=4.0"),
        ({"policy_loss": "cispo", "epsilon_high": 5}, "epsilon_high=5.0"),
        ({"epsilon": 0.1, "beta": 0.1, "kl": "reward", "advantage": "rloo"}, "epsilon=0.1"),  # logprobs recomputed
    ],
)
def test_bounds_of_a_ratio_that_is_always_1(keys: dict[str, Any], inert: str) -> None:
    sentence = f"{inert}: nothing is clipped, because each batch is used by one optimizer step"
    assert told(**keys).startswith(sentence)
    assert not told(**keys, num_iterations=2) and not told(**keys, prompts_per_mini_batch=4)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"algorithm": "dapo"},  # whose preset has bounds
        {"epsilon": 0.2},  # as a config read from a run folder has all keys
        {"epsilon": 0.1, "old_logprobs": "rollout"},
        {"policy_loss": "reinforce"},
        {"policy_loss": "a3po", "epsilon": 0.1},  # whose ratio is to a policy between the engine's and this one
        {"policy_loss": "dppo", "loss_options.divergence_threshold": 0.3},
    ],
)
def test_settings_of_which_nothing_is_told(keys: dict[str, Any]) -> None:
    assert not told(**keys)


def test_a_float32_head_that_vllm_does_not_share() -> None:
    keys: dict[str, Any] = {"dtype": "bfloat16", "cast_lm_head_to_fp32": True}
    assert told(**keys, engine="vllm").startswith(
        "cast_lm_head_to_fp32=True applies only to the trainer's models: vllm"
    )
    assert not told(**keys) and not told(dtype="bfloat16", engine="vllm")


def test_a_loss_of_demonstrations_that_is_no_likelihood() -> None:
    assert told(advantage="sft", policy_loss="clip").startswith("policy_loss=clip holds ratios: the metric loss is not")
    assert not told(advantage="sft", policy_loss="cispo") and not told(algorithm="sft")


@pytest.mark.parametrize(
    ("layers", "objective"),
    [
        (({"advantage": "sft"}, {}), "reinforce"),
        (({"advantage": {"estimator": "sft"}}, {}), "reinforce"),
        (({"algorithm": "dapo"}, {"advantage.estimator": "sft"}), "reinforce"),
        (({"advantage": "sft", "policy_loss": "clip"}, {}), "clip"),
        (({"advantage": "sft"}, {"policy_loss": "clip"}), "clip"),
        (({"advantage": "grpo"}, {}), "clip"),
        (({"advantage": "rejection"}, {}), "clip"),
    ],
)
def test_demonstrations_are_learned_by_their_likelihood_unless_another_loss_is_named(layers, objective) -> None:
    config = load_config(*layers)[0]
    assert config.policy_loss.objective == objective
    assert load_config(config)[0] == config  # as it is read back from a run folder


def test_a_rate_of_all_weights_is_low_for_adapters() -> None:
    assert told(r=8).startswith("learning_rate=1e-06 is low for adapters") and "1e-5 to 1e-4" in told(r=8)
    assert not told(r=8, learning_rate=1e-5) and not told(r=8, mode="rollout") and not told()
