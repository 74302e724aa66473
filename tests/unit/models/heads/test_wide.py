"""Products that stay float32 between bfloat16 matrices, and the head that uses them (cast_lm_head_to_fp32)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.models import CausalLM
from hybrid_rl.models.heads import wide
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import chunked_logprobs
from hybrid_rl.models.heads.wide import halves, wide_product, wide_weight_gradient
from tests.support.inside.models import product_in_parts
from tests.unit.models.families import build
from tests.unit.models.heads.test_logprobs import of_distribution, reference

TARGETS = torch.arange(5, 16)


def matrices(seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """left [5, 7], right [11, 7] and bias [11] in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((5, 7), (11, 7), (11,))
    left, right, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return left, right, bias


@pytest.mark.parametrize("elements", [1, 20, 1 << 20])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_float64(
    elements: int, is_transposed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide, "BLOCK_ELEMENTS", elements)
    left, right, bias = matrices()
    if is_transposed:
        right = right.t().contiguous().t()
    left = left if dtype == torch.bfloat16 else left + torch.rand(5, 7)
    found = wide_product(left, right, bias)
    assert found.dtype == torch.float32
    expected = left.double() @ right.double().t() + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    gradient = wide_weight_gradient(found, left)  # as of [V, H]
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), found.double().t() @ left.double(), rtol=1e-6, atol=1e-5)


def test_a_sum_that_bfloat16_cannot_hold() -> None:
    """256 + 1 is 257, which takes nine bits."""
    left, right = torch.tensor([[16.0, 1.0]]).bfloat16(), torch.tensor([[16.0, 1.0]]).bfloat16()
    assert wide_product(left, right).item() == 257
    assert torch.nn.functional.linear(left, right).item() == 256


def test_two_halves_are_good_to_sixteen_bits() -> None:
    """1 + 2^-9 + 2^-17: the first half is 1, the second holds the rest, except its last bit."""
    values = torch.tensor([1 + 2.0**-9 + 2.0**-17])
    high, low = halves(values, torch.bfloat16)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (high.item(), low.item()) == (1.0, 2.0**-9)
    many = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    high, low = halves(many, torch.bfloat16)
    assert float(((high.double() + low.double() - many) / many).abs().max()) < 2**-17


def test_on_a_gpu_the_tensor_cores_sum_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of `torch.mm`, whose out_dtype exists on CUDA alone: here a stand-in does the same."""
    calls: list[tuple[torch.dtype, ...]] = []

    def mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        calls.append((left.dtype, right.dtype, out_dtype))
        return left.to(out_dtype) @ right.to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    left, right, _ = matrices()
    narrow = product_in_parts(left, right)
    torch.testing.assert_close(narrow, wide_product(left, right), rtol=1e-6, atol=1e-6)
    several = left + torch.rand(5, 7)
    expected = several.double() @ right.double().t()
    found = product_in_parts(several, right)
    assert float((found.double() - expected).abs().max()) < 1e-5 * float(expected.abs().max()) * 7
    assert calls == [(torch.bfloat16, torch.bfloat16, torch.float32)] * 3


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    left, right, _ = matrices()
    for pair in ((left, right.float()), (left.half(), right), (left.double(), right), (left.double(), right.double())):
        with pytest.raises(ValueError, match="left is torch.* give bfloat16, float16 or float32, left alike or float"):
            wide_product(*pair)


def cast_as_trl(module: PreTrainedModel) -> PreTrainedModel:
    """What TRL's cast_lm_head_to_fp32 does to a head (GRPOTrainer.__init__). The embeddings stay as they are."""
    module = copy.deepcopy(module)
    head: Any = module.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().float())
    if head.bias is not None:
        head.bias = torch.nn.Parameter(head.bias.detach().float())
    head.register_forward_pre_hook(lambda _, arguments: (arguments[0].float(),))
    return module


def of_trl(module: PreTrainedModel, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """ln p and entropy of the targets by the module's own forward."""
    logits = module(input_ids=token_ids[None], use_cache=False).logits[0]
    assert logits.dtype == torch.float32
    log_p = (logits[TARGETS - 1] / temperature).log_softmax(1)
    return log_p.gather(1, token_ids[TARGETS][:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def sharp(name: str, is_tied: bool) -> PreTrainedModel:
    """A model in bfloat16 whose logits are up to 5: there rounding shows, and several tokens are likely."""
    module = build(name, tie_word_embeddings=is_tied)
    with torch.no_grad():
        logits = module(torch.arange(16)[None], use_cache=False).logits
        module.get_output_embeddings().weight.mul_(5 / logits.abs().max())
    return module.bfloat16()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logprobs_and_entropies_are_those_of_trls_head(name: str, is_tied: bool) -> None:
    module = sharp(name, is_tied)
    token_ids = torch.randint(0, module.config.vocab_size, (16,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = of_trl(cast_as_trl(module), token_ids, 0.7)
    # Unpacked, one sequence runs through the very operations of the module's own forward, up to the head.
    mine = CausalLM(module, "unpacked", float32_head=True).packed_logprobs(token_ids, [16], TARGETS, 0.7)
    rounded = CausalLM(module, "unpacked").packed_logprobs(token_ids, [16], TARGETS, 0.7)
    for values, theirs in zip(mine, expected, strict=True):
        torch.testing.assert_close(values, theirs, rtol=1e-6, atol=1e-6)
    assert float((rounded[0] - expected[0]).detach().abs().max()) > 1e-3  # without the key


def test_gradients_are_those_of_trls_head() -> None:
    module = sharp("qwen3", is_tied=False)
    token_ids = torch.randint(0, module.config.vocab_size, (16,), generator=torch.Generator().manual_seed(5))
    theirs = cast_as_trl(module)
    outputs = of_trl(theirs, token_ids, 0.7)
    (outputs[0] - 0.1 * outputs[1]).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert expected["lm_head.weight"].dtype == torch.float32
    largest = {}
    for float32_head in (True, False):
        module.zero_grad()
        model = CausalLM(module, "unpacked", float32_head=float32_head)
        outputs = model.packed_logprobs(token_ids, [16], TARGETS, 0.7)
        (outputs[0] - 0.1 * outputs[1]).sum().backward()
        gaps = {}
        for name, parameter in module.named_parameters():
            wanted = expected[name].double()
            gaps[name] = float((parameter.grad.double() - wanted).norm() / wanted.norm())
        largest[float32_head] = gaps["lm_head.weight"], max(gaps.values())
    # The head's gradient is rounded to bfloat16 once, by up to 2^-9 of each number; what is below the head is equal.
    assert largest[True][0] < 2**-9 and largest[True][1] < 2**-9
    assert min(largest[False]) > 2**-9


def of_autograd(hidden: Tensor, weight: Tensor, labels: Tensor, uses: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight by autograd through casts to float64."""
    log_p = reference(hidden.double(), weight.double(), None, 0.7, HeadOptions())
    chosen, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    gradients = torch.autograd.grad((uses[0] * chosen + uses[1] * entropy).sum(), (hidden, weight))
    return gradients[0], gradients[1]


@pytest.mark.parametrize("form", [chunked_logprobs, of_distribution])
@pytest.mark.parametrize("uses", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.5)], ids=str)
def test_gradients_are_rounded_once(form: Any, uses: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(11)
    hidden = (3 * torch.randn(40, 24, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(300, 24, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 300, (40,), generator=generator)
    expected = of_autograd(hidden, weight, labels, uses)
    gaps = {}
    for in_float32 in (True, False):
        logprobs, entropy = form(hidden, weight, None, labels, 0.7, HeadOptions(in_float32=in_float32))
        loss = (uses[0] * logprobs + uses[1] * entropy).sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
        gaps[in_float32] = [
            float((mine.double() - theirs.double()).norm() / theirs.double().norm())
            for mine, theirs in zip(gradients, expected, strict=True)
        ]
    # The expected ones are bfloat16 too, as autograd casts them back: equal, but for a bit here and there.
    assert max(gaps[True]) < 3e-4
    assert min(gaps[False]) > 3e-3


def test_a_float32_model_has_a_float32_head_anyway() -> None:
    module = build("llama")
    token_ids = torch.arange(16) % module.config.vocab_size
    outputs = [
        CausalLM(module, "sdpa", float32_head=value).packed_logprobs(token_ids, [16], TARGETS, 0.7)
        for value in (True, False)
    ]
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
