"""Cases and a plain PyTorch reference for the fused head in Triton, on any device.

As a script it runs the cases on the CPU through Triton's interpreter, which must be chosen before Triton is imported
(TRITON_INTERPRET=1), and prints one JSON object: case -> gaps to the reference, and what the functions below find.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.models.heads.logit_options import HeadOptions
from tests.gpu.interpreter import use_interpreter


@dataclass(frozen=True)
class Case:
    """One call, forward and backward. The default is several tiles of rows, columns and depth, none of them full."""

    name: str
    rows: int = 131
    depth: int = 45
    vocab: int = 201
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False
    strided: bool = False  # hidden states and head are views with gaps, the head transposed
    uses: tuple[float, float] = (1.0, 1.0)  # share of ln p and entropy in what is differentiated
    frozen: tuple[str, ...] = ()  # what wants no gradient
    dtype: torch.dtype = torch.float32
    in_float32: bool = False  # neither logits nor their gradient are rounded


# One tile of rows, and some; two of columns: for what has nothing to do with how many there are.
SMALL: dict[str, Any] = {"rows": 67, "depth": 35, "vocab": 71}
CASES = [
    Case("plain"),
    Case("one row", rows=1),
    Case("one of everything", rows=1, depth=1, vocab=1),
    Case("vocabulary of 7, odd depth", rows=5, depth=3, vocab=7),
    Case("whole tiles", rows=128, depth=64, vocab=256),
    Case("many parts", rows=3, depth=16, vocab=64 * 35 + 1),
    Case("bias", bias=True),
    Case("temperature", temperature=0.6, **SMALL),
    Case("scale", scale=6.0, **SMALL),
    Case("softcap", softcap=1.5, **SMALL),
    Case("everything", temperature=0.7, scale=2.5, softcap=1.5, bias=True),
    Case("logprobs alone", uses=(1.0, 0.0), **SMALL),
    Case("entropy alone", uses=(0.0, 1.0), bias=True, **SMALL),
    Case("frozen head", frozen=("weight", "bias"), bias=True, **SMALL),
    Case("frozen bias", frozen=("bias",), bias=True, **SMALL),
    Case("frozen below the head", frozen=("hidden",), **SMALL),
    Case("strided", strided=True),
]
NARROW = [
    Case(f"{str(dtype).removeprefix('torch.')}{suffix}", dtype=dtype, **options)
    for dtype in (torch.float16, torch.bfloat16)
    for suffix, options in {
        "": {},
        " everything": {"temperature": 0.7, "scale": 2.5, "softcap": 1.5, "bias": True},
    }.items()
]
NARROW += [
    Case("wide", dtype=torch.bfloat16, in_float32=True, bias=True, **SMALL),
    Case("wide everything", temperature=0.7, scale=2.5, softcap=1.5, bias=True, dtype=torch.bfloat16, in_float32=True),
]
NAMES = ("hidden", "weight", "bias")


def build(case: Case, device: str) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Hidden states, head and bias as leaves; labels, the first and the last token among them; float64 [2, M], the
    gradients of ln p and entropy, some of them 0."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((case.rows, case.depth), (case.vocab, case.depth), (case.vocab,))
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values[0] /= case.depth**0.5  # logits around 1, whatever the depth
    values = [value.to(case.dtype) for value in values]
    leaves: list[Tensor | None] = []
    for name, value in zip(NAMES, values, strict=True):
        value = value.to(device)
        if case.strided and name == "hidden":
            value = value.repeat_interleave(2, dim=1)[:, ::2]
        if case.strided and name == "weight":
            value = value.t().contiguous().t()
        wanted = name != "bias" or case.bias
        leaves.append(value.detach().requires_grad_(name not in case.frozen) if wanted else None)
    labels = torch.randint(case.vocab, (case.rows,), generator=generator)
    labels[-1] = case.vocab - 1
    labels[0] = 0
    grads = torch.randn(2, case.rows, generator=generator, dtype=torch.float64)
    grads *= torch.tensor(case.uses)[:, None]
    grads[:, 1::5] = 0
    return leaves, labels.to(device), grads.to(device)


def rounded(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """What a linear layer of that dtype puts out. Triton's interpreter, on a CPU, cuts bfloat16 instead of rounding."""
    if dtype == torch.bfloat16 and logits.device.type == "cpu":
        return (logits.float().view(torch.int32) & -(1 << 16)).view(torch.float32).double()
    return logits.to(dtype).double()


def reference(case: Case, leaves: list[Tensor | None], labels: Tensor) -> tuple[Tensor, Tensor]:
    """ln p and entropy in float64 by log_softmax, from rounded logits; the gradient passes the rounding as it is."""
    hidden, weight, bias = (None if leaf is None else leaf.double() for leaf in leaves)
    assert hidden is not None and weight is not None
    logits = hidden @ weight.t()
    logits = logits if bias is None else logits + bias
    if case.dtype != torch.float32 and not case.in_float32:
        logits = logits + (rounded(logits.detach(), case.dtype) - logits).detach()
    logits = logits * case.scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    log_p = (logits / case.temperature).log_softmax(1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def gaps(case: Case, device: str) -> dict[str, float]:
    """Largest differences of ln p, entropy and gradients, relative to the largest value (of ln p and entropy: at least
    1); infinite where something is not finite or has another dtype."""
    from hybrid_rl.models.heads.triton_logprobs import linear_logprobs  # Triton, which not everybody has

    leaves, labels, grads = build(case, device)
    hidden, weight, bias = leaves
    assert hidden is not None and weight is not None
    options = HeadOptions(case.scale, case.softcap, case.in_float32)
    mine = linear_logprobs(hidden, weight, bias, labels, case.temperature, options)
    expected = reference(case, leaves, labels)
    found: dict[str, float] = {}
    for name, value, wanted in zip(("logprobs", "entropy"), mine, expected, strict=True):
        right = value.dtype == torch.float32 and bool(value.isfinite().all())
        gap = (value - wanted).detach().abs().max() / wanted.detach().abs().max().clamp(min=1.0)
        found[name] = float(gap) if right else float("inf")
    wanting = {name: leaf for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None and leaf.requires_grad}
    both = [
        torch.autograd.grad(sum((g * out).sum() for g, out in zip(grads, outs, strict=True)), list(wanting.values()))
        for outs in (mine, expected)
    ]
    for name, value, wanted in zip(wanting, *both, strict=True):
        right = value.dtype == case.dtype and bool(value.isfinite().all())
        gap = (value.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-3)
        found[f"grad {name}"] = float(gap) if right else float("inf")
    return found


def ranges_gaps(device: str) -> dict[str, float]:
    """The gaps where the backward pass goes over the vocabulary in ranges of one tile, the last of them not full."""
    from hybrid_rl.models.heads import triton_logprobs as kernels

    before = kernels.MIN_RANGE, kernels.RANGE_ELEMENTS
    kernels.MIN_RANGE, kernels.RANGE_ELEMENTS = 71, 0
    try:
        return gaps(Case("ranges", bias=True), device)
    finally:
        kernels.MIN_RANGE, kernels.RANGE_ELEMENTS = before


def huge_logits(device: str) -> list[float]:
    """ln p, entropy and the largest gradient where one logit is far above the others, for two sizes."""
    from hybrid_rl.models.heads.triton_logprobs import linear_logprobs

    found = []
    for size in (1e4, 1e30):
        hidden = torch.tensor([[size]], device=device, requires_grad=True)
        weight = torch.tensor([[1.0], [-1.0], [0.5]], device=device, requires_grad=True)
        outputs = linear_logprobs(hidden, weight, None, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
        grads = torch.autograd.grad(sum(outputs).sum(), (hidden, weight))
        found += [*(output.item() for output in outputs), max(float(grad.abs().max()) for grad in grads)]
    return found


def summed_gradient(device: str) -> list[float]:
    """d weight of 300 rows that each add 2^-9 to it, in bf16, whose own sums stop growing near 1."""
    from hybrid_rl.models.heads.triton_logprobs import linear_logprobs

    hidden = torch.full((300, 1), 2.0**-8, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    labels = torch.zeros(300, dtype=torch.int64, device=device)
    linear_logprobs(hidden, weight, None, labels, 1.0)[0].sum().backward()
    assert weight.grad is not None
    return weight.grad[:, 0].float().tolist()


def unknown_label(device: str) -> list[bool]:
    """Which rows come back as NaN where the second label is not in the vocabulary."""
    from hybrid_rl.models.heads.triton_logprobs import linear_logprobs

    labels = torch.tensor([3, 7, 0], device=device)
    hidden, weight = torch.ones(3, 5, device=device), torch.ones(7, 5, device=device)
    return linear_logprobs(hidden, weight, None, labels, 1.0)[0].isnan().tolist()


def gradient_rows(device: str) -> dict[str, list[int]]:
    """Of the gradient of 37 columns: its columns, and elements from row to row, for each dtype."""
    from hybrid_rl.models.heads import triton_logprobs as kernels

    found = {}
    for dtype in kernels.DTYPES:
        hidden, weight = (torch.zeros(rows, 16, dtype=dtype, device=device) for rows in (2, 50))
        labels = torch.zeros(2, dtype=torch.int64, device=device)
        rows = [torch.zeros(2, device=device) for _ in range(5)]
        grad = kernels._logit_gradients(hidden, weight, None, labels, rows, slice(0, 37), 1.0, HeadOptions())
        found[str(dtype)] = [grad.shape[1], grad.stride(0)]
    return found


def main() -> None:
    """Run all cases."""
    use_interpreter()
    found: dict[str, Any] = {case.name: gaps(case, "cpu") for case in CASES + NARROW}
    found |= {"ranges": ranges_gaps("cpu"), "huge logits": huge_logits("cpu")}
    found |= {"summed gradient": summed_gradient("cpu"), "gradient rows": gradient_rows("cpu")}
    print(json.dumps(found | {"unknown label": unknown_label("cpu")}))


if __name__ == "__main__":
    main()
