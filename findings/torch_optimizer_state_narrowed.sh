#!/bin/bash
# torch 2.13.0: Optimizer.load_state_dict casts an optimizer's float32 state, and its counters, to the dtype of the weights.
#
# A resumed optimizer is expected to hold what was saved. All tensors of the state except one named "step" take the dtype of
# their parameter, if that is a floating-point one: with bfloat16 weights, an optimizer that keeps float32 master weights or
# moments, or counts in int64, loses them when it resumes, without a word. Seen: a master weight of 0.9999 comes back as
# 1.0, a count of 257 as 256. Way round: hold such tensors outside of `state`, or override load_state_dict and set them
# again from the dictionary, as it came, after the base class.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0
cat >"$folder/program.py" <<'P'
import sys
import torch

class WithMaster(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"], state["rows"] = torch.tensor(0.0), torch.tensor(0)
                    state["master"] = weight.detach().float().clone()
                state["step"] += 1
                state["rows"] += 257
                state["master"] -= 1e-4 * weight.grad.float()
                weight.copy_(state["master"])

def built():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    return weight, WithMaster([weight])

weight, saved = built()
saved.step()
other, resumed = built()
resumed.load_state_dict(saved.state_dict())
shown = []
for name, tensor in saved.state[weight].items():
    back = resumed.state[other][name]
    shown.append((name, str(tensor.dtype), str(back.dtype), back.flatten()[0].item()))
    print(f"torch {torch.__version__}, {name}: {tensor.dtype} {tensor.flatten()[0].item():.4f} saved, "
          f"{back.dtype} {back.flatten()[0].item():.4f} loaded")
sys.exit(shown != [
    ("step", "torch.float32", "torch.float32", 1.0),
    ("rows", "torch.int64", "torch.bfloat16", 256.0),
    ("master", "torch.float32", "torch.bfloat16", 1.0),
])
P
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
