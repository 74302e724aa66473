"""Settings of verl, translated with their values: the line at the end of the error is a configuration."""

import math
import shlex
from typing import Any

import pytest
import torch

from hybrid_rl.algos.correction import CorrectionInputs
from hybrid_rl.algos.kl import kl_estimate
from hybrid_rl.config import load_config, resolve
from hybrid_rl.errors import ConfigError
from tests.unit.test_from_verl import SCRIPT

ACTOR = "actor_rollout_ref.actor"
NEITHER = [f"{ACTOR}.kl_loss_coef=0.01", "algorithm.kl_ctrl.kl_coef=0.002", f"{ACTOR}.kl_loss_type=mse"]
UNWEIGHTED = {"use_bias_correction_kl": "false"}
OFF = [f"{ACTOR}.use_kl_loss=False", "algorithm.use_kl_in_reward=False"]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, arguments=arguments)
    return str(caught.value)


def line_of(text: str) -> dict[str, str]:
    """The settings of the last line, as a shell would split it; none if there is no such line."""
    head, mark, line = text.partition("What is clear, in one line:\n")
    return dict(word.split("=", 1) for word in shlex.split(line)) if mark else {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # verl would do both at once; here a choice is asked for.
        ([f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True", *NEITHER[:2]], {}),
        (NEITHER, {}),
        ([*OFF, *NEITHER], {}),
        ([f"{ACTOR}.use_kl_loss=True", *NEITHER], {"kl": "loss", "beta": "0.01", **UNWEIGHTED, "kl_estimator": "k2"}),
        (["algorithm.use_kl_in_reward=True", *NEITHER], {"kl": "reward", "beta": "0.002"}),
        # run_qwen2-7b.sh: only the coefficient that does not count; verl's default is 0.001.
        ([f"{ACTOR}.use_kl_loss=True", NEITHER[1]], {"kl": "loss", "beta": "0.001", **UNWEIGHTED}),
    ],
)
def test_the_coefficient_counts_whose_switch_is_on(arguments: list[str], expected: dict[str, str]) -> None:
    text = refusal(*arguments)
    assert line_of(text) == expected
    assert "otherwise" not in text


def test_the_line_can_be_pasted() -> None:
    arguments = [f"{name}={value}" for name, (value, _) in SCRIPT.items()]
    text = refusal(*arguments, "~critic", "+ray_kwargs.ray_init.num_cpus=4", "custom_reward_function.path=my.py")
    given = line_of(text)
    assert given.pop("reward") == "my.py:compute_score"
    meant = {key: value for _, keys in SCRIPT.values() for key, value in (keys or {}).items()}
    del meant["tokens_per_micro_batch"]  # verl counts samples
    meant["model.path"] = SCRIPT["actor_rollout_ref.model.path"][0]
    meant |= {"report_to": {"wandb": {"project": "verl_grpo_example_gsm8k"}}}
    pasted, paths = load_config(None, arguments=[f"{key}={value}" for key, value in given.items()])
    assert (pasted, paths) == load_config(meant)
    assert "Hydra deletes a key" in " ".join(text.split())


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("k3+", "set kl_estimator=k2: k3+ has the gradient of k2"),
        ("low_var_kl+", "set kl_estimator=k2: low_var_kl+ has"),
        ("mse", "set kl_estimator=k2"),
        ("low_var_kl", "set kl_estimator=k3: verl stops it at 10"),
        ("kl", "leave it out: in the loss the gradient of k1 is zero in expectation"),
    ],
)
def test_estimators_of_a_kl_in_the_loss(kind: str, advice: str) -> None:
    text = " ".join(refusal(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}").split())
    assert advice in text


@pytest.mark.parametrize(
    ("gap", "expected"),
    # d (exp(x) - 1 - x) / d logprob with x = ln(reference / policy) = -gap, by hand: 1 - exp(-gap), which is what
    # verl 0.9.1 has where its value is below 10.
    [(1.0, 1 - math.exp(-1.0)), (-1.0, 1 - math.e), (-2.5, 1 - math.exp(2.5))],
)
def test_the_line_has_the_gradient_of_verls_penalty(gap: float, expected: float) -> None:
    line = line_of(refusal(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=low_var_kl"))
    kl: Any = resolve(*load_config(None, arguments=[f"{key}={value}" for key, value in line.items()])).kl
    logprob = torch.tensor([gap], requires_grad=True)
    weight = (logprob - logprob.detach()).exp() if kl.use_bias_correction_kl else 1.0  # the ratio of the loss
    (kl_estimate(logprob, torch.zeros(1), kl.kl_estimator) * weight).sum().backward()
    assert logprob.grad is not None and logprob.grad.item() == pytest.approx(expected, rel=1e-5)


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("rollout_rs=seq_mean_k1 rollout_rs_threshold=1.001", "kl_rejection k1 0.0009995"),  # ln(1.001)
        ("rollout_rs=seq_mean_k1 rollout_rs_threshold=0.999_1.001", "kl_rejection k1 0.0009995"),
        ("rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01", "kl_rejection k3 0.01"),
        ("rollout_is=token rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01", "kl_rejection k3 0.01 2.0"),
        ("rollout_is=token rollout_is_threshold=3", "tis token 3.0"),
        ("rollout_is=sequence rollout_is_threshold=null", "tis sequence 2.0"),
        ("rollout_is=token rollout_is_threshold=0.5_5.0", "icepop 0.5 5.0"),
        ("rollout_is=sequence rollout_is_threshold=0.5_2.0", "mis sequence 0.5 2.0"),
        ("rollout_rs=seq_mean_k1 rollout_rs_threshold=0.5_1.001", ""),  # one-sided: there is no such key here
        ("rollout_rs=token_k1 rollout_rs_threshold=0.6_1.6", ""),
        ("rollout_is_threshold=2.0", ""),
    ],
)
def test_thresholds_of_verls_correction_mean_what_its_mode_says(settings: str, expected: str) -> None:
    line = line_of(refusal(*(f"{CORRECTION}.{setting}" for setting in settings.split())))
    assert " ".join(line.values()) == expected
    load_config(None, arguments=[f"{key}={value}" for key, value in line.items()])


def test_a_bound_of_the_ratio_rejects_what_it_rejects_in_verl() -> None:
    """verl 0.9.1: of two completions with mean log ratios of 0.5 and 0.0005 a bound of 1.001 leaves out the first."""
    line = line_of(refusal(f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=1.001"))
    correction = load_config(None, arguments=[f"{key}={value}" for key, value in line.items()])[0].correction
    gap, rows = torch.tensor([0.5, 0.5, 0.5, 0.0005, 0.0005, 0.0005]), torch.tensor([0, 0, 0, 1, 1, 1])
    mask, ages = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int64)
    weighed = correction.weigh(CorrectionInputs(gap - 1, torch.full((6,), -1.0), mask, rows, 2, ages))
    assert weighed.rejected.tolist() == [True] * 3 + [False] * 3


def test_the_reward_that_verl_chooses_by_itself_is_asked_for_at_once() -> None:
    assert "add reward=FILE.py:FUNCTION" in refusal("data.train_files=a.parquet", "trainer.nnodes=1")
    assert "add reward=" not in refusal("data.train_files=a.parquet", "custom_reward_function.path=my.py")
    assert "add reward=" not in refusal("trainer.nnodes=1", "rollout_batch_size=8")


MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # verl's alpha is 16 where none is given, not ours.
        ([f"{MODEL}.lora_rank=32", f"{MODEL}.lora_adapter_path=null"], {"lora.r": "32", "lora_alpha": "16"}),
        (
            [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=64", f"{MODEL}.target_modules=[q_proj,v_proj]"],
            {"lora.r": "8", "lora_alpha": "64", "target_modules": "[q_proj, v_proj]"},
        ),
        (
            [f"{MODEL}.lora_rank=8", "critic.model.lora_rank=8", "critic.model.lora_alpha=16"],
            {"lora.r": "8", "lora_alpha": "16", "lora_critic": "true"},
        ),
        ([f"{MODEL}.lora_rank=0", f"{MODEL}.lora_alpha=16", f"{MODEL}.target_modules=all-linear"], {}),
        ([f"{MODEL}.lora_adapter_path=adapter", f"{MODEL}.exclude_modules=null"], {"model.path": "adapter"}),
    ],
)
def test_adapters_of_verl(arguments: list[str], expected: dict[str, str]) -> None:
    assert line_of(refusal(*arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # TRL's command line: rank 16 and alpha 32 unless they are given.
        (["use_peft=true"], {"lora.r": "16", "lora_alpha": "32"}),
        (["use_peft=true", "lora_r=8"], {"lora.r": "8", "lora_alpha": "32"}),
        (["use_peft=true", "lora_r=8", "lora_alpha=4"], {"lora.r": "8", "lora_alpha": "4"}),
        (["use_peft=false", "bogus=1"], {}),
        (["lora_r=8", "lora_target_modules=q_proj"], {"lora.r": "8", "lora_alpha": "32", "target_modules": "[q_proj]"}),
        (
            ["lora_r=8", "lora_target_modules=all-linear", "lora_modules_to_save=[a,b]"],
            {"lora.r": "8", "lora_alpha": "32", "target_modules": "all-linear", "peft.modules_to_save": "[a, b]"},
        ),
        # verl's and OpenRLHF's alpha is 16.
        (["lora_rank=32", "lora_target_modules=null"], {"lora.r": "32", "lora_alpha": "16"}),
        (["lora_rank=32", "lora_alpha=64"], {"lora.r": "32", "lora_alpha": "64"}),
    ],
)
def test_adapters_by_short_names(arguments: list[str], expected: dict[str, str]) -> None:
    text = refusal(*arguments, "zzz=1")  # of two wrong keys the error is a table, with the line
    assert line_of(text) == expected and "would do nothing" not in text
    assert ("without lora_alpha it is" in " ".join(text.split())) is (
        bool(expected) and "lora_alpha=" not in str(arguments)
    )
