"""Bandwidth of the batched copy-and-cast on a CPU, against a plain memcpy of as many bytes.

The pieces are those of an engine with two tensor-parallel ranks that takes a layer of Qwen2.5-7B's shape (or a part of
it) from row shards: rows and columns, norms, biases. Copy and memcpy take turns; `ratio` is the memcpy's seconds by the
copy's, bytes read and written alike. One line of JSON per pair of dtypes, without and with the content hash.
"""

from __future__ import annotations

import ctypes
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.compat import native  # noqa: E402
from hybrid_rl.resharding.copy_tables import Pieces  # noqa: E402
from hybrid_rl.resharding.execute import copy_pieces  # noqa: E402

HIDDEN, INTERMEDIATE, KEYS = 3584, 18944, 512
PAIRS = {"float32-bfloat16": (torch.float32, torch.bfloat16), "bfloat16-bfloat16": (torch.bfloat16, torch.bfloat16)}


def weights(scale: int) -> list[tuple[int, int, int]]:
    """Global rows and columns of a layer's weights, divided by `scale`, and the dim that tensor parallelism cuts."""
    hidden, intermediate, keys = HIDDEN // scale, INTERMEDIATE // scale, KEYS // scale
    column, row, whole = 0, 1, -1
    return [
        (hidden, hidden, column),
        (keys, hidden, column),
        (keys, hidden, column),
        (hidden, hidden, row),
        (intermediate, hidden, column),
        (intermediate, hidden, column),
        (hidden, intermediate, row),
        *[(hidden, 1, whole)] * 2,
        *[(extent, 1, column) for extent in (hidden, keys, keys)],
    ]


def pieces_of(shapes: list[tuple[int, int, int]], ranks: int) -> Pieces:
    """The pieces that tensor-parallel rank 1 of 2 takes of weights sharded by rows over `ranks` ranks."""
    rows: list[list[Any]] = []
    for index, (height, width, cut) in enumerate(shapes):
        low = [height // 2 if cut == 0 else 0, width // 2 if cut == 1 else 0]
        size = [height - low[0], width - low[1]]
        for part in np.array_split(np.arange(low[0], height), ranks):
            if not len(part):
                continue
            first, count = int(part[0]), len(part)
            source = first * width + low[1]
            rows.append([index, source, [width, 1], (first - low[0]) * size[1], [size[1], 1], [count, size[1]]])
    pad = np.array([[0, 0]] * len(rows))
    index, source, strides, to, target_strides, shape = (np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    return Pieces(
        source=index,
        source_rank=np.zeros_like(index),
        source_offset=source,
        source_strides=np.hstack([strides, pad]),
        destination=index,
        destination_offset=to,
        destination_strides=np.hstack([target_strides, pad]),
        shape=np.hstack([shape, pad + 1]),
        global_offset=source,
        global_strides=np.hstack([strides, pad]),
    )


def memcpy(target: Tensor, source: Tensor, num_bytes: int) -> None:
    """The C library's."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)


def measure(given: Namespace, threads: int, name: str, hashed: bool) -> None:
    """One line."""
    torch.set_num_threads(threads)
    read, written = PAIRS[name]
    shapes = weights(given.scale)
    pieces = pieces_of(shapes, given.ranks)
    sources = [torch.randn(height * width).to(read) for height, width, _ in shapes]
    targets = [torch.zeros(height * width // (1 if cut < 0 else 2), dtype=written) for height, width, cut in shapes]
    count = int(pieces.num_elements.sum())
    num_bytes = count * (read.itemsize + written.itemsize)
    plain = [torch.ones(num_bytes // 2, dtype=torch.uint8) for _ in range(2)]
    hashes, seeds = torch.zeros(len(shapes), dtype=torch.int64), torch.arange(len(shapes))
    extra: dict[str, Tensor] = {"hashes": hashes, "seeds": seeds} if hashed else {}
    ours: Callable[[], None] = lambda: copy_pieces(pieces, sources, targets, **extra)  # noqa: E731
    peers = {"memcpy": lambda: memcpy(*plain, num_bytes // 2), "copy_": lambda: plain[0].copy_(plain[1])}
    seconds: dict[str, list[float]] = {"ours": [], **{peer: [] for peer in peers}}
    cpu_seconds: dict[str, list[float]] = {side: [] for side in seconds}
    for turn in range(given.repeats + 1):
        for side, function in {"ours": ours, **peers}.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            function()
            if turn:
                seconds[side].append(time.perf_counter() - start)
                cpu_seconds[side].append(time.process_time() - cpu_start)
    rates = {side: num_bytes / float(np.median(values)) for side, values in seconds.items()}
    report.print_line(
        f"strided_copy {name}{' hashed' if hashed else ''}",
        ours=rates["ours"],
        peer=rates["memcpy"],
        ratio=report.ratio_of_medians(seconds["memcpy"], seconds["ours"]),
        unit="bytes/s",
        hardware=report.hardware(threads, {}),
        settings=report.settings(given, pieces=len(pieces)),
        details={
            "num_bytes": num_bytes,
            "seconds": {side: report.spread(values) for side, values in seconds.items()},
            "cpu_seconds": {side: report.spread(values) for side, values in cpu_seconds.items()},
            "cpu_ratio": report.ratio_of_medians(cpu_seconds["memcpy"], cpu_seconds["ours"]),
            "ratio_of_best": min(seconds["memcpy"]) / min(seconds["ours"]),
            "ratio_to_copy_": report.ratio_of_medians(seconds["copy_"], seconds["ours"]),
            "compiled": native.operator("strided_copy") is not None,
        },
    )


def main() -> None:
    """All lines."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--scale", type=report.positive, default=1, help="divides both extents of every weight")
    parser.add_argument("--ranks", type=report.positive, default=8, help="that hold the rows")
    parser.add_argument("--repeats", type=report.positive, default=9)
    parser.add_argument("--dtypes", choices=PAIRS, nargs="+", default=list(PAIRS))
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    for threads in arguments.threads:
        for name in arguments.dtypes:
            for hashed in (False, True):
                measure(arguments, threads, name, hashed)


if __name__ == "__main__":
    main()
