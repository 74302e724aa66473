#!/bin/bash
# torch 2.13.0: walking through a DataLoader that neither shuffles nor has workers takes a number from torch's generator.
#
# Nothing in it is random, so evaluating in the middle of training is expected to leave training as it was. Each iter() of a
# loader without a generator of its own draws a seed for workers, also if there are none. Seen: the numbers after the walk
# are others than without it, shifted by the one draw: a run that evaluates every 10 steps trains otherwise than one that
# does so every 20. Way round: DataLoader(..., generator=torch.Generator()), which then is what is drawn from.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0
cat >"$folder/program.py" <<'P'
import sys
import torch
from torch.utils.data import DataLoader

def after(do):
    torch.manual_seed(0)
    do()
    return torch.rand(4)

plain = after(lambda: None)
walked = after(lambda: list(DataLoader([1, 2, 3])))
owned = after(lambda: list(DataLoader([1, 2, 3], generator=torch.Generator())))
drawn = after(lambda: torch.empty((), dtype=torch.int64).random_())
print(f"torch {torch.__version__}, without a walk:           {plain.tolist()}")
print(f"after a walk through a plain loader:   {walked.tolist()}")
print(f"after one integer was drawn:           {drawn.tolist()}")
print(f"after a walk with its own generator:   {owned.tolist()}")
sys.exit(torch.equal(plain, walked) or not torch.equal(walked, drawn) or not torch.equal(plain, owned))
P
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
