"""The start-up check in bfloat16: rounding that a model carries from block to block is no fault, and hides none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.routing import HeldRouting
from hybrid_rl.models.packed.held_blocks import HeldBlocks, as_hidden, by_token
from hybrid_rl.models.packed.startup_check import (
    BLOCK_TOLERANCE,
    VERIFY_LAYOUT,
    VERIFY_TOLERANCE,
    _output_gaps,
    verify_row,
    whole_sequences,
)
from hybrid_rl.models.row import Layout
from tests.unit.models.families import EXPERTS, build
from tests.unit.models.test_verify import of_kind

BF16 = torch.bfloat16
PACKED = VERIFY_LAYOUT.num_tokens


def chaotic(kind: str = "Llama", dtype: torch.dtype = BF16) -> PreTrainedModel:
    """Large weights and many blocks, so that one rounding decides what the last ones give."""
    settings: dict[str, Any] = dict(EXPERTS, num_key_value_heads=4) if kind == "Mixtral" else {}
    module = of_kind(kind, num_hidden_layers=20 if kind == "Mixtral" else 12, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return module.to(dtype)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mixtral"])
def test_a_model_that_rounding_moves_further_than_the_tolerance_is_no_fault(kind: str) -> None:
    model = CausalLM(chaotic(kind))
    direct = _output_gaps(model, verify_row(model), HeldRouting(model.module), None)
    assert max(direct.values()) > VERIFY_TOLERANCE[BF16]
    assert model.verify() < BLOCK_TOLERANCE
    assert kind == "Mixtral" or CausalLM(chaotic(kind, torch.float64)).verify() < 1e-5  # grouped products: not in fp64


def when_packed(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward hook that changes what a module gives for the packed row, and for no sequence alone."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.shape[-2] != PACKED:
            return None
        return (change(hidden), *output[1:]) if isinstance(output, tuple) else change(hidden)

    return hook


def at_one_place(hidden: Tensor) -> Tensor:
    changed = hidden.clone()
    changed[..., 5, :] *= 1.5
    return changed


HOOKED = {
    "attention of one layer": ("model.layers.7.self_attn", lambda hidden: hidden * 1.5),
    "attention of one layer at one place": ("model.layers.7.self_attn", at_one_place),
    "MLP of one layer": ("model.layers.9.mlp", lambda hidden: hidden * 1.5),
    "MLP of the last layer": ("model.layers.11.mlp", lambda hidden: hidden * -1),
    "embeddings": ("model.embed_tokens", lambda hidden: hidden * 1.5),
    "last norm": ("model.norm", lambda hidden: hidden * 1.5),
    "not a number": ("model.layers.3.mlp", lambda hidden: hidden * float("nan")),
}


@pytest.mark.parametrize("what", HOOKED)
def test_what_one_module_computes_otherwise_when_packed_is_found(what: str) -> None:
    path, change = HOOKED[what]
    module = chaotic()
    module.get_submodule(path).register_forward_hook(when_packed(change))
    with pytest.raises(
        ModelError, match="LlamaForCausalLM gives other (logits|outputs of blocks) with packed sequences"
    ):
        CausalLM(module).verify()


ROWS: dict[str, Callable[[Tensor, Any], tuple[Tensor, Any]]] = {
    "samples that see each other": lambda positions, layout: (positions, Layout((sum(layout.lengths),))),
    "positions that go on": lambda positions, layout: (torch.arange(len(positions)), layout),
    "a position too far": lambda positions, layout: (positions + (torch.arange(len(positions)) > 13), layout),
    "children without their prompt": lambda positions, layout: (positions, Layout(layout.lengths[1:], prefix=1)),
    "sequences without their prefix": lambda positions, layout: (positions, Layout(layout.lengths)),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("what", ROWS)
def test_wrong_masks_and_positions_are_found(what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLM(chaotic(dtype=dtype))
    right = CausalLM.hidden_states

    def wrong(self: Any, token_ids: Tensor, positions: Tensor, _: Any) -> Tensor:
        positions, layout = ROWS[what](positions, VERIFY_LAYOUT)
        return right(self, token_ids, positions, self.attention.context(layout, self.device))

    monkeypatch.setattr(CausalLM, "hidden_states", wrong)
    with pytest.raises(ModelError, match="gives other (logits|outputs of blocks) with packed sequences"):
        model.verify()


def test_a_block_is_measured_against_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of attention in the hundreds, as of models with large biases of keys: eager attention in bfloat16 rounds
    them to a half, before its softmax; packed attention does not."""
    module = chaotic("Qwen2")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 16)
    model = CausalLM(module)
    assert model.verify() < BLOCK_TOLERANCE
    monkeypatch.setattr(HeldBlocks, "_noise", lambda self, number: torch.zeros(len(self._entered[0])))
    with pytest.raises(ModelError, match="gives other outputs of blocks"):
        model.verify()


def test_hidden_states_of_several_streams_are_laid_out_by_token() -> None:
    hidden = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)  # streams, sequences, tokens, features
    tokens = by_token(hidden)
    assert tokens.shape == (12, 2, 5) and torch.equal(tokens[7], hidden[:, 1, 3])
    assert torch.equal(as_hidden(tokens, hidden), hidden)
    assert torch.equal(as_hidden(by_token(hidden[0]), hidden[0]), hidden[0])


def test_sequences_begin_as_the_prompt_of_the_run_does_and_go_on_differently() -> None:
    model = CausalLM(build("qwen2"))
    row = verify_row(model, range(30, 50))
    sequences = whole_sequences(row)
    assert [sequence[:2] for sequence in sequences] == [[30, 31]] * 3
    assert [{*sequence[2:]} for sequence in sequences] == [{*range(33, 40)}, {32, *range(40, 45)}, {32, 45, 46}]
    plain = verify_row(model).token_ids.tolist()
    assert verify_row(model, [40]).token_ids.tolist() == [40, *plain[1:11], *[40] * 2, *plain[13:]]
    assert model.verify(range(30, 50)) < 2e-6
