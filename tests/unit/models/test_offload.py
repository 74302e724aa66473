"""Activation offload: the same bits, every activation copied once, no weight copied."""

import pytest
import torch
from torch import nn

from hybrid_rl.models import CausalLM
from hybrid_rl.models.activation_offload import _Offload, activations_on_host
from tests.support.inside.models import fetch_ahead, num_fetched
from tests.unit.models.families import VOCABULARY, build

LENGTHS = [9, 12, 5]
TARGETS = torch.tensor([1, 4, 8, 11, 14, 22])


def gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    token_ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    logprobs, entropy = model.packed_logprobs(token_ids, LENGTHS, TARGETS, 0.7)
    (logprobs * torch.linspace(-1, 1, len(TARGETS)) + 0.1 * entropy).sum().backward()
    return {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, bool]]:
    """Every saved tensor with whether it was copied."""
    seen = []
    pack = _Offload.pack

    def recorded(self: _Offload, tensor: torch.Tensor):
        result = pack(self, tensor)
        seen.append((tensor, not isinstance(result, torch.Tensor)))
        return result

    monkeypatch.setattr(_Offload, "pack", recorded)
    return seen


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("attention", ["sdpa", "auto"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_gradients_are_the_same_bits(name, attention, checkpointing, packed):
    plain = CausalLM(build(name), attention)
    offloaded = CausalLM(build(name), attention, activation_offload=True)
    for parameter in offloaded.module.get_input_embeddings().parameters():
        parameter.requires_grad_(True)
    if checkpointing:
        plain.enable_gradient_checkpointing()
        offloaded.enable_gradient_checkpointing()
    expected, mine = gradients(plain), gradients(offloaded)
    assert expected.keys() == mine.keys()
    assert all(torch.equal(mine[key], expected[key]) for key in expected)
    weights = {p.data_ptr() for p in offloaded.module.parameters()}
    assert sum(copied for _, copied in packed) > (0 if checkpointing else 20)
    assert not any(copied and tensor.data_ptr() in weights for tensor, copied in packed)
    shape = torch.Size([1, sum(LENGTHS), 32])  # what one layer gives to the next
    hidden = [copied for tensor, copied in packed if tensor.shape == shape]
    assert hidden
    assert all(hidden)


def test_frozen_weights_are_not_copied_either(packed):
    module = build("qwen2")
    for layer in module.model.layers:
        layer.mlp.requires_grad_(False)
    gradients(CausalLM(module, "sdpa", activation_offload=True))
    weights = {p.data_ptr() for p in module.parameters()}
    kept = [copied for tensor, copied in packed if tensor.data_ptr() in weights]
    assert kept
    assert not any(kept)


def test_a_tensor_that_two_operations_save_is_copied_once_and_not_taken_for_a_later_one():
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    offload = _Offload()
    x = torch.randn(8, 64, requires_grad=True)
    y = x * 1.0
    assert offload.pack(y) == offload.pack(y)
    copy = y.detach().clone()
    number = offload.pack(y)
    with torch.no_grad():
        y.mul_(2)  # the same memory with other content
    assert offload.pack(y) != number
    assert torch.equal(offload.unpack(number), copy)
    with activations_on_host():
        loss = (first(y) * second(y)).sum()
    del y
    loss.backward()
    assert x.grad is not None


def test_small_tensors_stay():
    offload = _Offload()
    small = torch.zeros(255)
    assert offload.pack(small) is small
    assert offload.pack(torch.zeros(256)) == 0


def test_nothing_is_fetched_ahead_that_was_taken_already():
    offload = _Offload()
    saved = [torch.randn(8, 64) for _ in range(4)]
    numbers = [offload.pack(tensor) for tensor in saved]
    fetch_ahead(offload)  # as on a GPU, where the next few come back ahead of their use
    # An operation takes what it saved in order, the backward pass runs over them in reverse.
    for number in (2, 3, 0, 1):
        assert torch.equal(offload.unpack(numbers[number]), saved[number])
    assert not num_fetched(offload)
