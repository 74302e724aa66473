"""Real architectures with shared prompts: logprobs, entropy and gradients of the model's own forward of each sample."""

import pytest
import torch

from hybrid_rl.batch import Jagged
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.attention.backends import Backend
from hybrid_rl.models.attention.varlen import FlashAttnKernel
from tests.support.cuda.varlen_stand_in import StandIn
from tests.support.float64 import KeepFloat64
from tests.unit.models.families import SUPPORTED, VOCABULARY, build

# prompt and completion tokens of each sample; the same letter is the same prompt. Windows of the families are 3.
SAMPLES = [
    *[("a", 9, 3), ("b", 1, 4), ("a", 9, 1), ("c", 6, 5), ("b", 1, 3), ("a", 9, 8), ("d", 4, 0), ("a", 9, 2)],
    *[("c", 6, 5), ("b", 1, 4)],
]
ALIKE = {4: (1, 2), 8: (3, 5), 9: (1, 4)}  # a sample, the one whose completion it begins like, for so many tokens
# fp32: sums in another order, through two layers. bf16 rounds every hidden state to 8 bits, here differently.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 0.05}


def samples() -> tuple[Jagged, Jagged]:
    generator = torch.Generator().manual_seed(3)
    prompts = {name: torch.randint(0, VOCABULARY, (size,), generator=generator) for name, size, _ in SAMPLES}
    completions = [torch.randint(0, VOCABULARY, (size,), generator=generator) for _, _, size in SAMPLES]
    for index, (other, size) in ALIKE.items():
        completions[index][:size] = completions[other][:size]
    return Jagged.from_rows([prompts[name] for name, _, _ in SAMPLES]), Jagged.from_rows(completions)


def own(module, prompts, completions):
    """The same by a forward of every sample alone, as the architecture defines it."""
    logprobs, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = module(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        log_p = logits[len(prompt) - 1 : -1].log_softmax(1)
        logprobs.append(log_p.gather(1, completion[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(1))
    return torch.cat(logprobs), torch.cat(entropies)


def one_by_one(model, prompts, completions):
    """The same by packed rows of one sample, which share nothing."""
    rows = [[Jagged.from_rows([part]) for part in pair] for pair in zip(prompts, completions, strict=True)]
    results = [model.row_logprobs(PackedRow.of(*row, model.device), 1.0) for row in rows]
    return tuple(torch.cat(values) for values in zip(*results, strict=True))


def shared(model, prompts, completions):
    row = PackedRow.of(prompts, completions, model.device)
    # Four different completions of a; two of b, which begin with the same two tokens; and one of c.
    assert row.layout.parents == (0, 0, 0, 0, 1, 1) and row.layout.roots[:3] == (9, 3, 11) and row.distinct is not None
    return model.row_logprobs(row, 1.0)


def gradients(module, outputs):
    direction = torch.linspace(-1, 1, len(outputs[0]), dtype=outputs[0].dtype)
    loss = sum((output * direction.roll(i)).sum() for i, output in enumerate(outputs))
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]
    ).double()


def check(mine, expected, dtype, what, tolerances=TOLERANCE):
    scale = float(expected.detach().abs().max())
    gap = float((mine.detach().double() - expected.detach().double()).abs().max())
    assert gap <= tolerances[dtype] * scale, f"{what} differ by {gap:.2e}, the largest is {scale:.2e}"


@pytest.mark.parametrize("name", SUPPORTED)
def test_fp64_agrees_with_the_architecture(name):
    module = build(name, dtype=torch.float64)
    with KeepFloat64():
        mine, expected = shared(CausalLM(module), *samples()), own(module, *samples())
    for got, want, what in zip(mine, expected, ("logprobs", "entropies"), strict=True):
        check(got, want, torch.float64, what)
    check(gradients(module, mine), gradients(module, expected), torch.float64, "gradients")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUPPORTED)
def test_lower_precisions_agree_with_samples_that_share_nothing(name, dtype):
    model = CausalLM(build(name, dtype=dtype))
    mine, expected = shared(model, *samples()), one_by_one(model, *samples())
    check(mine[0], expected[0], dtype, "logprobs")
    if dtype == torch.float32:
        check(gradients(model.module, mine), gradients(model.module, expected), dtype, "gradients")


@pytest.mark.parametrize(
    "name",
    [n if n in ("qwen2", "mistral", "gemma2", "gpt2") else pytest.param(n, marks=pytest.mark.sweep) for n in SUPPORTED],
)
def test_bf16_gradients_are_as_near_to_the_truth_as_without_sharing(name):
    """bf16 rounds each gradient by itself, so only both distances from the fp64 gradient can be compared."""
    truth = build(name, dtype=torch.bfloat16).double()
    with KeepFloat64():
        exact = gradients(truth, own(truth, *samples()))
    model = CausalLM(build(name, dtype=torch.bfloat16))
    errors = [
        float((gradients(model.module, run(model, *samples())) - exact).norm() / exact.norm())
        for run in (shared, one_by_one)
    ]
    assert errors[0] < 1.5 * errors[1] + 0.01


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_without_gradients_the_same_bits(name):
    """Recomputed ratios are exactly 1."""
    model = CausalLM(build(name))
    with torch.no_grad():
        scored = shared(model, *samples())
    trained = shared(model, *samples())
    assert trained[0].requires_grad
    assert all(torch.equal(a, b.detach()) for a, b in zip(scored, trained, strict=True))


@pytest.mark.parametrize(("name", "num_layers"), [("qwen2", 2), ("gemma3", 1), ("mistral", 0)])
def test_layers_without_a_cutting_window_copy_no_prompt(name, num_layers):
    model, kernel = CausalLM(build(name)), StandIn()
    model.attention = Backend("flash_attn", FlashAttnKernel(kernel))
    shared(model, *samples())
    calls = [(query[0], key[0]) for query, key, *_ in kernel.calls]
    # Roots of 9, 1 + 2 and 6 + 5 tokens, what is left of completions of 14 and 3: all of them with themselves, then
    # completions with roots; in the other layers the first three, then completions with a copy of a root each.
    copied = [(23, 23), (17, 17 + 4 * 9 + 2 * 3)] * (2 - num_layers)
    assert sorted(calls) == sorted([(40, 40), (17, 12)] * num_layers + copied)


def test_a_row_without_completion_tokens_has_a_gradient_of_nothing():
    model = CausalLM(build("qwen2"))
    prompts, completions = (Jagged.from_rows(rows, torch.int64) for rows in ([[3, 4]] * 2, [[], []]))
    row = PackedRow.of(prompts, completions, model.device)
    logprobs, entropy = model.row_logprobs(row, 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in model.module.parameters())
