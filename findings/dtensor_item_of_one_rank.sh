#!/bin/bash
# torch 2.13.0: .item() and bool() of a reduced DTensor are of the rank's own shard, while a comparison is of the whole.
#
# tensor.sum() of a sharded DTensor is still partial: each rank holds its own sum, and a redistribution would add them up.
# A comparison does that, .item(), float() and bool() do not, and neither warn nor raise. Seen with 0, 1 | 2, 3 on two ranks:
# sum().item() is 1.0 on rank 0 and 5.0 on rank 1, not 6; `norm() > 3` is true on both although norm().item() is 1.0 on rank
# 0; and `if isnan().any():` is taken on rank 1 only, if the NaN is there: ranks that skip such a step hang in the next
# collective. Way round: full_tensor() before each of them. The norm that clip_grad_norm_ returns is whole in this version.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'P'
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    values = distribute_tensor(torch.tensor([0.0, 1.0, 2.0, 3.0]), mesh, [Shard(0)])
    broken = distribute_tensor(torch.tensor([0.0, 1.0, 2.0, float("nan")]), mesh, [Shard(0)])
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write(
            f"sum {values.sum().item()} of {values.sum().full_tensor().item()}, max {values.max().item()}, "
            f"norm {values.norm().item():.4f}, norm above 3 {bool(values.norm() > 3)}, "
            f"any NaN {bool(broken.isnan().any())}"
        )
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (sys.argv[1],), 2)
    lines = [open(f"{sys.argv[1]}/rank{rank}").read() for rank in (0, 1)]
    for rank, line in enumerate(lines):
        print(f"torch {torch.__version__}, rank {rank}: {line}")
    sys.exit(lines != [
        "sum 1.0 of 6.0, max 1.0, norm 1.0000, norm above 3 True, any NaN False",
        "sum 5.0 of 6.0, max 3.0, norm 3.6056, norm above 3 True, any NaN True",
    ])
P
cd "$folder"
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore program.py "$folder"
