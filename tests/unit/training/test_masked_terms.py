"""Terms of the loss at tokens that are not in it: a tool's answer may hold tokens that the policy can never sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.models import CausalLM
from hybrid_rl.training import critic
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels, loss_mask
from tests.reference.grpo_case import build_model
from tests.unit.training.critic_case import critic_batch
from tests.unit.training.grpo_step import case_batch, case_config, with_advantages

BANNED = 11

TERMS: dict[str, dict[str, Any]] = {
    **{name: {"kl_estimator": name, "use_bias_correction_kl": False} for name in ("k2", "k3", "abs", "exact")},
    "k3, weighted": {"kl_estimator": "k3"},
    "abs, weighted": {"kl_estimator": "abs"},
    "entropy": {"entropy_coef": 0.1},
    "nll": {"positive_nll_coef": 0.1},
    "nothing more": {},
}


def model() -> CausalLM:
    """It gives one token the logit -inf."""
    module = build_model(torch.float32)
    module.lm_head.bias = torch.nn.Parameter(torch.zeros(module.config.vocab_size))
    with torch.no_grad():
        module.lm_head.bias[BANNED] = -math.inf
    module.lm_head.bias.requires_grad_(False)
    return CausalLM(module)


def batch_with_answers() -> Batch:
    """Where the samples have the token that is banned, it is a tool's; the reference excludes it as well."""
    batch = with_advantages(case_batch())
    completions = batch["completion_ids"]
    mask = completions.values != BANNED
    assert 3 < int((~mask).sum()) < len(mask) / 2
    reference = torch.where(mask, -2.0, -math.inf)
    columns = {"completion_mask": mask, "ref_logprobs": reference, "rollout_logprobs": torch.full_like(reference, -2.0)}
    return batch.without("completion_mask").with_columns(
        **{name: completions.with_values(column) for name, column in columns.items()}
    )


@pytest.mark.parametrize("name", TERMS)
def test_no_term_makes_a_gradient_of_what_is_not_in_the_loss(name: str) -> None:
    keys = TERMS[name]
    config = case_config(**keys, **({"beta": 0.1} if "kl_estimator" in keys else {}))
    batch, policy = batch_with_answers(), model()
    spec = LossSpec.of(config)
    mini = MiniBatch.of(batch, spec)
    loss, sums, logprobs = micro_batch_loss(policy, batch, spec, mini, SideModels(model()))
    loss.backward()
    assert bool(logprobs.isneginf().any()) and bool(loss.isfinite())
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in parameters)
    assert any(bool(p.grad.any()) for p in parameters if p.grad is not None)
    assert all(math.isfinite(value) for value in sums.result().values())


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_values_at_tokens_without_a_target_reach_no_gradient(wild: float, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = critic_batch()
    mask = torch.arange(len(batch["values"].values)) % 3 != 0
    values = torch.linspace(-1, 1, len(mask))

    def gradient(made: torch.Tensor) -> torch.Tensor:
        leaf = made.clone().requires_grad_()
        monkeypatch.setattr(critic, "micro_batch_values", lambda *_: leaf)
        loss, _ = critic.micro_batch_value_loss(None, batch, mask, 0.2, int(mask.sum()))  # type: ignore[arg-type]
        loss.backward()
        assert leaf.grad is not None and bool(loss.isfinite())
        return leaf.grad

    assert torch.equal(gradient(torch.where(mask, values, wild)), gradient(values))


# ------------------------------------------------------------------------------------------------- truncation

ENDS = ("stop", "length", "turns", "time", "error", "abort")


@pytest.mark.parametrize("is_on", [False, True])
def test_every_limit_masks_and_no_other_end_does(is_on: bool) -> None:
    """Three tokens each, of which the second is the environment's. What failed has no reward."""
    completions = Jagged.from_rows([[5, 6, 7]] * len(ENDS), torch.int64)
    batch = Batch(
        {
            "completion_ids": completions,
            "completion_mask": completions.with_values(completions.values != 6),
            "finish_reason": list(ENDS),
            "rewards": torch.tensor([math.nan if end == "error" else 1.0 for end in ENDS], dtype=torch.float64),
        }
    )
    kept = completions.with_values(loss_mask(batch, mask_truncated_completions=is_on))
    left_out = {"error", *(("length", "turns", "time") if is_on else ())}
    assert {end: row.tolist() for end, row in zip(ENDS, kept, strict=True)} == {
        end: [end not in left_out, False, end not in left_out] for end in ENDS
    }
