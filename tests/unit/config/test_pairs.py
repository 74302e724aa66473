"""Whatever records an algorithm is made of: sections that count something twice or compare with nothing are refused,
and their neighbours are not. Single pairs are rows of test_refusals.yaml."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        *(({"correction": name}, "correction") for name in ACTIVE),
        *(({"policy_loss": name}, f"policy_loss={name}") for name in ENGINE_LOSSES),
    ],
    ids=str,
)
def test_demonstrations_have_no_engine(keys: dict[str, Any], what: str) -> None:
    message = f"{what} compares with the engine that sampled, but advantage=sft .* which no engine sampled"
    refused(message, advantage="sft", **keys)


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


# ---------------------------------------------------------------------------------------------------------- rewards


def test_a_prompt_has_one_demonstration() -> None:
    config = resolved(advantage="sft")
    assert config.algorithm.num_generations == 1
    resolve(*load_config(config), has_eval=False)  # as it is read back from a run folder, every key given


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
