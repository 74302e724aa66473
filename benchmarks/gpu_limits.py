"""The limits of the device, measured by plain PyTorch: the ceilings for reading the other benchmarks.

Copies on the device, copies between it and pinned host memory, a large product in bfloat16. One line of JSON each;
`peer` is the data sheet's figure, if the device has one. Inputs are random: on zeros the product runs faster.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device  # noqa: E402


def main() -> None:
    """All lines."""
    arguments = device.parse(device.parser_of(__doc__, repeats=7))
    flops, memory = device.peaks(arguments.device)
    show(arguments, "device copy", device.copy_bandwidth(arguments), memory, "bytes/s")
    for name, rate in pinned_rates(arguments).items():
        show(arguments, name, rate, None, "bytes/s")
    show(arguments, "bf16 product", product_rate(arguments), flops, "FLOP/s")


def show(given: Namespace, name: str, ours: float, peer: float | None, unit: str) -> None:
    """One line."""
    ratio = None if peer is None else ours / peer
    device.print_line(given, f"gpu_limits {name}", ours=ours, peer=peer, ratio=ratio, unit=unit, details={})


def pinned_rates(given: Namespace) -> dict[str, float]:
    """Bytes per second from pinned host memory to the device and back."""
    there = torch.randint(0, 256, (1 << (16 if given.tiny else 30),), dtype=torch.uint8, device=given.device)
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=there.device.type == "cuda")
    here.copy_(there)
    calls = {
        "pinned to device": lambda: there.copy_(here, non_blocking=True),
        "device to pinned": lambda: here.copy_(there, non_blocking=True),
    }
    return {name: there.numel() / median(device.seconds_each(call, given, calls=3)) for name, call in calls.items()}


def product_rate(given: Namespace) -> float:
    """FLOP/s of a square product in bfloat16 of 8192 rows."""
    size = 32 if given.tiny else 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=given.device) for _ in range(2))
    return 2 * size**3 / median(device.seconds_each(lambda: left @ right, given))


if __name__ == "__main__":
    main()
