"""The head on one GPU: ln p and entropy of given tokens from hidden states, forward and backward.

`ours` is the fused form in Triton, `peer` the form in chunks of rows, by operators of PyTorch alone; the details hold
the forward pass alone, the memory that each takes above its inputs, and the share of the device's peak arithmetic
(three products forward and backward, four with logits computed again). One line of JSON per head.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import chunked_logprobs  # noqa: E402

# rows (tokens of a micro-batch that are learned from), width of the hidden states, vocabulary
HEADS = {"0.5B": (16384, 896, 151936), "7B": (16384, 3584, 152064), "7B few rows": (1024, 3584, 152064)}
TINY = {"0.5B": (37, 24, 97)}
Call = Callable[[], tuple[Tensor, Tensor]]


def main() -> None:
    """Every head."""
    arguments = device.parse(device.parser_of(__doc__, repeats=5))
    if arguments.tiny:
        arguments.repeats = 1
    for name, sizes in (TINY if arguments.tiny else HEADS).items():
        measure(arguments, name, *sizes)


def measure(given: Namespace, name: str, rows: int, depth: int, vocab: int) -> None:
    """One line."""
    torch.manual_seed(given.seed)
    kind: dict[str, Any] = {"dtype": device.DTYPES[given.dtype], "device": given.device}
    hidden = torch.randn(rows, depth, **kind).requires_grad_()
    weight = (torch.randn(vocab, depth, **kind) * depth**-0.5).requires_grad_()
    labels = torch.randint(vocab, (rows,), device=given.device)
    leaves = (hidden, weight)
    peer = timed(given, lambda: chunked_logprobs(hidden, weight, None, labels, 0.9, HeadOptions()), leaves)
    reason = kernels_missing(given)
    ours: dict[str, Any] = {"seconds": None, "left_out": reason}
    if reason is None:
        from hybrid_rl.models.heads.triton_logprobs import linear_logprobs  # imports Triton

        ours = timed(given, lambda: linear_logprobs(hidden, weight, None, labels, 0.9), leaves)
    report.print_line(
        f"gpu_logprobs {name}",
        ours=ours["seconds"],
        peer=peer["seconds"],
        ratio=None if reason is not None else peer["seconds"] / ours["seconds"],
        unit="s, forward and backward",
        hardware=device.hardware(given.device),
        settings=report.settings(given, rows=rows, depth=depth, vocab=vocab),
        details={"ours": ours, "peer": peer},
    )


def timed(given: Namespace, call: Call, leaves: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Seconds forward and backward, forward alone, bytes above the inputs, and the share of the peak."""

    def both() -> None:
        logprobs, entropy = call()
        torch.autograd.grad(logprobs.sum() + 0.01 * entropy.sum(), leaves)

    @torch.no_grad()
    def forward() -> None:
        call()

    before = torch.cuda.memory_allocated() if torch.device(given.device).type == "cuda" else 0
    device.reset_peak(given.device)
    both()
    peak_bytes = device.peak_memory_bytes(given.device)
    seconds, alone = (median(device.seconds_each(function, given, calls=3)) for function in (both, forward))
    (rows, depth), vocab = leaves[0].shape, len(leaves[1])
    peak_flops = device.peaks(given.device)[0]
    flops = 2 * rows * depth * vocab
    return {
        "seconds": seconds,
        "forward_seconds": alone,
        "extra_bytes": None if peak_bytes is None else peak_bytes - before,
        "peak_share": None if peak_flops is None else 3 * flops / seconds / peak_flops,
        "peak_share_with_recomputing": None if peak_flops is None else 4 * flops / seconds / peak_flops,
        "forward_peak_share": None if peak_flops is None else flops / alone / peak_flops,
    }


def kernels_missing(given: Namespace) -> str | None:
    """Why the kernels cannot run here."""
    if importlib.util.find_spec("triton") is None:
        return "triton cannot be imported"
    if torch.device(given.device).type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU the kernels need TRITON_INTERPRET=1"
    return None


if __name__ == "__main__":
    main()
