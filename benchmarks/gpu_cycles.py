"""Memory over 50 training steps with vLLM in the process, to find what each step leaves behind.

A model of 0.5B's shape trains on short completions; after every step the memory in use on the device and of the process
is read. One line of JSON: `ours` is the growth in bytes on the device from the tenth step to the last, by a line fitted
to the readings; the bar is 64 MiB. The details have the same for host memory, and all readings.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.gpu_sleep import used_bytes  # noqa: E402
from benchmarks.workload import CHARACTERS, build_tokenizer, spread  # noqa: E402

BAR_BYTES = 64 << 20
WARM_UP = 10


def main() -> None:
    """One line."""
    parser = device.parser_of(__doc__, repeats=50)
    parser.add_argument("--engine", choices=("vllm", "inplace"), default="vllm")
    arguments = device.parse(parser)
    if arguments.tiny:
        arguments.repeats = 3
    if arguments.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        left_out = {"left_out": "vllm is not installed"}
        device.print_line(
            arguments, "gpu_cycles vllm", ours=None, peer=None, ratio=None, unit="bytes", details=left_out
        )
        return
    readings = train(arguments)
    grown = {name: growth(values, arguments) for name, values in readings.items()}
    details: dict[str, Any] = {"host_bytes": grown["host"], "bar": BAR_BYTES, "bar_met": grown["device"] < BAR_BYTES}
    name = f"gpu_cycles {arguments.engine} {arguments.repeats}"
    ours = grown["device"] if not arguments.tiny else None
    device.print_line(
        arguments, name, ours=ours, peer=None, ratio=None, unit="bytes", details=details | {"readings": readings}
    )


def growth(values: list[int], given: Namespace) -> float:
    """Bytes between the first and the last step that count, by least squares."""
    counted = values if given.tiny else values[WARM_UP:]
    return float(np.polyfit(range(len(counted)), counted, 1)[0] * (len(counted) - 1))


def train(given: Namespace) -> dict[str, list[int]]:
    """Bytes in use after every step, on the device and of this process."""
    from hybrid_rl import Trainer

    shape = device.TINY_FOR_VLLM if given.tiny else device.SHAPES["0.5B"]
    model = device.plain_model(given, shape, 128, device.DTYPES[given.dtype])
    rows = [{"prompt": CHARACTERS.strip()[index % 7 :]} for index in range(4 * given.repeats)]
    keys: dict[str, Any] = {"engine": "vllm"} if given.engine == "vllm" else {}
    readings: dict[str, list[int]] = {"device": [], "host": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(
            model,
            spread,
            rows,
            tokenizer=build_tokenizer(),
            max_steps=given.repeats,
            prompts_per_step=4,
            num_generations=4,
            max_completion_length=8 if given.tiny else 64,
            kv_cache_memory_bytes=(64 if given.tiny else 1024) << 20,
            output_dir=folder,
            **keys,
        ) as trainer,
    ):
        for step in range(given.repeats):
            trainer.step()
            readings["device"].append(used_bytes(given))
            readings["host"].append(psutil.Process().memory_info().rss)
            report.progress(f"step {step + 1}: {readings['device'][-1] / 2**20:.0f} MiB")
    return readings


if __name__ == "__main__":
    main()
