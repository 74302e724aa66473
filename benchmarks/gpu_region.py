"""Cost of giving the memory of a region back and having it again at the same address, as a KV cache does in every step.

One line of JSON per size of the pieces of physical memory. `ours` is the seconds of a release and a restore, with which
the memory is zero; `peer` is the same through PyTorch's allocator, which gives its free blocks back and takes new ones:
at another address, so that CUDA graphs would have to be captured again. The details have both halves, and the bandwidth
of a copy within a region over that within plain memory.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from hybrid_rl.memory.cuda_region import CHUNK_BYTES, CudaRegion  # noqa: E402
from hybrid_rl.memory.region import Region, TensorRegion  # noqa: E402

CHUNKS = (1 << 21, 1 << 25, CHUNK_BYTES, 1 << 31)


def main() -> None:
    """A line per size of pieces."""
    parser = device.parser_of(__doc__, repeats=7)
    parser.add_argument("--gib", type=report.positive, default=16, help="of the region")
    arguments = device.parse(parser)
    num_bytes = 1 << 16 if arguments.tiny else arguments.gib << 30
    plain = plain_seconds(arguments, num_bytes)
    peer_copy = copy_rate(arguments, torch.zeros(num_bytes, dtype=torch.uint8, device=arguments.device))
    empty_cache(arguments)
    for chunk_bytes in CHUNKS[:1] if arguments.tiny else CHUNKS:
        measure(arguments, num_bytes, chunk_bytes, plain, peer_copy)


def measure(given: Namespace, num_bytes: int, chunk_bytes: int, plain: list[float], peer_copy: float) -> None:
    """One line."""
    region = region_of(given, num_bytes, chunk_bytes)
    first, tensor = device.seconds_of(lambda: region.allocate((num_bytes,), torch.uint8), given.device)
    halves: dict[str, list[float]] = {"release": [], "restore": []}
    for _ in range(given.repeats):
        tensor.fill_(1)
        halves["release"].append(device.seconds_of(region.release, given.device)[0])
        halves["restore"].append(device.seconds_of(region.restore, given.device)[0])
    both = [release + restore for release, restore in zip(*halves.values(), strict=True)]
    details = {name: report.spread(seconds) for name, seconds in halves.items()}
    details |= {"first_seconds": first, "copy_of_plain": copy_rate(given, tensor) / peer_copy, "bytes": num_bytes}
    device.print_line(
        given,
        f"gpu_region {chunk_bytes >> 20} MiB pieces",
        ours=median(both),
        peer=median(plain),
        ratio=report.ratio_of_medians(peer=plain, ours=both),
        unit="s",
        details=details,
        chunk_bytes=chunk_bytes,
    )
    del tensor
    region.close()


def region_of(given: Namespace, num_bytes: int, chunk_bytes: int) -> TensorRegion:
    """A region on the device."""
    if torch.device(given.device).type == "cuda":
        return CudaRegion("benchmark", capacity_bytes=num_bytes, device=given.device, chunk_bytes=chunk_bytes)
    return Region("benchmark", capacity_bytes=num_bytes)


def plain_seconds(given: Namespace, num_bytes: int) -> list[float]:
    """Seconds of freeing and having memory of PyTorch's allocator, zeros each time."""
    held = [torch.zeros(num_bytes, dtype=torch.uint8, device=given.device)]

    def again() -> None:
        held.clear()
        empty_cache(given)
        held.append(torch.zeros(num_bytes, dtype=torch.uint8, device=given.device))

    again()
    return [device.seconds_of(again, given.device)[0] for _ in range(given.repeats)]


def copy_rate(given: Namespace, tensor: Tensor) -> float:
    """Bytes read and written per second by a copy of one half to the other."""
    half = tensor.numel() // 2
    source, target = tensor[:half], tensor[half : 2 * half]
    return 2 * half / median(device.seconds_each(lambda: target.copy_(source), given, calls=3))


def empty_cache(given: Namespace) -> None:
    """Give what PyTorch keeps free back to the device."""
    if torch.device(given.device).type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
