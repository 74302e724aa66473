"""RSPO on tiny mixtures of experts: columns, shifts and losses of real training steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybrid_rl.algos.policy_losses import GMPO, RSPO
from hybrid_rl.batch import Batch
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.router import Routers
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels
from tests.reference import grpo_case
from tests.support.tiny import VOCABULARY
from tests.unit.training import conftest
from tests.unit.training.grpo_step import case_batch, case_config, plan_of, with_advantages

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 5, 3
CUTS = {1: [list(range(16))], 2: [[*range(0, 16, 2)], [*range(1, 16, 2)]], 4: [[*range(i, 16, 4)] for i in range(4)]}


def moe(vocab_size: int = grpo_case.VOCAB_SIZE) -> Any:
    torch.manual_seed(0)
    module = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            num_hidden_layers=3,
            mlp_only_layers=[1],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return module


def config_of(**keys: Any) -> TrainerConfig:
    return case_config(policy_loss="rspo", loss_type="grpo", **{"learning_rate": 3e-2, "old_logprobs": "auto"} | keys)


def rollout() -> Batch:
    """The recorded samples, as an engine leaves them."""
    batch = with_advantages(case_batch())
    completions = batch["completion_ids"]
    return batch.with_columns(
        rollout_logprobs=completions.with_values(torch.full((len(completions.values),), -3.0)),
        policy_version=completions.with_values(torch.zeros_like(completions.values)),
    )


def actor_of(config: TrainerConfig, module: Any = None) -> Actor:
    return Actor(CausalLM(module or moe()), config, RankContext(), num_optimizer_steps=8)


def plain_scores(module: Any, batch: Batch) -> Tensor:
    """ln of the router's softmax at the place before every completion token, [T, L, E], sample by sample."""
    found = []
    for prompt, completion in zip(batch["prompt_ids"], batch["completion_ids"], strict=True):
        ids = torch.cat([prompt, completion])[None]
        with torch.no_grad():
            layers = module.base_model(input_ids=ids, output_router_logits=True).router_logits
        scores = torch.stack([layer.reshape(-1, NUM_EXPERTS).log_softmax(-1) for layer in layers], dim=1)
        found.append(scores[len(prompt) - 1 : -1])
    return torch.cat(found)


def loss_and_gradient(
    model: CausalLM, batch: Batch, config: TrainerConfig, micro_batches: list[list[int]]
) -> tuple[float, Tensor, dict[str, float]]:
    spec, sums, total = LossSpec.of(config), MetricSums(), 0.0
    mini, beside = MiniBatch.of(batch, spec), SideModels(routers=Routers(model) if spec.reads_routers else None)
    model.module.zero_grad()
    for rows in micro_batches:
        loss, stats, _ = micro_batch_loss(model, micro_batch(batch, rows), spec, mini, beside)
        loss.backward()
        total += loss.item()
        sums.merge(stats)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.module.parameters()])
    return total, gradient, dict(sums.result())


def moved(batch: Batch, config: TrainerConfig) -> tuple[CausalLM, Batch]:
    """A model some way from the one that scored the batch."""
    actor = actor_of(config)
    batch = batch.with_columns(**actor.columns(batch, plan_of(batch, 60)))
    with torch.no_grad():
        for index, parameter in enumerate(actor.model.module.parameters()):
            parameter += 0.04 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    return actor.model, batch


def test_columns_are_those_of_each_sample_alone() -> None:
    actor, batch = actor_of(config_of()), rollout()
    columns = actor.columns(batch, plan_of(batch, 40))
    scores = plain_scores(actor.model.module, batch)
    assert set(columns) == {"old_logprobs", "old_router_ids", "old_router_logprobs"}
    ids = columns["old_router_ids"].values.view(-1, NUM_LAYERS, TOP_K)
    found = columns["old_router_logprobs"].values.view(-1, NUM_LAYERS, TOP_K)
    assert columns["old_router_logprobs"].values.dtype == torch.float32
    for token in range(len(scores)):
        for layer in range(NUM_LAYERS):
            order = sorted(range(NUM_EXPERTS), key=lambda expert: -scores[token, layer, expert].item())
            assert ids[token, layer].tolist() == order[:TOP_K]
            expected = [scores[token, layer, expert].item() for expert in order[:TOP_K]]
            assert found[token, layer].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_shift_is_one_until_the_weights_move(checkpointing: bool) -> None:
    """The first update of a step is GMPO's, bit for bit; in the second one every token has the shift written out."""
    config = config_of(gradient_checkpointing=checkpointing, loss_options={"router_shift_floor": 0.5})
    actor, batch = actor_of(config), rollout()
    plan = plan_of(batch, 40)
    assert len(plan[0]) > 2
    batch = batch.with_columns(**actor.columns(batch, plan))
    before = plain_scores(actor.model.module, batch)
    first = actor.update(batch, plan, 0).result()
    assert first["router_shift/mean"] == first["ratio/min"] == first["ratio/max"] == 1.0

    gmpo = actor_of(dataclasses.replace(config, policy_loss=GMPO()))
    plain = batch.without("old_router_ids").without("old_router_logprobs")
    assert gmpo.update(plain, plan, 0).result()["grad_norm"] == first["grad_norm"]
    for mine, theirs in zip(actor.model.module.parameters(), gmpo.model.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    after = plain_scores(actor.model.module, batch)
    second = actor.update(batch, plan, 0).result()
    shifts = []
    for then, now in zip(before.tolist(), after.tolist(), strict=True):
        gaps = []
        for old, new in zip(then, now, strict=True):
            best = sorted(range(NUM_EXPERTS), key=lambda expert: -old[expert])[:TOP_K]
            gaps += [abs(new[expert] - old[expert]) for expert in best]
        shifts.append(max(0.5, math.exp(-sum(gaps) / len(gaps))))
    assert min(shifts) == 0.5 and len(set(shifts)) > 20 and max(shifts) < 1
    assert second["router_shift/mean"] == pytest.approx(sum(shifts) / len(shifts), abs=1e-5)


def test_cuts_change_nothing() -> None:
    config = config_of(loss_options={"router_shift_floor": 0.5})
    model, batch = moved(rollout(), config)
    expected, slopes, metrics = loss_and_gradient(model, batch, config, CUTS[1])
    assert 0.5 < metrics["router_shift/mean"] < 0.95 and slopes.abs().max() > 1e-3
    for cut in (CUTS[2], CUTS[4], [[], *CUTS[4], []], plan_of(batch, 40)[0]):
        loss, gradient, other = loss_and_gradient(model, batch, config, cut)
        assert abs(loss - expected) < 1e-6
        torch.testing.assert_close(gradient, slopes, rtol=0, atol=1e-6)
        assert other == pytest.approx(metrics, abs=1e-5)


def test_the_shift_counts_and_has_no_gradient() -> None:
    """The gradient is that of GMPO whose old policy was less likely by the shift: a constant of every token."""
    config = config_of(loss_options={"router_shift_floor": 0.3})
    model, batch = moved(rollout(), config)
    loss, gradient, _ = loss_and_gradient(model, batch, config, CUTS[1])
    ids = batch["old_router_ids"].values.view(-1, NUM_LAYERS, TOP_K)
    now = plain_scores(model.module, batch).gather(-1, ids)
    gap = (now - batch["old_router_logprobs"].values.view_as(now)).abs().mean((1, 2))
    old = batch["old_logprobs"]
    shifted = batch.without("old_logprobs").with_columns(
        old_logprobs=old.with_values(old.values - gap.neg().clamp(min=math.log(0.3)))
    )
    gmpo = dataclasses.replace(config, policy_loss=GMPO())
    theirs, slopes, _ = loss_and_gradient(model, shifted, gmpo, CUTS[1])
    assert loss == pytest.approx(theirs, abs=1e-6)
    torch.testing.assert_close(gradient, slopes, rtol=0, atol=1e-5)
    plain, without, _ = loss_and_gradient(model, batch, gmpo, CUTS[1])
    assert abs(plain - theirs) > 1e-3 and (without - slopes).abs().max() > 1e-3


def test_the_engine_may_be_the_old_policy() -> None:
    """old_logprobs=rollout: ratios start from the engine, shifts from the trainer's routers."""
    actor, batch = actor_of(config_of(old_logprobs="rollout")), rollout()
    columns = actor.columns(batch, plan_of(batch, 60))
    assert torch.equal(columns["old_logprobs"].values, batch["rollout_logprobs"].values)
    assert columns["old_router_ids"].values.shape[1] == NUM_LAYERS * TOP_K


def test_a_worker_trains_with_it(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "build_model", lambda dtype: moe(len(VOCABULARY)).to(dtype))
    bench = make_bench(algorithm="grpo", policy_loss="rspo", num_iterations=2, tokens_per_micro_batch=40)
    first, second = bench.train(1), bench.train(2)
    assert 0.8 <= first["router_shift/mean"] < 1 and 0.8 <= second["router_shift/mean"] < 1


def test_what_cannot_work_is_refused_at_the_start() -> None:
    assert config_of().policy_loss == RSPO(epsilon=0.4, epsilon_high=None, router_shift_floor=0.8)
    assert config_of().algorithm.old_logprobs == "recompute"
    with pytest.raises(ConfigError, match="old_logprobs=detach computes no logprobs .* policy_loss=rspo needs"):
        config_of(old_logprobs="detach")
    with pytest.raises(ConfigError, match="compiled blocks hide; set torch_compile=false"):
        config_of(torch_compile=True)
    with pytest.raises(ModelError, match="Qwen2ForCausalLM has no routers"):
        actor_of(config_of(), grpo_case.build_model(torch.float32))
