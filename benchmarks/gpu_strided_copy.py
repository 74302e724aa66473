"""Bandwidth of the batched copy-and-cast on one GPU, for weights of Qwen2.5-7B's shape, against a plain copy.

One call takes all pieces of 28 layers, embedding and head from 8 row shards; `ratio` is its bytes read and written per
second by those of a plain copy of 1 GiB measured in the same run. The bar is 0.85, the aim 0.9 with the hash. `call`
is timed with the table made and uploaded in Python, as a handoff does. One line of JSON per pair of dtypes, without and
with the content hash.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.strided_copy import HIDDEN, PAIRS, pieces_of, weights  # noqa: E402
from hybrid_rl.compat import native  # noqa: E402
from hybrid_rl.resharding.execute import copy_pieces  # noqa: E402

NUM_LAYERS, VOCABULARY = 28, 152064
BAR, AIM = 0.85, 0.9


def main() -> None:
    """All lines."""
    parser = device.parser_of(__doc__, repeats=7)
    parser.add_argument("--ranks", type=report.positive, default=8, help="that hold the rows")
    parser.add_argument("--layers", type=report.positive, default=NUM_LAYERS)
    arguments = device.parse(parser)
    if arguments.tiny:
        arguments.layers, arguments.repeats = 1, 1
    copied = device.copy_bandwidth(arguments)
    for name in PAIRS:
        for hashed in (False, True):
            measure(arguments, name, hashed, copied)


def measure(given: Namespace, name: str, hashed: bool, copied: float) -> None:
    """One line."""
    scale = 64 if given.tiny else 1
    read, written = PAIRS[name]
    shapes = weights(scale) * given.layers + [(VOCABULARY // scale, HIDDEN // scale, 0)] * 2
    pieces = pieces_of(shapes, given.ranks)
    where = {"device": given.device}
    sources = [torch.ones(height * width, dtype=read, **where) for height, width, _ in shapes]
    targets = [torch.zeros(h * w // (1 if cut < 0 else 2), dtype=written, **where) for h, w, cut in shapes]
    extra: dict[str, Any] = {}
    if hashed:
        extra = {"hashes": torch.zeros(len(shapes), dtype=torch.int64, **where), "seeds": torch.arange(len(shapes))}
    num_bytes = int(pieces.num_elements.sum()) * (read.itemsize + written.itemsize)
    call = lambda: copy_pieces(pieces, sources, targets, **extra)  # noqa: E731
    # Several calls in a row, waited for at the end: the device works while Python prepares the next call.
    several = device.seconds_each(call, given)
    single = [device.seconds_of(call, given.device)[0] for _ in range(given.repeats)]
    rate = num_bytes / median(several)
    compiled = native.operator("strided_copy", torch.device(given.device).type) is not None
    report.print_line(
        f"gpu_strided_copy {name}{' hashed' if hashed else ''}",
        ours=rate,
        peer=copied,
        ratio=rate / copied,
        unit="bytes/s",
        hardware=device.hardware(given.device),
        settings=report.settings(given, pieces=len(pieces)),
        details={
            "num_bytes": num_bytes,
            "seconds": report.spread(several),
            "call_seconds": report.spread(single),
            "call_ratio": num_bytes / median(single) / copied,
            "bar": BAR,
            "aim": AIM,
            "bar_met": rate / copied >= BAR,
            "compiled": compiled,
        },
    )


if __name__ == "__main__":
    main()
