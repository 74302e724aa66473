"""Tokens that are not read (the filler of a row, a micro-batch without samples) leave every gradient a number."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from hybrid_rl.batch import Jagged
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.spec import Counts, LossSpec
from tests.support.tiny import build_model
from tests.unit.models.families import BASE
from tests.unit.training.grpo_step import case_batch, case_config, terms_of, with_advantages


def gemma3n() -> Gemma3nForCausalLM:
    """Takes the mean square of embeddings to the power of a half: its slope is infinite at a row of zeros, and the
    row of the padding token, 0, is one."""
    config = Gemma3nTextConfig(
        **(BASE | {"intermediate_size": [48, 48], "max_position_embeddings": 2048}),
        head_dim=8,
        layer_types=["full_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=BASE["vocab_size"],
        laurel_rank=4,
        activation_sparsity_pattern=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Gemma3nForCausalLM(config)
    assert not module.get_input_embeddings().weight[0].any()
    return module


def finite(module: torch.nn.Module) -> bool:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return len(gradients) > 10 and all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_what_fills_a_row_up() -> None:
    model = CausalLM(gemma3n())
    prompts, completions = (Jagged.from_rows([rows], torch.int64) for rows in ([5, 6], [7] * 1100))
    row = PackedRow.of(prompts, completions, model.device)
    assert row.layout.num_tokens == 1152
    model.row_logprobs(row, 1.0)[0].sum().backward()
    assert finite(model.module)


def test_a_micro_batch_without_samples() -> None:
    model = CausalLM(gemma3n())
    config = case_config(loss_type="dapo", beta=0.0)
    batch = with_advantages(case_batch())
    micro = micro_batch(batch, [], idle_token=model.idle_token)
    loss, _, _ = micro_batch_loss(model, micro, *terms_of(config, Counts.of(batch, LossSpec.of(config))))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert finite(model.module)
    assert not any(bool(parameter.grad.any()) for parameter in model.module.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(("padding", "idle"), [(0, 1), (1, 0), (None, 0)])
def test_the_token_of_idle_ranks_is_not_the_one_of_padding(padding: int | None, idle: int) -> None:
    assert CausalLM(build_model(pad_token_id=padding)).idle_token == idle
