"""Cost of vLLM's sleep and wake in a training step: asleep with both tags, weights awake, handoff, KV cache awake.

One line of JSON. `ours` is the seconds of all these moves except the handoff; `peer` is the time to copy the weights to
pinned host memory and back on this device: the least that a sleep which keeps them can take. The details have each move
by itself, the bytes that sleeping frees, and the bytes that stay.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.gpu_limits import pinned_rates  # noqa: E402

MAX_LENGTH = 64


def main() -> None:
    """One line."""
    parser = device.parser_of(__doc__, repeats=7)
    parser.add_argument("--shape", choices=tuple(device.SHAPES), default="0.5B")
    parser.add_argument("--cache-gib", type=report.positive, default=8, help="of the KV cache")
    arguments = device.parse(parser)
    if arguments.tiny:
        arguments.repeats = 1
    if importlib.util.find_spec("vllm") is None:
        left_out = {"left_out": "vllm is not installed"}
        device.print_line(arguments, "gpu_sleep", ours=None, peer=None, ratio=None, unit="s", details=left_out)
        return
    measure(arguments)


def measure(given: Namespace) -> None:
    """Engine, training steps' worth of moves, the line."""
    from hybrid_rl.config.engine_keys import VLLMArgs
    from hybrid_rl.config.schema import VLLMRolloutConfig
    from hybrid_rl.engines.base import KV_CACHE, TAGS, WEIGHTS
    from hybrid_rl.resharding.handoff.tensor import TensorSource
    from hybrid_rl.vllm.library import VLLMEngine  # imports vLLM

    rates = pinned_rates(given)
    shape = device.TINY_FOR_VLLM if given.tiny else device.SHAPES[given.shape]
    module = device.plain_model(given, shape, MAX_LENGTH, device.DTYPES[given.dtype])
    cache_bytes = 64 << 20 if given.tiny else given.cache_gib << 30
    engine = VLLMEngine(
        module,
        VLLMRolloutConfig(
            max_num_seqs=4,
            kv_cache_memory_bytes=cache_bytes,
            engine_args=VLLMArgs(max_num_batched_tokens=256, enforce_eager=True),
        ),
        dtype=device.DTYPES[given.dtype],
        device=torch.device(given.device),
        max_length=MAX_LENGTH,
    )
    source = TensorSource.of(module)
    moves = {
        "wake_weights": lambda _: engine.wake({WEIGHTS}),
        "handoff": lambda version: engine.update_weights(source, version),
        "wake_kv_cache": lambda _: engine.wake({KV_CACHE}),
        "sleep": lambda _: engine.sleep(TAGS),
    }
    cycles, awake, asleep = [], 0, 0
    for version in range(1, given.repeats + 3):
        cycle = {}
        for name, move in moves.items():
            awake = used_bytes(given) if name == "sleep" else awake
            cycle[name] = device.seconds_of(lambda move=move, version=version: move(version), given.device)[0]
        asleep = used_bytes(given)
        cycles.append(cycle)
    cycles = cycles[2:]  # the first two load libraries and make the plan
    ours = median(sum(cycle.values()) - cycle["handoff"] for cycle in cycles)
    copied = sum(engine.weight_bytes / rate for rate in rates.values())
    details: dict[str, Any] = {name: report.spread([cycle[name] for cycle in cycles]) for name in moves}
    details |= {
        "weight_bytes": engine.weight_bytes,
        "kv_cache_bytes": engine.kv_cache_bytes,
        "given_back_bytes": awake - asleep,
        "can_sleep": engine.can_sleep,
    }
    shown = "tiny" if given.tiny else given.shape
    device.print_line(
        given, f"gpu_sleep {shown}", ours=ours, peer=copied, ratio=copied / ours, unit="s", details=details
    )
    engine.close()


def used_bytes(given: Namespace) -> int:
    """Memory in use on the device; 0 on a CPU."""
    if torch.device(given.device).type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    main()
