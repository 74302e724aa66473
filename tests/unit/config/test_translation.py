"""Settings of verl, translated with their values: the line at the end of the error is a configuration."""

import shlex

import pytest

from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError
from tests.unit.test_from_verl import SCRIPT

ACTOR = "actor_rollout_ref.actor"
NEITHER = [f"{ACTOR}.kl_loss_coef=0.01", "algorithm.kl_ctrl.kl_coef=0.002", f"{ACTOR}.kl_loss_type=mse"]
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
        ([f"{ACTOR}.use_kl_loss=True", *NEITHER], {"kl": "loss", "beta": "0.01", "kl_estimator": "k2"}),
        (["algorithm.use_kl_in_reward=True", *NEITHER], {"kl": "reward", "beta": "0.002"}),
        # run_qwen2-7b.sh: only the coefficient that does not count; verl's default is 0.001.
        ([f"{ACTOR}.use_kl_loss=True", NEITHER[1]], {"kl": "loss", "beta": "0.001"}),
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
    meant |= {"tracker_arguments": {"wandb": {"project": "verl_grpo_example_gsm8k"}}}
    pasted, paths = load_config(None, arguments=[f"{key}={value}" for key, value in given.items()])
    assert (pasted, paths) == load_config(meant)
    assert "Hydra deletes a key" in " ".join(text.split())


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("trainer.critic_warmup=0", "leave it out: 0 asks for nothing"),
        ("trainer.critic_warmup=20", "set critic_warmup_steps=20"),
        ("trainer.save_freq=-1", "leave it out: -1 asks for nothing"),
        ("trainer.test_freq=-1", "leave it out: -1 asks for nothing"),
        ("trainer.test_freq=5", "set eval_steps=5"),
        ("trainer.logger=['console','wandb']", "set report_to=[wandb]: the console and metrics.jsonl are always there"),
        ("trainer.logger=['console']", "leave it out: the console and metrics.jsonl are always there"),
        ("trainer.logger=['swanlab']", "set report_to: the console and metrics.jsonl are always there"),
        (f"{ACTOR}.fsdp_config.grad_offload=False", "leave it out: "),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "set loss_type=grpo"),
        ("custom_reward_function.path=my.py", "set reward=my.py:compute_score: on a command line"),
        ("data.truncation=left", "set overlong_prompts=truncate"),
        ("data.truncation=middle", "set overlong_prompts: error, drop or truncate"),
        ("~critic", "leave it out: with ~ Hydra deletes a key"),
    ],
)
def test_values_come_along(argument: str, advice: str) -> None:
    assert refusal(argument).startswith(f"unknown key {argument.partition('=')[0]!r}: {advice}")


def test_a_list_on_the_command_line() -> None:
    assert "write a list as report_to=[console,wandb]" in refusal("report_to=console,wandb")


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
            {"lora.r": "8", "lora_alpha": "32", "target_modules": "all-linear", "modules_to_save": "[a, b]"},
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
