"""Residents that wait in host memory: the bandwidth of their copies, and what they cost a training step.

Two lines of bandwidth, for sleep and wake of the masters and Adam moments of a model; `peer` is what a plain copy of
one block between the device and pinned memory reaches in the same run. Bar of both: 80 % of it, aim 90 %. Then one line
of the seconds of a GRPO step with offload on; `peer` is the same step with offload off.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.gpu_limits import pinned_rates  # noqa: E402
from benchmarks.workload import CHARACTERS, build_tokenizer, spread  # noqa: E402
from hybrid_rl import Trainer  # noqa: E402
from hybrid_rl.memory.arena import HostArena  # noqa: E402
from hybrid_rl.memory.offload import OffloadedTensors  # noqa: E402

BAR, AIM = 0.8, 0.9
COPIES_OF_A_PARAMETER = 3  # in float32: master, and Adam's two moments
MOVED = ["optimizer"]
WARM_UP = 2


def main() -> None:
    """Bandwidth, then steps."""
    parser = device.parser_of(__doc__, repeats=5)
    parser.add_argument("--shape", choices=tuple(device.SHAPES), default="0.5B")
    parser.add_argument("--prompts", type=report.positive, default=16)
    parser.add_argument("--num-generations", type=report.positive, default=8)
    arguments = device.parse(parser)
    if arguments.tiny:
        arguments.prompts, arguments.num_generations, arguments.repeats = 2, 2, 1
    measure_copies(arguments)
    gc.collect()
    measure_steps(arguments)


def measure_copies(given: Namespace) -> None:
    """The lines of sleep and wake."""
    limits = pinned_rates(given)
    tensors = states_of(given)
    arena = HostArena(given.device)
    offloaded = OffloadedTensors("optimizer", lambda: tensors, arena)
    check = sum(float(tensor.sum(dtype=torch.float64)) for tensor in tensors)
    seconds: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(given.repeats + 1):
        seconds["sleep"].append(device.seconds_of(offloaded.sleep, given.device)[0])
        seconds["wake"].append(device.seconds_of(offloaded.wake, given.device)[0])
    assert check == sum(float(tensor.sum(dtype=torch.float64)) for tensor in tensors)
    for name, limit in (("sleep", limits["device to pinned"]), ("wake", limits["pinned to device"])):
        rates = [offloaded.num_bytes / s for s in seconds[name][1:]]  # the first sleep pins the memory
        ratio = median(rates) / limit
        details = {
            "bytes": offloaded.num_bytes,
            "num_tensors": len(tensors),
            "host_bytes": arena.num_bytes,
            "first_seconds": seconds[name][0],
            "rates": report.spread(rates),
            "bar": BAR,
            "bar_met": ratio >= BAR,
            "aim": AIM,
        }
        device.print_line(
            given,
            f"gpu_offload {name}",
            ours=median(rates),
            peer=limit,
            ratio=ratio,
            unit="bytes/s",
            details=details,
        )
    arena.close()


def states_of(given: Namespace) -> list[Tensor]:
    """What the optimizer holds of every parameter."""
    shape = device.TINY if given.tiny else device.SHAPES[given.shape]
    with torch.device("meta"):
        module = device.Qwen2ForCausalLM(device.config_of(shape, 64))
    return [
        torch.randn(parameter.shape, device=given.device)
        for parameter in module.parameters()
        for _ in range(COPIES_OF_A_PARAMETER)
    ]


def measure_steps(given: Namespace) -> None:
    """The line of steps."""
    results = {name: steps(given, moved) for name, moved in (("off", []), ("on", MOVED))}
    device.print_line(
        given,
        f"gpu_offload step {given.shape}",
        ours=median(results["on"]["seconds"]),
        peer=median(results["off"]["seconds"]),
        ratio=report.ratio_of_medians(peer=results["off"]["seconds"], ours=results["on"]["seconds"]),
        unit="s/step",
        details={
            name: {"seconds": report.spread(of["seconds"]), "peak_memory_bytes": of["peak_memory_bytes"]}
            for name, of in results.items()
        },
        offload=MOVED,
    )


def steps(given: Namespace, moved: list[str]) -> dict[str, Any]:
    """Seconds of every step that counts, and the most memory that tensors took, with these residents moved."""
    longest = 8 if given.tiny else 256
    model = device.model_of(given, max_positions=128 + longest, ends=4 / longest, shape=device.SHAPES[given.shape])
    num_steps = given.repeats + (0 if given.tiny else WARM_UP)
    rows = [{"prompt": CHARACTERS.strip()[index % 7 :]} for index in range(given.prompts * num_steps)]
    device.reset_peak(given.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(
            model,
            spread,
            rows,
            tokenizer=build_tokenizer(),
            max_steps=num_steps,
            prompts_per_step=given.prompts,
            num_generations=given.num_generations,
            max_completion_length=longest,
            dtype=given.dtype,
            offload=moved,
            output_dir=folder,
        ) as trainer,
    ):
        seconds = [device.seconds_of(trainer.step, given.device)[0] for _ in range(num_steps)]
    del trainer, model
    gc.collect()
    if torch.device(given.device).type == "cuda":
        torch.cuda.empty_cache()
    return {"seconds": seconds[-given.repeats :], "peak_memory_bytes": device.peak_memory_bytes(given.device)}


if __name__ == "__main__":
    main()
