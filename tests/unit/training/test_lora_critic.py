"""A critic below adapters of its own against peft's model of token classification, sample by sample."""

import copy
import dataclasses

import torch

from hybrid_rl.config.lora_keys import LoraKeys, PeftKeys
from hybrid_rl.config.schema import ValueHeadConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.models.lora.inject import inject, is_adapter_name
from hybrid_rl.models.lora.peft_config import peft_config_of
from hybrid_rl.training.critic import Critic
from tests.reference import grpo_case
from tests.unit.training.critic_case import (
    RecordedGradients,
    config_of,
    critic_batch,
    plain_loss,
    plain_values,
    policy_with_head,
)
from tests.unit.training.lora_case import give_values, gradients

KEYS = LoraKeys(r=4, lora_alpha=6, peft=PeftKeys(modules_to_save=["lm_head", "model.norm"]), lora_critic=True)
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def critic_of(module: torch.nn.Module, keys: LoraKeys) -> Critic:
    config = dataclasses.replace(config_of(), lora=keys)
    here = RankContext(device=torch.device("cpu"))
    options = ValueHeadConfig(critic_learning_rate=1e-3)
    return Critic(module, config, here, num_optimizer_steps=100, options=options)  # type: ignore[arg-type]


def test_gradients_are_those_of_peft() -> None:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="TOKEN_CLS", r=4, lora_alpha=6, target_modules=LAYERS, modules_to_save=["score", "model.norm"]
    )
    expected = get_peft_model(policy_with_head(torch.float64), settings, autocast_adapter_dtype=False)
    give_values(expected)
    batch = critic_batch()
    loss, _, _ = plain_loss(plain_values(expected), batch, 0.2)  # type: ignore[arg-type]
    loss.backward()  # type: ignore[no-untyped-call]

    critic = critic_of(policy_with_head(torch.float64), KEYS)
    give_values(critic.model.module)
    recorded = RecordedGradients(critic)
    before = copy.deepcopy(dict(critic.model.module.named_parameters()))
    critic.update(batch, [[[0, 1, 2, 9], list(range(3, 9)), list(range(10, 16))]])
    (found,) = recorded.by_step
    theirs = gradients(expected)
    assert found.keys() == theirs.keys()
    assert {"score.modules_to_save.default.weight", "model.norm.modules_to_save.default.weight"} < found.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-6 * scale, name
    for name, parameter in critic.model.module.named_parameters():
        assert torch.equal(parameter, before[name]) is not is_adapter_name(name), name


def test_a_policy_with_adapters_makes_a_critic_of_its_base() -> None:
    """By default all of a critic is trained; with adapters of its own it starts at zero too, and the policy stays."""
    policy = grpo_case.build_model()
    base = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    inject(policy, peft_config_of({**vars(KEYS), "modules_to_save": ["model.norm"]}))
    give_values(policy)
    mine = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    whole = critic_of(policy, dataclasses.replace(KEYS, lora_critic=False)).model.module
    assert all(parameter.requires_grad for parameter in whole.parameters())
    assert all(torch.equal(tensor, base[name]) for name, tensor in whole.state_dict().items() if name in base)
    adapted = critic_of(policy, KEYS)
    values = adapted.values(critic_batch(), [[list(range(16))]]).values
    assert torch.equal(values, torch.zeros_like(values))
    trained = {name for name, parameter in adapted.model.module.named_parameters() if parameter.requires_grad}
    assert trained and all(map(is_adapter_name, trained))
    assert all(torch.equal(tensor, mine[name]) for name, tensor in policy.state_dict().items())
