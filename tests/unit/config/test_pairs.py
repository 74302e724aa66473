"""Sections of an algorithm that count something twice, compare with nothing or leave each other without effect are
refused, with the reason; their neighbours are not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import GivenReward, dense_reward
from hybrid_rl.run.checks import check_rewards
from tests.unit.algos.variants import records


def resolved(has_eval: bool = False, **keys: Any) -> TrainerConfig:
    return resolve(*load_config(None, keys), has_eval=has_eval)


def refused(message: str, has_eval: bool = False, **keys: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(has_eval, **keys)


# ------------------------------------------------------------------------------ what the engine sampled is weighed once

ENGINE_LOSSES = [name for name, record in records(POLICY_LOSSES).items() if record().corrects_rollout]
ENGINE_ESTIMATORS = [name for name, record in records(ADVANTAGES).items() if "rollout_logprobs" in record().needs]
ACTIVE = [name for name, record in records(CORRECTIONS).items() if record.is_active]


def test_who_weighs_the_engine() -> None:
    assert set(ENGINE_LOSSES) == {"decoupled", "a3po", "dppo"} and ENGINE_ESTIMATORS == ["vtrace"]


@pytest.mark.parametrize("loss", ENGINE_LOSSES)
@pytest.mark.parametrize("estimator", ENGINE_ESTIMATORS)
def test_an_estimator_and_a_loss_do_not_both(estimator: str, loss: str) -> None:
    refused(
        f"advantage={estimator} corrects for the engine's sampling itself, and policy_loss={loss} would do so a second "
        "time; use policy_loss=clip or reinforce",
        advantage=estimator,
        policy_loss=loss,
    )
    resolved(advantage=estimator)
    resolved(policy_loss=loss)


@pytest.mark.parametrize("correction", ACTIVE)
def test_a_correction_is_the_only_one(correction: str) -> None:
    for keys in [{"policy_loss": loss} for loss in ENGINE_LOSSES] + [{"advantage": name} for name in ENGINE_ESTIMATORS]:
        refused("and correction would do so a second time; leave correction out", correction=correction, **keys)
    refused(
        "both are the engine.*use recompute, or leave correction out", correction=correction, old_logprobs="rollout"
    )
    resolved(correction=correction)


@pytest.mark.parametrize("keys", [{"algorithm": "impala"}, {"advantage": "vtrace"}])
def test_v_trace_does_not_compare_the_engine_with_itself(keys: dict[str, Any]) -> None:
    message = "advantage=vtrace compares trainer and engine, but with old_logprobs=rollout both are the engine"
    refused(message, old_logprobs="rollout", **keys)
    assert resolved(**keys).algorithm.old_logprobs == "recompute"


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        *(({"correction": name}, "correction") for name in ACTIVE),
        *(({"policy_loss": name}, f"policy_loss={name}") for name in ENGINE_LOSSES),
        ({"policy_loss": "vespo", "old_logprobs": "rollout"}, "old_logprobs=rollout"),
        ({"old_logprobs": "rollout"}, "old_logprobs=rollout"),
    ],
    ids=str,
)
def test_demonstrations_have_no_engine(keys: dict[str, Any], what: str) -> None:
    refused(
        f"{what} compares with the engine that sampled, but advantage=sft .* which no engine sampled",
        advantage="sft",
        **keys,
    )
    resolved(advantage="sft", policy_loss="dppo", loss_options={"divergence_type": "topk_tv"})


def test_losses_that_compare_with_the_engine_alone_compute_no_old_logprobs() -> None:
    for loss in ("a3po", "dppo"):
        assert resolved(policy_loss=loss, num_iterations=2).algorithm.old_logprobs == "detach"
    config = resolved(policy_loss="dppo", loss_options={"divergence_type": "topk_kl"}, num_iterations=2)
    assert config.algorithm.old_logprobs == "recompute"


# -------------------------------------------------------------------------------- one ratio for a whole completion

ONE_RATIO: list[dict[str, Any]] = [
    {"importance_sampling_level": "sequence"},
    {"policy_loss": "gmpo"},
    {"policy_loss": "rspo"},
]
APART: list[dict[str, Any]] = [
    *({"advantage": name} for name in ("gae", "vapo", "vtrace", "optimal_token_baseline", "distillation")),
    {"advantage": "reinforce_plus_plus", "gamma": 0.9},
    {"algorithm": "ppo"},
]
IN_REWARD: list[dict[str, Any]] = [{"advantage": "remax"}, {"advantage": "reinforce_plus_plus"}]


@pytest.mark.parametrize("loss", ONE_RATIO, ids=str)
@pytest.mark.parametrize("estimator", APART, ids=str)
def test_advantages_of_single_tokens_want_ratios_of_single_tokens(
    loss: dict[str, Any], estimator: dict[str, Any]
) -> None:
    refused(
        "tells the tokens of a completion apart, but policy_loss=.* has one ratio per completion", **loss, **estimator
    )
    if "importance_sampling_level" in loss:
        refused("use importance_sampling_level=sequence_token", **loss, **estimator)
        resolved(importance_sampling_level="sequence_token", **estimator)
    resolved(**estimator)


@pytest.mark.parametrize("loss", ONE_RATIO, ids=str)
@pytest.mark.parametrize("estimator", IN_REWARD, ids=str)
def test_so_do_rewards_of_single_tokens(loss: dict[str, Any], estimator: dict[str, Any]) -> None:
    resolved(**loss, **estimator)
    refused("apart if kl=reward gives each a reward, but policy_loss", kl="reward", beta=0.1, **loss, **estimator)
    config = resolved(**loss, **estimator)
    with pytest.raises(ConfigError, match="a reward function returns a number per token, which advantage=.*one ratio"):
        check_rewards(per_token, config, (), has_eval=False)
    check_rewards(per_token, resolved(**estimator), (), has_eval=False)
    check_rewards(per_completion, config, (), has_eval=False)
    # An agent may reward its turns, and need not.
    check_rewards(per_completion, config, (), has_eval=False, sources=[GivenReward("agent", is_dense=True)])


def test_weights_may_be_given_for_rewards_that_come_with_samples() -> None:
    def setup_of(*weights: float) -> list[float] | None:
        config = resolved(reward_weights=list(weights))
        setup = check_rewards([per_completion], config, (), has_eval=False, sources=[GivenReward("Shop")])
        return setup.weights(config.rewards.reward_weights)

    assert (setup_of(2.0), setup_of(2.0, 0.1)) == ([2.0, 1.0], [2.0, 0.1])
    says = r"^3 reward weights for 1 reward function \(per_completion\); the reward of Shop"
    with pytest.raises(ConfigError, match=says):
        setup_of(1.0, 1.0, 1.0)


@pytest.mark.parametrize("loss", ONE_RATIO, ids=str)
def test_estimators_that_take_sums_of_rewards_go_with_any(loss: dict[str, Any]) -> None:
    for name, record in records(ADVANTAGES).items():
        if not record().tells_tokens_apart and not record().uses_step_rewards and record().takes_kl_rewards:
            config = resolved(advantage=name, kl="reward", beta=0.1, **loss)
            check_rewards(per_token, config, (), has_eval=False)


@dense_reward
def per_token(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[0.0] * len(ids) for ids in completion_ids]


def per_completion(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0] * len(completion_ids)


# -------------------------------------------------------------------------------------------------------- no effect


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"kl_horizon": 100000, "beta": 0.1}, {"kl_target": 0.1}),
        ({"kl_horizon": 100000, "beta": 0.1, "kl": "reward", "advantage": "rloo"}, {"kl_target": 0.1}),
        ({"ref_model_mixup_alpha": 0.5, "beta": 0.1}, {"ref_model_sync_steps": 2}),
        ({"loss_options.num_top": 5, "policy_loss": "dppo"}, {"loss_options.divergence_type": "topk_tv"}),
        (
            {"loss_options.num_top": 5, "policy_loss": "dppo", "loss_options.divergence_type": "binary_kl"},
            {"loss_options.divergence_type": "topk_kl"},
        ),
        ({"max_refills": 2, "advantage": "sft"}, {"advantage": "rloo"}),
        (
            {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"},
            {"multi_objective_aggregation": "sum_then_normalize"},
        ),
        ({"mask_truncated_completions": True, "advantage": "sft"}, {"advantage": "rloo"}),
        ({"off_policy_mask_threshold": 0.5, "advantage": "sft"}, {"advantage": "rloo"}),
        ({"off_policy_mask_threshold": 0.5, "advantage": "rejection"}, {"advantage": "rloo"}),
        ({"off_policy_mask_threshold": 0.5, "advantage": "max_of_group"}, {"advantage": "rloo"}),
        ({"num_generations": 4, "algorithm": "sft"}, {"num_generations": 1}),
        ({"overlong_buffer": 8, "advantage": "sft"}, {"advantage": "rloo"}),
        ({"overlong_buffer": 8, "advantage": "distillation"}, {"group_advantage_coef": 0.5}),
        ({"overlong_buffer": 8, "advantage": "distillation"}, {"positive_nll_coef": 0.1}),
        ({"reward_weights": [1.0], "advantage": "sft"}, {"has_eval": True}),
        ({"reward_processes": 2, "advantage": "sft"}, {"has_eval": True}),
        ({"reward_timeout_seconds": 2.0, "advantage": "sft"}, {"has_eval": True}),
        ({"score_by": "group", "advantage": "sft"}, {"has_eval": True}),
        ({"max_reward_failure_share": 0.5, "advantage": "sft"}, {"has_eval": True}),
    ],
    ids=str,
)
def test_keys_that_would_do_nothing(keys: dict[str, Any], remedy: dict[str, Any]) -> None:
    name = next(iter(keys))
    refused(rf"\b{name}={re.escape(repr(keys[name]))} would do nothing: ", **keys)
    resolved(**{**keys, **remedy})


@pytest.mark.parametrize("keys", [{"advantage": "sft"}, {"advantage": "distillation"}])
def test_a_kl_in_rewards_that_play_no_part(keys: dict[str, Any]) -> None:
    refused("cannot take a KL penalty as part of the reward; use kl=loss", kl="reward", beta=0.1, **keys)
    resolved(kl="loss", beta=0.1, **keys)
    resolved(kl="reward", beta=0.1, advantage="distillation", group_advantage_coef=0.5)


@pytest.mark.parametrize("keys", [{"advantage": "sft"}, {"advantage": "gae", "num_generations": 1}])
def test_a_loss_that_compares_a_group_wants_one(keys: dict[str, Any]) -> None:
    refused(
        "policy_loss=lambda_grpo compares the completions of a group, but each has one",
        policy_loss="lambda_grpo",
        **keys,
    )
    resolved(policy_loss="lambda_grpo", advantage="gae")


def test_a_prompt_has_one_demonstration() -> None:
    config = resolved(advantage="sft")
    assert config.algorithm.num_generations == 1
    resolve(*load_config(config), has_eval=False)  # as it is read back from a run folder, every key given


def test_covariances_between_bounds_that_hold_nothing() -> None:
    refused("clip_cov_lb=6.0 must be below clip_cov_ub=5.0", policy_loss="clip_cov", loss_options={"clip_cov_lb": 6.0})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_refills": 2}, "max_refills=2 replaces groups whose rewards are all equal, but there is no reward"),
        ({"positive_nll_coef": 0.1}, "positive_nll_coef=0.1 is for samples with a positive reward, but there is no"),
    ],
)
def test_what_rewards_would_feed_wants_one(keys: dict[str, Any], message: str) -> None:
    config = resolved(advantage="distillation", **keys)
    with pytest.raises(ConfigError, match=message):
        check_rewards(None, config, (), has_eval=False)
    check_rewards(per_completion, config, (), has_eval=False)


def test_process_supervision_wants_rewards_of_single_tokens() -> None:
    config = resolved(token_level=True)
    with pytest.raises(ConfigError, match="token_level=true .* no reward function returns any, .*dense_reward"):
        check_rewards(per_completion, config, (), has_eval=False)
    check_rewards([per_completion, per_token], config, (), has_eval=False)


# --------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"kl": "reward", "beta": 0.1, "use_bias_correction_kl": True},
            "key 'use_bias_correction_kl' would do nothing: it belongs to kl.kl_in=loss, not reward$",
        ),
        ({"use_bias_correction_kl": True}, "it belongs to kl.kl_in=loss, not none; set beta above 0, without kl=none$"),
        (
            {"kl": "none", "beta": 0.1},
            "kl.beta=0.1 must be at most 0: with kl=none there is no KL penalty; leave kl out, or choose kl=loss or",
        ),
        ({"vllm_importance_sampling_clip_max": 3.0}, "set correction_high: the upper bound"),
        ({"vllm_importance_sampling_clip_min": 0.1}, "set correction_low: the lower bound"),
        ({"clip_ratio_high": 0.28}, "set epsilon_high=0.28$"),
        ({"clip_ratio_low": 0.2}, "set epsilon, which is the lower bound"),
        ({"epsilon_low": 0.2}, "unknown key 'epsilon_low': set epsilon, which is the lower bound"),
        ({"num_generations_eval": 4}, "with an eval_dataset .or eval_path., set eval_temperature above 0$"),
        (
            {"entropy_target": 3.0, "entropy_coef_min": 0.5, "entropy_coef_max": 0.1},
            "^entropy_coef_min=0.5 is above entropy_coef_max=0.1; lower the one, or raise the other$",
        ),
        (
            {"learning_rate": -1e-5},
            "^optimizer.learning_rate=-1e-05 must be at least 0: set it above 0 .0 is for mode=rollout, or for",
        ),
        ({"max_steps": -1}, "^max_steps=-1 must be at least 1, or None .determined by num_train_epochs.$"),
        (
            {"eval_steps": 0},
            "^eval.eval_steps=0 must be at least 1, or None .only before the first and after the last.$",
        ),
        ({"beta": -1}, "^kl.beta=-1 must be at least 0$"),
        ({"processing_class": None}, "^unknown key 'processing_class': pass the tokenizer as tokenizer=$"),
        ({"top_p": 0.9}, "set eval_top_p: only evaluation can have it, because truncated sampling biases"),
        ({"epochs": 3}, "set num_train_epochs$"),
        ({"optimizers": (None, None)}, "the optimizer is AdamW"),
        ({"compute_metrics": print}, "pass reward functions"),
        ({"weight_decay": -1}, "^optimizer.weight_decay=-1 must be at least 0$"),  # which has no None
        ({"sync_ref_model": False}, "leave it out .False is what happens anyway., or set ref_model_sync_steps, with"),
        ({"sync_ref_model": True}, "unknown key 'sync_ref_model': set ref_model_sync_steps, with"),
        ({"shuffle_dataset": False}, "unknown key 'shuffle_dataset': set shuffle$"),  # it is on otherwise
        ({"shuffle_dataset": None}, "leave it out .None has no effect., or set shuffle$"),
        ({"resume": True}, "^resume=True is not a valid choice: set resume=auto, with run_name, for the newest"),
        ({"resume": "latest"}, "^resume='latest' is not a valid choice: set resume=auto, with run_name"),
        ({"resume": False}, "^resume=False is not a valid choice: leave it out to begin a new run$"),
        ({"clip_ratio_c": 3.0}, r"set dual_clip=3.0: of policy_loss=clip"),
    ],
    ids=str,
)
def test_what_is_told(keys: dict[str, Any], message: str) -> None:
    refused(message, **keys)


# Of TRL 1.16's GRPOConfig what is neither a key here nor a setting of transformers' trainer.
TRL = [
    "model_init_kwargs",
    "disable_dropout",
    "remove_unused_columns",
    "ds3_gather_for_generation",
    "shuffle_dataset",
    "generation_batch_size",
    "steps_per_generation",
    "top_p",
    "top_k",
    "min_p",
    "generation_kwargs",
    "repetition_penalty",
    "use_transformers_paged",
    "use_vllm",
    "vllm_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
    "sync_ref_model",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "num_completions_to_print",
    "log_unique_prompts",
    "use_liger_kernel",
    "use_adaptive_entropy",
]


@pytest.mark.parametrize("name", TRL)
def test_every_name_of_trl_gets_an_answer(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({name: 1})
    assert "did you mean" not in str(caught.value) and len(str(caught.value)) > len(f"unknown key {name!r}") + 10
