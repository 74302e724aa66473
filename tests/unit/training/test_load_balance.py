"""The load-balancing loss against transformers' own on a padded batch, and its invariances."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.batch import Batch
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.load_balance import LoadBalance
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.mini_batch import look_ahead
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels
from tests.reference import grpo_case
from tests.support.plans import make_plan
from tests.support.tiny import VOCABULARY
from tests.unit.models.families import BASE
from tests.unit.training.grpo_step import case_batch, case_config, rolled_batch, with_advantages

COEF = 0.7
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 8},
    "Mixtral": {},
    "GraniteMoe": {},
    "Olmoe": {},
}
ALL = [list(range(16))]
CUTS = {"two": [[*range(0, 16, 2)], [*range(1, 16, 2)]], "groups cut": [[0, 5], [1, 2, 3], [*range(6, 16)], [4]]}


def moe(family: str = "Mixtral", **settings: Any) -> PreTrainedModel:
    config_class = getattr(transformers, f"{family}Config")
    vocabulary = {"vocab_size": grpo_case.VOCAB_SIZE}
    config = config_class(**{**BASE, **vocabulary, **EXPERTS, **FAMILIES.get(family, {}), **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
    return module.eval()


def padded_aux_loss(module: PreTrainedModel, batch: Batch) -> Tensor:
    """What TRL adds for one micro-batch: the model's own loss of the padded sequences and their mask."""
    sequences = [torch.cat(pair) for pair in zip(batch["prompt_ids"], batch["completion_ids"], strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    found: Tensor = module(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    return found


def flat_gradient(module: PreTrainedModel) -> Tensor:
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def step(
    model: CausalLM, batch: Batch, coef: float, micro_batches: list[list[int]] = ALL, **keys: Any
) -> tuple[float, Tensor, float]:
    """Loss, gradient and the metric aux_loss of a mini-batch."""
    spec = LossSpec.of(case_config(loss_type="dapo", **keys))
    balance = LoadBalance.of(model, coef)
    mini = MiniBatch.of(batch, spec)
    if balance is not None and len(micro_batches) > 1:
        mini = look_ahead(model, batch, micro_batches, spec, mini, balance, RankContext())
    beside, sums, total = SideModels(balance=balance), MetricSums(), 0.0
    model.module.zero_grad()
    for rows in micro_batches:
        loss, stats, _ = micro_batch_loss(model, micro_batch(batch, rows, model.idle_token), spec, mini, beside)
        loss.backward()
        sums.merge(stats)
        total += float(loss.detach())
    return total, flat_gradient(model.module), sums.parts("aux_loss")[0]


def share_of(model: CausalLM, batch: Batch, micro_batches: list[list[int]] = ALL, **keys: Any) -> tuple[float, Tensor]:
    """What the load-balancing loss adds to loss and gradient."""
    without, plain, none = step(model, batch, 0.0, micro_batches, **keys)
    loss, gradient, aux_loss = step(model, batch, COEF, micro_batches, **keys)
    assert none == 0.0
    assert loss - without == pytest.approx(COEF * aux_loss, abs=1e-6)
    return aux_loss, gradient - plain


@pytest.mark.parametrize("family", FAMILIES)
def test_one_micro_batch_has_the_number_and_gradient_of_transformers(family: str) -> None:
    batch, model = with_advantages(case_batch()), CausalLM(moe(family))
    aux_loss, gradient = share_of(model, batch)
    with torch.no_grad():
        assert aux_loss == pytest.approx(float(padded_aux_loss(model.module, batch)), rel=1e-6)
    # The difference of two gradients, each a float32 sum of some hundred terms in an order of its own.
    tolerance = 64 * torch.finfo(torch.float32).eps * float(step(model, batch, 0.0)[1].abs().max())
    model.module.zero_grad()
    (COEF * padded_aux_loss(model.module, batch)).backward()
    torch.testing.assert_close(gradient, flat_gradient(model.module), rtol=0, atol=tolerance)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("cut", CUTS)
def test_micro_batches_and_idle_ones_change_nothing(cut: str) -> None:
    batch, model = with_advantages(case_batch()), CausalLM(moe())
    aux_loss, gradient = share_of(model, batch)
    again, parts = share_of(model, batch, [[], *CUTS[cut], []])
    assert again == pytest.approx(aux_loss, rel=1e-6)
    torch.testing.assert_close(parts, gradient, rtol=0, atol=2e-6)
    # Each on its own they have other shares, so another loss: what a definition by micro-batches would give.
    alone = [share_of(model, batch.select(torch.tensor(rows)), [[*range(len(rows))]])[0] for rows in CUTS[cut]]
    assert abs(sum(alone) / len(alone) - aux_loss) > 1e-4


def test_what_fills_a_row_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = with_advantages(case_batch()), CausalLM(moe())
    aux_loss, gradient = share_of(model, batch)
    monkeypatch.setattr("hybrid_rl.models.row.SMALLEST_FILLED_ROW", 64)
    again, filled = share_of(model, batch)
    assert again == pytest.approx(aux_loss, rel=1e-6)
    torch.testing.assert_close(filled, gradient, rtol=0, atol=2e-6)


def test_failed_samples_and_masked_completions_do_not_count() -> None:
    """Those that any limit cut off. Tokens of the environment count, as those of the prompt do."""
    model = CausalLM(moe())
    rewards = [*grpo_case.REWARDS]
    rewards[3] = rewards[9] = float("nan")
    batch = with_advantages(case_batch(rewards=rewards))
    kept = torch.tensor([index for index in range(16) if index not in (3, 9)])
    expected = float(padded_aux_loss(model.module, batch.select(kept)).detach())
    assert share_of(model, batch)[0] == pytest.approx(expected, rel=1e-6)
    whole = with_advantages(case_batch())
    truncated = [reason == "length" for reason in whole["finish_reason"]]
    limits = itertools.cycle(("length", "turns", "time"))
    reasons = [next(limits) if is_cut else "stop" for is_cut in truncated]
    holes = whole["completion_ids"].with_values(torch.arange(len(whole["completion_ids"].values)) % 3 != 1)
    whole = whole.without("finish_reason", "completion_mask").with_columns(finish_reason=reasons, completion_mask=holes)
    assert set(reasons) == {"length", "turns", "time", "stop"}
    routers = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    sequences = [torch.cat(pair) for pair in zip(whole["prompt_ids"], whole["completion_ids"], strict=True)]
    mask = [
        torch.cat([torch.ones(len(prompt)), torch.full((len(own),), float(not cut))])
        for prompt, own, cut in zip(whole["prompt_ids"], whole["completion_ids"], truncated, strict=True)
    ]
    logits = [
        module_output.router_logits
        for module_output in (model.module(input_ids=ids[None], output_router_logits=True) for ids in sequences)
    ]
    layers = tuple(torch.cat(parts) for parts in zip(*logits, strict=True))
    expected = float(routers(layers, 6, 2, torch.cat(mask)[None]).detach())
    found, _ = share_of(model, whole, mask_truncated_completions=True)
    assert found == pytest.approx(expected, rel=1e-6)


def test_recomputed_blocks_change_nothing() -> None:
    batch, model = with_advantages(case_batch()), CausalLM(moe("Qwen3Moe"))
    aux_loss, gradient = share_of(model, batch, CUTS["two"])
    model.enable_gradient_checkpointing()
    again, recomputed = share_of(model, batch, CUTS["two"])
    assert again == aux_loss
    torch.testing.assert_close(recomputed, gradient, rtol=0, atol=1e-7)


def test_bfloat16() -> None:
    batch, module = with_advantages(case_batch()), moe()
    expected = float(padded_aux_loss(module, batch).detach())
    assert share_of(CausalLM(module.bfloat16()), batch)[0] == pytest.approx(expected, rel=0.05)


def test_without_a_key_the_weight_is_the_models_own() -> None:
    model = CausalLM(moe(router_aux_loss_coef=5.0))
    balance = LoadBalance.of(model, None)
    assert balance is not None and balance.coef == 5.0
    assert LoadBalance.of(model, 0.0) is None
    assert LoadBalance.of(CausalLM(moe(router_aux_loss_coef=0.0)), None) is None


DEEPSEEK = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1}
DEEPSEEK |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Qwen3", {"head_dim": 8}), ("DeepseekV3", DEEPSEEK), ("Qwen3Moe", {"mlp_only_layers": [0, 1, 2]})],
)
def test_models_without_such_a_loss_take_no_weight_for_it(family: str, settings: dict[str, Any]) -> None:
    model = CausalLM(moe(family, **settings))
    assert LoadBalance.of(model, None) is None and LoadBalance.of(model, 0.0) is None
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.1, but \w+ForCausalLM has no load-balancing loss"):
        LoadBalance.of(model, 0.1)


def test_routers_that_cannot_be_read_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLM(moe())
    monkeypatch.setattr(model, "row_logprobs", lambda *_: None)
    with pytest.raises(ModelError, match=r"0 of 2 ran as modules.*set router_aux_loss_coef=0, or torch_compile=false"):
        LoadBalance.of(model, None)


@pytest.mark.parametrize(("share", "coef", "passes"), [(1.0, 0.0, 0), (0.3, 0.0, 1), (1.0, COEF, 1), (0.3, COEF, 1)])
def test_what_is_known_of_the_mini_batch_beforehand_takes_one_forward_pass(
    share: float, coef: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of it is wanted; a mini-batch of one micro-batch knows it anyway."""
    keys: dict[str, Any] = {"loss_type": "dapo", "top_entropy_quantile": share, "router_aux_loss_coef": coef}
    model, batch = CausalLM(moe()), with_advantages(case_batch())
    completions = batch["completion_ids"]
    batch = batch.with_columns(
        rollout_logprobs=completions.with_values(torch.full((len(completions.values),), -3.0)),
        policy_version=completions.with_values(torch.zeros_like(completions.values)),
    )
    actor = Actor(model, case_config(**keys), RankContext(), num_optimizer_steps=8)
    calls, forward = [], model.hidden_states

    def counted(token_ids: Tensor, *arguments: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return forward(token_ids, *arguments)

    monkeypatch.setattr(model, "hidden_states", counted)
    actor.update(batch, [CUTS["groups cut"]], version=0)
    assert calls == [False] * 4 * passes + [True] * 4
    calls.clear()
    actor.update(batch, [ALL], version=1)
    assert calls == [True]


def test_a_trainer_adds_it_and_tells_of_it(make_trainer: Any) -> None:
    """The same loss as of one micro-batch with a cap that makes many; and none with the weight 0."""
    cap = 24
    module = moe(router_aux_loss_coef=5.0, vocab_size=len(VOCABULARY))
    trainer = make_trainer(module, tokens_per_micro_batch=cap, max_steps=1)
    batch, metrics = trainer.step()
    fresh = moe(router_aux_loss_coef=5.0, vocab_size=len(VOCABULARY))
    assert metrics["aux_loss"] == pytest.approx(float(padded_aux_loss(fresh, batch).detach()), rel=1e-5)
    plain = make_trainer(
        moe(vocab_size=len(VOCABULARY)), router_aux_loss_coef=0.0, max_steps=1, tokens_per_micro_batch=cap
    )
    _, others = plain.step()
    assert "aux_loss" not in others
    assert metrics["loss"] - others["loss"] == pytest.approx(5.0 * metrics["aux_loss"], rel=1e-5)
    assert metrics["grad_norm"] > 1.1 * others["grad_norm"]


def test_experts_are_balanced_by_every_sample() -> None:
    """The balance that a model brings along is in the loss without any key: groups that are alike have its gradient."""
    passes: list[bool] = []
    module = moe()
    actor = Actor(CausalLM(module), case_config(), RankContext(), num_optimizer_steps=4)
    module.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    batch = rolled_batch((1.0,) * 8 + (0.0, 1.0) * 4)
    plan = make_plan(batch, tokens_per_micro_batch=1000, splits_alike=True)
    actor.update(batch, plan, 0)
    assert len(plan[0]) == 2 and passes[-2:] == [True, True]
