"""Presets: every one resolves, and its values are its paper's, here or in the test of the record that it chooses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from hybrid_rl.algos.policy_losses import CISPO
from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.presets import PRESETS

# What presets run: estimator, policy loss, place of the KL, loss_type and num_generations; and further numbers, written
# down from the papers (Preset.source), not from presets.py; of grpo they are TRL's. Where a preset only chooses its own
# record, as that of a new loss does, the test of the record is enough.
PAPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo clip none dapo 8", {"epsilon": 0.2, "scale_rewards": "group"}),
    "ppo": (
        "gae clip reward dapo 1",
        {"epsilon": 0.2, "lam": 0.95, "gamma": 1.0, "beta": 0.02, "cliprange_value": 0.2, "kl_estimator": "k1"},
    ),
    "vapo": (
        "vapo clip none dapo 16",
        {"epsilon": 0.2, "epsilon_high": 0.28, "positive_nll_coef": 0.1, "lam_critic": 1.0}
        | {"length_adaptive_alpha": 0.05, "critic_warmup_steps": 50, "critic_learning_rate": 2e-06},
    ),
    "impala": ("vtrace reinforce none dapo 1", {"rho_clip": 1.0, "c_clip": 1.0}),
    "dr_grpo": ("grpo clip none dr_grpo 8", {"scale_rewards": "none"}),
    "lite_ppo": ("grpo clip none dapo 8", {"scale_rewards": "batch"}),
    "rloo": ("rloo reinforce reward sequence_sum 4", {"beta": 0.03}),
    "reinforce_pp": ("reinforce_plus_plus clip reward dapo 1", {"kl_estimator": "k1", "beta": 0.01}),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline clip loss dapo 8", {"kl_estimator": "k2"}),
    "remax": ("remax reinforce reward sequence_sum 1", {"beta": 0.05}),
    "opo": ("opo reinforce none dapo 8", {}),
    "optimal_token_baseline": ("optimal_token_baseline clip none dapo 8", {}),
    "gpg": ("gpg reinforce none dapo 8", {"scale_rewards": "none"}),
    "maxrl": ("maxrl reinforce none sequence_sum 8", {}),
    "pass_at_k": ("pass_at_k clip none dapo 32", {"pass_k": 4}),
    "max_of_group": ("max_of_group clip none dapo 8", {"scale_rewards": "none"}),
    "dapo": ("grpo clip none dapo 16", {"epsilon": 0.2, "epsilon_high": 0.28, "max_refills": 10}),
    "prorl": ("grpo clip loss dapo 16", {"epsilon_high": 0.4, "beta": 0.0001, "reference_reset_steps": 200}),
    "gspo": (
        "grpo clip none grpo 8",
        {"epsilon": 0.0003, "epsilon_high": 0.0004, "importance_sampling_level": "sequence"},
    ),
    "luspo": (
        "grpo clip none sequence_sum 8",
        {"epsilon": 0.002, "epsilon_high": 0.0025, "importance_sampling_level": "sequence"},
    ),
    "gmpo": ("grpo gmpo none grpo 8", {"epsilon": 0.4, "epsilon_high": 0.4}),
    "rspo": ("grpo rspo none grpo 8", {"router_shift_floor": 0.8}),
    "cispo": ("grpo cispo none dapo 8", {"epsilon": None, "epsilon_high": 4.0}),
    "sapo": ("grpo sapo none grpo 8", {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
    "vespo": (
        "grpo vespo none dapo 8",
        {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
        | {"old_logprobs": "rollout"},
    ),
    "dppo": ("grpo dppo none dapo 8", {"divergence_threshold": 0.15}),
    "clip_cov": ("grpo clip_cov none dapo 8", {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}),
    "kl_cov": ("grpo kl_cov none dapo 8", {"kl_cov_ratio": 0.002, "kl_cov_coef": 1.0}),
    "lambda_grpo": ("grpo lambda_grpo none dapo 8", {"lambda_length_scale": 1 / 9}),
    "decoupled_ppo": ("grpo decoupled none dapo 8", {"epsilon": 0.2}),
    "a3po": ("grpo a3po none dapo 8", {"epsilon": 0.2}),
    "icepop": ("grpo clip none dapo 8", {"correction_low": 0.5, "correction_high": 5.0}),
    "sft": ("sft reinforce none dapo 1", {}),
    "rejection_sampling": ("rejection reinforce none dapo 32", {"num_best": 1}),
    "distillation": ("distillation reinforce none dapo 4", {"group_advantage_coef": 0.0}),
}
# Presets that are values of another paper's records.
ONLY_VALUES = {"lite_ppo", "prorl", "sft"}
# Records that no preset chooses: corrections that go with any algorithm, and what cannot run yet.
WITHOUT = {"tis", "mis", "kl_rejection"}


@pytest.mark.parametrize("name", PAPERS)
def test_choices_and_numbers_of_the_paper(name: str) -> None:
    config = resolve(*load_config({"algorithm": name}))
    choices, numbers = PAPERS[name]
    records = config.advantage.estimator, config.policy_loss.objective, config.kl.kl_in
    assert f"{' '.join(records)} {config.algorithm.loss_type} {config.algorithm.num_generations}" == choices
    sections = [getattr(config, section) for section in ("algorithm", "advantage", "policy_loss", "kl", "critic")]
    values = {key: value for section in (*sections, config.correction) for key, value in vars(section).items()}
    assert {key: values[key] for key in numbers} == numbers


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_and_chooses_a_record_of_its_paper(name: str) -> None:
    config = resolve(*load_config({"algorithm": name}))
    chosen = (config.advantage, config.policy_loss, config.kl, config.correction)
    papers = set(re.findall(r"arXiv:\d{4}\.\d{5}", PRESETS[name].source))
    found = {paper for record in chosen for paper in papers if paper in (type(record).__doc__ or "")}
    assert papers and bool(found) != (name in ONLY_VALUES)


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


def test_another_policy_loss_leaves_the_bounds_of_the_preset_behind() -> None:
    """GSPO's bounds are of ratios of whole completions: CISPO's weights of tokens would be stopped at 1.0004."""
    config, _ = load_config({"algorithm": "gspo", "policy_loss": "cispo"})
    assert config.policy_loss == CISPO(epsilon_high=4.0)
