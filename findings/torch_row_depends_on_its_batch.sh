#!/bin/bash
# torch 2.13.0 on CPUs: SiLU, sigmoid and softplus of a row change in the last bit with the rows around it.
#
# These functions act on each element by itself, so a row by itself and the same row within a batch ought to be the same
# bits. Their loops take whole vectors and end in scalar code that calls another exp, and which elements of a tensor are
# the end depends on its size and on how it is cut for threads. So if the width is no multiple of the vector, the same row
# has other bits at another place of a batch, and an engine that decodes one row disagrees with a trainer that computes
# many. exp and tanh, of which the functions are made, do not do that: their loops fill the last vector up. Way round:
# pad the flattened tensor to whole vectors, and compute blocks that one thread takes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'P'
import torch
from torch.nn import functional

torch.set_num_threads(1)
print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
rows = torch.randn(500, 37, generator=torch.Generator().manual_seed(0))
depends = {}
for name in ("exp", "tanh", "silu", "sigmoid", "softplus"):
    function = getattr(functional, name, None) if name in ("silu", "softplus") else getattr(torch, name)
    together = function(rows)
    alone = torch.cat([function(row[None]) for row in rows])
    depends[name] = int((together != alone).sum())
    print(f"{name}: {depends[name]} of {rows.numel()} elements differ, by {(together - alone).abs().max().item():.1e}")
assert not depends["exp"] and not depends["tanh"], depends
assert all(depends[name] for name in ("silu", "sigmoid", "softplus")), depends
P
