"""Cases for the sampling kernels, on any device, against exact arithmetic and against PyTorch's form.

As a script it runs them on the CPU through Triton's interpreter, which must be chosen before Triton is imported
(TRITON_INTERPRET=1), and prints one JSON object: case -> what is wrong with it, null if nothing is.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_rl.engines.base import SamplingParams, derive_seed
from hybrid_rl.engines.sampling import SamplingTensors, choose_torch, uniform_numbers
from tests.gpu.interpreter import use_interpreter

LARGE = 152_064
# Below that a logprob is as exact as float32 states it: half a unit in the last place, and the error of the sum.
HALF_UNIT = 2.0**-24


def _random(num_rows: int, num_columns: int, spread: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    return spread * torch.randn(num_rows, num_columns, generator=generator) - 7


def _sparse() -> Tensor:
    logits = _random(12, 5000)
    logits[:, :2100] = -torch.inf  # the whole first block, and some
    logits[::2, 2200:4999] = -torch.inf
    return logits


def _one_hot() -> Tensor:
    logits = torch.full((6, 4100), -torch.inf)
    for row, column in enumerate((0, 2047, 2048, 4095, 4096, 4099)):
        logits[row, column] = -3.0
    return logits


def _large() -> Tensor:
    logits = torch.full((6, 3000), -1e4)
    logits[:, [5, 2100]] = 1e4
    logits[3:] = 1e37
    logits[4, 7] = -1e37
    return logits


def _huge_steps() -> Tensor:
    """Neighbours that lie so far apart that float32 weights underflow."""
    return torch.arange(3000.0).flip(0).repeat(4, 1) * 5


CASES: dict[str, Callable[[], Tensor]] = {
    "one token": lambda: _random(3, 1),
    "two": lambda: _random(20, 2),
    "63": lambda: _random(9, 63),
    "2047": lambda: _random(5, 2047),
    "2048": lambda: _random(5, 2048),
    "2049": lambda: _random(5, 2049),
    "flat": lambda: _random(8, 5000, 0.01),
    "steep": lambda: _random(8, 5000, 40.0),
    "ties": lambda: torch.zeros(15, 4097),
    "a vocabulary of 152k": lambda: _random(3, LARGE),
    "a flat vocabulary of 152k": lambda: _random(2, LARGE, 0.0),
    "hidden tokens": _sparse,
    "one hot": _one_hot,
    "large": _large,
    "huge steps": _huge_steps,
    "no rows": lambda: _random(0, 70),
}
TEMPERATURES = (1.0, 0.7, 2.5, 0.0, 0.05)


def arguments(logits: Tensor, device: str) -> tuple[SamplingTensors, Tensor]:
    """Parameters and uniform numbers for rows of these logits."""
    rows = [
        SamplingParams(1, temperature=TEMPERATURES[row % len(TEMPERATURES)], seed=derive_seed(row))
        for row in range(len(logits))
    ]
    params = SamplingTensors.of(rows, torch.device(device))
    seeds = torch.tensor([row.seed for row in rows], dtype=torch.int64)
    return params, uniform_numbers(seeds, torch.arange(len(rows)) * 977).to(device)


def problem(logits: Tensor, device: str, dtype: torch.dtype) -> str | None:
    """What the kernels do wrong for these logits, rounded to the dtype first."""
    from hybrid_rl.engines.triton_sampling import choose, draw_error  # Triton, which not everybody has

    narrow = logits.to(dtype)
    params, uniform = arguments(logits, device)
    out = choose(narrow.to(device), params.temperature, uniform).cpu()
    tokens, logprobs = out[:, 0].long(), out[:, 1].contiguous().view(torch.float32)
    bound = draw_error(logits.shape[1])
    temperature, uniform = params.temperature.cpu(), uniform.cpu()
    greedy = temperature == 0
    exact = (narrow.double() / torch.where(greedy, 1.0, temperature.double())[:, None]).log_softmax(1)
    chosen = exact.gather(1, tokens[:, None])[:, 0]
    if not chosen.isfinite().all():
        return f"impossible tokens: {tokens.tolist()}"
    gap = (logprobs.double() - chosen).abs() - HALF_UNIT * chosen.abs() - bound
    if not bool((gap <= 0).all()):
        return f"logprobs {logprobs.tolist()} instead of {chosen.tolist()}"
    if not torch.equal(tokens[greedy], narrow.float().argmax(1)[greedy]):
        return f"greedy tokens {tokens[greedy].tolist()}"
    upper = exact.exp().cumsum(1).gather(1, tokens[:, None])[:, 0]
    outside = ~greedy & ((upper - chosen.exp() - bound > uniform) | (uniform > upper + bound))
    if outside.any():
        return f"tokens {tokens[outside].tolist()} for uniform numbers {uniform[outside].tolist()}"
    same, stated = choose_torch(narrow.float().to(device), params, uniform.to(device))
    border = (uniform - upper).abs().minimum((uniform - upper + chosen.exp()).abs()) <= 2 * bound
    differs = (same.cpu() != tokens) & ~border
    if differs.any():
        return f"tokens {tokens[differs].tolist()}, in PyTorch {same.cpu()[differs].tolist()}"
    equal = same.cpu() == tokens
    if not torch.allclose(stated.cpu()[equal], logprobs[equal], rtol=1e-6, atol=1e-5):
        return f"logprobs {logprobs[equal].tolist()}, in PyTorch {stated.cpu()[equal].tolist()}"
    return None


def problem_of_broken_rows(device: str) -> str | None:
    """What is wrong with rows that hold no distribution: each must be marked, and the others left alone."""
    from hybrid_rl.engines.triton_sampling import choose

    logits = torch.zeros(10, 3000)
    logits[0, -1] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[5, 0] = torch.nan
    logits[7, 2500] = 3e38  # infinite at temperature 0.7
    logits[7, 3] = -torch.nan
    params, uniform = arguments(logits, device)
    out = choose(logits.to(device), params.temperature, uniform).cpu()
    marked = out[:, 1].contiguous().view(torch.float32).isnan().nonzero()[:, 0].tolist()
    if marked != [0, 2, 3, 5, 7] or not bool(((out[:, 0] >= 0) & (out[:, 0] < 3000)).all()):
        return f"rows {marked} are marked, tokens {out[:, 0].tolist()}"
    return None


def found(device: str) -> dict[str, str | None]:
    """What is wrong, by case."""
    problems = {name: problem(make(), device, torch.float32) for name, make in CASES.items()}
    problems |= {f"{name} in bfloat16": problem(CASES[name](), device, torch.bfloat16) for name in ("flat", "steep")}
    return problems | {"broken rows": problem_of_broken_rows(device)}


def main() -> None:
    """Run all cases."""
    use_interpreter()
    print(json.dumps(found("cpu")))


if __name__ == "__main__":
    main()
