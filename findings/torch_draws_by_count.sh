#!/bin/bash
# torch 2.13.0: on CPUs normal draws, and samples of a distribution, depend on how many are asked for.
#
# With a generator set to the same seed, the first n of n + 1 numbers are expected to be the n numbers, as they are for rand,
# exponential_, log_normal_, cauchy_, bernoulli_, poisson and randint. randn and normal draw in blocks of 16, each in a way of
# its own below 16, and draw the last 16 once more if the count is no multiple of 16. So a row added to a batch of noise
# changes rows before it. multinomial(p, 1) draws by another method than multinomial(p, k, replacement=True), so the first of
# k samples is not the one sample. Way round: draw for the most rows and cut, or a generator for each row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0
cat >"$folder/program.py" <<'P'
import sys
import torch

def agreeing(draw, few, many):
    """How many numbers at the start are the same in a draw of few and of many, from one seed."""
    first, second = (draw(count, torch.Generator().manual_seed(0)) for count in (few, many))
    differ = (first != second[:few]).nonzero()
    return int(differ[0]) if len(differ) else few

def sample(count, generator):
    return torch.multinomial(torch.ones(1000), count, replacement=True, generator=generator)

def normal(count, generator):
    return torch.randn(count, generator=generator)

others = {
    "rand": lambda count, generator: torch.rand(count, generator=generator),
    "exponential_": lambda count, generator: torch.empty(count).exponential_(generator=generator),
    "log_normal_": lambda count, generator: torch.empty(count).log_normal_(generator=generator),
    "cauchy_": lambda count, generator: torch.empty(count).cauchy_(generator=generator),
    "bernoulli_": lambda count, generator: torch.empty(count).bernoulli_(0.5, generator=generator),
    "poisson": lambda count, generator: torch.poisson(torch.full((count,), 3.0), generator=generator),
    "randint": lambda count, generator: torch.randint(1000, (count,), generator=generator),
}
print(f"torch {torch.__version__}: numbers that a draw of n and a draw of more have in common, from the start")
expected = {(14, 15): 14, (15, 16): 0, (32, 33): 17, (33, 64): 17, (32, 64): 32, (100, 101): 84}
found = {counts: agreeing(normal, *counts) for counts in expected}
for (few, many), number in found.items():
    print(f"  randn      n={few:3} and {many:3}: {number}")
samples = {counts: agreeing(sample, *counts) for counts in ((1, 2), (2, 3), (10, 100))}
for (few, many), number in samples.items():
    print(f"  multinomial n={few:2} and {many:3}: {number}")
same = [name for name, draw in others.items() if all(agreeing(draw, n, n + 1) == n for n in range(1, 100))]
print(f"  all n, of n and n + 1 for n up to 99: {', '.join(same)}")
sys.exit(not (found == expected and samples == {(1, 2): 0, (2, 3): 2, (10, 100): 10} and same == list(others)))
P
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
