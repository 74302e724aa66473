#!/bin/bash
# torch 2.13.0: a TorchFunctionMode sees functional.linear and torch.bmm, but not functional.grouped_mm.
#
# A TorchFunctionMode is told of calls of PyTorch's functions with their public names. functional.grouped_mm is a Python
# function that does not ask for modes: the mode is told of torch._grouped_mm, a private name, which it calls. Whoever
# replaces or counts products by the public functions leaves out the experts of mixtures, as transformers computes them,
# without an error. Way round: look for torch._grouped_mm too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'P'
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

print("torch", torch.__version__)


class Told(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


rows, experts = torch.randn(4, 16), torch.randn(2, 16, 8)
ends = torch.tensor([1, 4], dtype=torch.int32)
seen = {}
for name, call in {
    "linear": lambda: functional.linear(rows, experts[0].T),
    "bmm": lambda: torch.bmm(rows[None], experts[:1]),
    "grouped_mm": lambda: functional.grouped_mm(rows, experts, offs=ends),
}.items():
    with Told() as mode:
        call()
    seen[name] = mode.functions
    print(name, [function.__name__ for function in mode.functions])
assert functional.linear in seen["linear"] and torch.bmm in seen["bmm"]
assert functional.grouped_mm not in seen["grouped_mm"] and torch._grouped_mm in seen["grouped_mm"]
P
