"""Attention by itself on one GPU: training backends over ragged lengths, and the paged decode kernel.

Training: forward and backward of one layer over a packed row; `peer` is PyTorch's attention over the same sequences
padded to the longest. Decode: bytes of keys and values read per second; `peer` is what a plain copy reads and writes.
One line of JSON each.
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
from hybrid_rl.models import AttentionOptions  # noqa: E402
from hybrid_rl.models.attention import backends  # noqa: E402
from hybrid_rl.models.row import Layout  # noqa: E402

LENGTHS = {
    "heavy-tail": lambda generator: [64 + int(n) for n in torch.empty(64).exponential_(1 / 400, generator=generator)],
    "equal": lambda generator: [512] * 64,
}
TINY_LENGTHS = {"heavy-tail": lambda generator: [3, 17, 5, 40], "equal": lambda generator: [8] * 4}
# sequences, context tokens of each: far more bytes than a cache on the chip can hold
DECODES = {"few long": (8, 65536), "many": (128, 4096), "ragged": (128, -4096)}
TINY_DECODES = {"few long": (1, 70), "many": (3, 20), "ragged": (3, -20)}


def arguments() -> Namespace:
    """The command line."""
    parser = device.parser_of(__doc__, repeats=5)
    parser.add_argument("--heads", type=report.positive, default=14)
    parser.add_argument("--key-heads", type=report.positive, default=2)
    parser.add_argument("--head-dim", type=report.positive, default=64)
    parser.add_argument("--block-size", type=report.positive, default=16)
    parser.add_argument("--attention", nargs="+", default=["sdpa", "varlen", "flash_attn"], help="training backends")
    options = device.parse(parser)
    if options.tiny:
        options.heads, options.head_dim, options.repeats = 4, 16, 1
    return options


def main() -> None:
    """Both halves."""
    options = arguments()
    for name, lengths_of in (TINY_LENGTHS if options.tiny else LENGTHS).items():
        measure_training(options, name, lengths_of(torch.Generator().manual_seed(options.seed)))
    copied = device.copy_bandwidth(options)
    for name, (count, tokens) in (TINY_DECODES if options.tiny else DECODES).items():
        measure_decode(options, name, count, tokens, copied)


def line(
    given: Namespace, name: str, ours: float | None, peer: float, ratio: float | None, unit: str, **details: Any
) -> None:
    """Print the line of one measurement."""
    report.print_line(
        f"gpu_attention {name}",
        ours=ours,
        peer=peer,
        ratio=ratio,
        unit=unit,
        hardware=device.hardware(given.device),
        settings=report.settings(given),
        details=details,
    )


# -------------------------------------------------------------------------------------------------------- training


def measure_training(given: Namespace, name: str, lengths: list[int]) -> None:
    """Compare every backend that runs here with padding."""
    dtype = device.DTYPES[given.dtype]
    torch.manual_seed(given.seed)
    rows = [
        torch.randn(sum(lengths), heads, given.head_dim, dtype=dtype, device=given.device, requires_grad=True)
        for heads in (given.heads, given.key_heads, given.key_heads)
    ]
    width = max(lengths)
    padded = [
        torch.randn(
            len(lengths), row.shape[1], width, row.shape[2], dtype=dtype, device=given.device, requires_grad=True
        )
        for row in rows
    ]
    attention = torch.nn.functional.scaled_dot_product_attention
    peer = median(
        device.seconds_each(
            both_ways(lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True), padded), given
        )
    )
    flops = sum(3.5 * 2 * given.heads * given.head_dim * n * n for n in lengths)
    for backend, context in contexts(given, lengths, dtype).items():
        run = both_ways(lambda q, k, v, c=context: c.attend(0, q, k, v, AttentionOptions()), rows)
        seconds = median(device.seconds_each(run, given))
        details = {
            "num_tokens": sum(lengths),
            "padded_tokens": width * len(lengths),
            "flops_per_second": flops / seconds,
        }
        line(given, f"training {name} {backend}", seconds, peer, peer / seconds, "s", **details)


def both_ways(attend: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], None]:
    """Run forward and backward, and discard the gradients."""

    def run() -> None:
        out = attend(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


def contexts(given: Namespace, lengths: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the backends that run here, each with its plan for these lengths."""
    needs = backends.AttentionNeeds(torch.device(given.device), dtype, given.head_dim, None)
    plans = {}
    for name in given.attention:
        obstacles = backends.obstacles(name, needs)
        if obstacles:
            report.progress(f"{name} is left out: {'; '.join(obstacles)}")
        else:
            plans[name] = backends.choose_backend(name, needs).context(Layout(tuple(lengths)), given.device)
    return plans


# ---------------------------------------------------------------------------------------------------------- decode


def measure_decode(given: Namespace, name: str, count: int, tokens: int, copied: float) -> None:
    """The kernel over sequences of `tokens` tokens; negative: between 1 and that many."""
    reason = kernel_missing(given)
    if reason is not None:
        line(given, f"decode {name}", None, copied, None, "bytes/s", left_out=reason)
        return
    from hybrid_rl.engines.inplace.triton_decode import paged_decode  # imports Triton

    generator = torch.Generator().manual_seed(given.seed)
    lengths = (
        torch.full((count,), tokens) if tokens > 0 else torch.randint(1, 1 - tokens, (count,), generator=generator)
    )
    per_sequence = -(-abs(tokens) // given.block_size)
    num_blocks = count * per_sequence
    kind = {"dtype": device.DTYPES[given.dtype], "device": given.device}
    cache = [torch.randn(num_blocks, given.block_size, given.key_heads, given.head_dim, **kind) for _ in range(2)]
    table = torch.randperm(num_blocks, generator=generator).view(count, per_sequence).to(given.device, torch.int32)
    query = torch.randn(count, given.heads, given.head_dim, **kind)
    length = lengths.to(given.device, torch.int32)
    call = device.captured(lambda: paged_decode(query, *cache, table, length), given.device)
    seconds = median(device.seconds_each(call, given, calls=50))
    num_bytes = int(lengths.sum()) * 2 * given.key_heads * given.head_dim * query.element_size()
    details = {"seconds": seconds, "context_tokens": int(lengths.sum()), "kv_bytes": num_bytes}
    details["peak_share"] = None if (peak := device.peaks(given.device)[1]) is None else num_bytes / seconds / peak
    line(given, f"decode {name}", num_bytes / seconds, copied, num_bytes / seconds / copied, "bytes/s", **details)


def kernel_missing(given: Namespace) -> str | None:
    """Why the kernel cannot run here."""
    if importlib.util.find_spec("triton") is None:
        return "triton cannot be imported"
    if torch.device(given.device).type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU the kernel needs TRITON_INTERPRET=1"
    return None


if __name__ == "__main__":
    main()
