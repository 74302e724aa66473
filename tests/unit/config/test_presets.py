"""Presets: every one resolves, and its values are its paper's, here or in the test of the record that it chooses."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.presets import PRESETS

# What a reader of the paper would look for first: estimator, policy loss, where the KL penalty stands, how tokens are
# weighed, completions per prompt, and the numbers. Written down from the papers, not from presets.py.
EXPECTED: dict[str, tuple[str, str, str, str, int, dict[str, Any]]] = {
    "rspo": ("grpo", "rspo", "none", "grpo", 8, {"policy_loss.router_shift_floor": 0.8}),
    "grpo": ("grpo", "clip", "none", "dapo", 8, {"policy_loss.epsilon": 0.2, "advantage.scale_rewards": "group"}),
    "ppo": (
        "gae",
        "clip",
        "reward",
        "dapo",
        1,
        {"policy_loss.epsilon": 0.2, "advantage.lam": 0.95, "advantage.gamma": 1.0, "kl.beta": 0.02}
        | {"critic.cliprange_value": 0.2, "kl.kl_estimator": "k1"},
    ),
    "vapo": (
        "vapo",
        "clip",
        "none",
        "dapo",
        16,
        {"policy_loss.epsilon": 0.2, "policy_loss.epsilon_high": 0.28, "algorithm.positive_nll_coef": 0.1}
        | {"advantage.lam_critic": 1.0, "advantage.length_adaptive_alpha": 0.05}
        | {"critic.critic_warmup_steps": 50, "critic.critic_learning_rate": 2e-6},
    ),
    "impala": ("vtrace", "reinforce", "none", "dapo", 1, {"advantage.rho_clip": 1.0, "advantage.c_clip": 1.0}),
    "dr_grpo": ("grpo", "clip", "none", "dr_grpo", 8, {"advantage.scale_rewards": "none"}),
    "lite_ppo": ("grpo", "clip", "none", "dapo", 8, {"advantage.scale_rewards": "batch"}),
    "rloo": ("rloo", "reinforce", "reward", "sequence_sum", 4, {"kl.beta": 0.03}),
    "reinforce_pp": ("reinforce_plus_plus", "clip", "reward", "dapo", 1, {"kl.kl_estimator": "k1", "kl.beta": 0.01}),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", "clip", "loss", "dapo", 8, {"kl.kl_estimator": "k2"}),
    "remax": ("remax", "reinforce", "reward", "sequence_sum", 1, {"kl.beta": 0.05}),
    "opo": ("opo", "reinforce", "none", "dapo", 8, {}),
    "optimal_token_baseline": ("optimal_token_baseline", "clip", "none", "dapo", 8, {}),
    "gpg": ("gpg", "reinforce", "none", "dapo", 8, {"advantage.scale_rewards": "none"}),
    "maxrl": ("maxrl", "reinforce", "none", "sequence_sum", 8, {}),
    "pass_at_k": ("pass_at_k", "clip", "none", "dapo", 32, {"advantage.pass_k": 4}),
    "max_of_group": ("max_of_group", "clip", "none", "dapo", 8, {"advantage.scale_rewards": "none"}),
    "dapo": (
        "grpo",
        "clip",
        "none",
        "dapo",
        16,
        {"policy_loss.epsilon": 0.2, "policy_loss.epsilon_high": 0.28, "algorithm.max_refills": 10},
    ),
    "prorl": (
        "grpo",
        "clip",
        "loss",
        "dapo",
        16,
        {"policy_loss.epsilon_high": 0.4, "kl.beta": 1e-4, "kl.reference_reset_steps": 200},
    ),
    "gspo": (
        "grpo",
        "clip",
        "none",
        "grpo",
        8,
        {"policy_loss.epsilon": 3e-4, "policy_loss.epsilon_high": 4e-4}
        | {"policy_loss.importance_sampling_level": "sequence"},
    ),
    "luspo": (
        "grpo",
        "clip",
        "none",
        "sequence_sum",
        8,
        {"policy_loss.epsilon": 2e-3, "policy_loss.epsilon_high": 2.5e-3}
        | {"policy_loss.importance_sampling_level": "sequence"},
    ),
    "gmpo": ("grpo", "gmpo", "none", "grpo", 8, {"policy_loss.epsilon": 0.4, "policy_loss.epsilon_high": 0.4}),
    "cispo": ("grpo", "cispo", "none", "dapo", 8, {"policy_loss.epsilon": None, "policy_loss.epsilon_high": 4.0}),
    "sapo": (
        "grpo",
        "sapo",
        "none",
        "grpo",
        8,
        {"policy_loss.sapo_temperature_pos": 1.0, "policy_loss.sapo_temperature_neg": 1.05},
    ),
    "vespo": (
        "grpo",
        "vespo",
        "none",
        "dapo",
        8,
        {"policy_loss.vespo_k_pos": 2.0, "policy_loss.vespo_lambda_pos": 3.0, "policy_loss.vespo_k_neg": 3.0}
        | {"policy_loss.vespo_lambda_neg": 2.0, "algorithm.old_logprobs": "rollout"},
    ),
    "dppo": ("grpo", "dppo", "none", "dapo", 8, {"policy_loss.divergence_threshold": 0.15}),
    "clip_cov": (
        "grpo",
        "clip_cov",
        "none",
        "dapo",
        8,
        {"policy_loss.clip_cov_ratio": 2e-4, "policy_loss.clip_cov_lb": 1.0, "policy_loss.clip_cov_ub": 5.0},
    ),
    "kl_cov": ("grpo", "kl_cov", "none", "dapo", 8, {"policy_loss.kl_cov_ratio": 2e-3, "policy_loss.kl_cov_coef": 1.0}),
    "lambda_grpo": ("grpo", "lambda_grpo", "none", "dapo", 8, {"policy_loss.lambda_length_scale": 1 / 9}),
    "decoupled_ppo": ("grpo", "decoupled", "none", "dapo", 8, {"policy_loss.epsilon": 0.2}),
    "a3po": ("grpo", "a3po", "none", "dapo", 8, {"policy_loss.epsilon": 0.2}),
    "icepop": (
        "grpo",
        "clip",
        "none",
        "dapo",
        8,
        {"correction.correction_low": 0.5, "correction.correction_high": 5.0},
    ),
    "sft": ("sft", "reinforce", "none", "dapo", 1, {}),
    "rejection_sampling": ("rejection", "reinforce", "none", "dapo", 32, {"advantage.num_best": 1}),
    "distillation": ("distillation", "reinforce", "none", "dapo", 4, {"advantage.group_advantage_coef": 0.0}),
}
# Records that no preset chooses: corrections that go with any algorithm, and what cannot run yet.
WITHOUT = {"tis", "mis", "kl_rejection"}


def value_at(config: TrainerConfig, path: str) -> Any:
    section, leaf = path.split(".")
    return getattr(getattr(config, section), leaf)


@pytest.mark.parametrize("name", EXPECTED)
def test_values_of_the_paper(name: str) -> None:
    estimator, objective, kl_in, loss_type, num_generations, numbers = EXPECTED[name]
    config = resolve(*load_config({"algorithm": name}))
    assert (config.advantage.estimator, config.policy_loss.objective) == (estimator, objective)
    assert config.kl.kl_in == kl_in
    assert (config.algorithm.loss_type, config.algorithm.num_generations) == (loss_type, num_generations)
    assert {path: value_at(config, path) for path in numbers} == numbers


def test_every_record_has_a_preset() -> None:
    configs = [load_config({"algorithm": name})[0] for name in PRESETS]
    chosen = {config.advantage.estimator for config in configs}
    chosen |= {config.policy_loss.objective for config in configs}
    chosen |= {config.correction.correction_mode for config in configs}
    assert {*ADVANTAGES, *POLICY_LOSSES, *CORRECTIONS} - chosen == WITHOUT


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_given_besides_wins(name: str) -> None:
    size = 1 if name == "sft" else 64  # a prompt has one demonstration
    given = {"algorithm": name, "loss_type": "dr_grpo", "num_generations": size}
    config = resolve(*load_config(given))
    assert (config.algorithm.loss_type, config.algorithm.num_generations) == ("dr_grpo", size)


def test_a_paper_is_named() -> None:
    for preset in PRESETS.values():
        assert preset.title and preset.source.startswith("arXiv:")


def test_another_policy_loss_leaves_the_bounds_of_the_preset_behind() -> None:
    """GSPO's bounds are of ratios of whole completions: CISPO's weights of tokens would be stopped at 1.0004."""
    config, _ = load_config({"algorithm": "gspo", "policy_loss": "cispo"})
    assert value_at(config, "policy_loss.epsilon_high") == 4.0
