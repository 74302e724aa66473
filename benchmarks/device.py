"""Shared parts of the benchmarks gpu_*.py: device, clocks that wait for it, models of Qwen2.5's shapes, output."""

from __future__ import annotations

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import report
from benchmarks.workload import EOS_ID, PAD_ID

# Dense bf16 FLOP/s of the tensor cores without sparsity, from NVIDIA's data sheets, and bytes/s of the memory.
PEAKS = {
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.864e12),
    "B200": (2250e12, 8.0e12),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    vocab_size: int
    is_tied: bool = True  # one table for embedding and head

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_heads


# Qwen2.5's, the largest first.
SHAPES = {
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, is_tied=False),
    "3B": Shape(2048, 11008, 36, 16, 2, 151936),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936),
}
TINY = Shape(32, 48, 2, 4, 2, 97)
TINY_FOR_VLLM = Shape(128, 256, 2, 4, 2, 128)  # heads of 32, the smallest that vLLM takes on CPUs


def parser_of(doc: str | None, *, repeats: int) -> ArgumentParser:
    """Make a parser with the arguments that all of them have. repeats: the default."""
    parser = ArgumentParser(description=(doc or "").partition("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: to see that it runs, not how fast")
    parser.add_argument("--repeats", type=report.positive, default=repeats, help="measurements that count")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse(parser: ArgumentParser) -> Namespace:
    """Parse the arguments. Ends the script if the device does not exist."""
    arguments = parser.parse_args()
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device; --device cpu --tiny shows that the script runs")
    return arguments


def config_of(shape: Shape, max_positions: int) -> Qwen2Config:
    """The configuration of a shape."""
    return Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=shape.is_tied,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )


def shape_of(name: str, *, layers: int | None = None) -> Shape:
    """Return a shape of SHAPES; layers: only so many of its layers, for models that do not fit."""
    return SHAPES[name] if layers is None else replace(SHAPES[name], num_layers=layers)


def plain_model(given: Namespace, shape: Shape, max_positions: int, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Make a random Qwen2 on the device in its dtype, without a larger copy at any moment."""
    torch.manual_seed(given.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(given.device):
            module: Any = Qwen2ForCausalLM(config_of(shape, max_positions))
    finally:
        torch.set_default_dtype(before)
    return module.eval()


def model_of(
    given: Namespace, *, max_positions: int, ends: float | None, shape: Shape | None = None
) -> Qwen2ForCausalLM:
    """Make a random Qwen2 in which every position ends a completion with probability `ends` (None: never).

    shape: None is that of 0.5B; with --tiny always the smallest.

    EOS gets a row of zeros in the head, so its logit is only a bias. The other logits of a random model are nearly
    equal everywhere, so their sum on a few random tokens gives the bias.
    """
    shape = TINY if given.tiny else shape or SHAPES["0.5B"]
    module: Any = plain_model(given, shape, max_positions, DTYPES[given.dtype])
    bias = torch.zeros(shape.vocab_size, device=given.device, dtype=module.dtype)
    with torch.no_grad():
        module.lm_head.weight[EOS_ID] = 0
        context = torch.randint(2, shape.vocab_size, (4, 16), device=given.device)
        logits = module(input_ids=context, use_cache=False).logits.float()
        logits[..., EOS_ID] = -math.inf
        others = float(logits.logsumexp(-1).mean())
    bias[EOS_ID] = -1e4 if ends is None else others + math.log(ends / (1 - ends))
    module.lm_head.bias = nn.Parameter(bias)
    return module


def synchronize(device: str) -> None:
    """Wait until the device has done all of its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(function: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Wall seconds of a call, the device's work included, and what it returned."""
    synchronize(device)
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return time.perf_counter() - start, result


def seconds_each(function: Callable[[], Any], given: Namespace, calls: int = 10) -> list[float]:
    """Seconds of one call, `repeats` times over several calls in a row, after a warm-up."""
    calls = 1 if given.tiny else calls
    for _ in range(1 if given.tiny else 3):
        function()

    def several() -> None:
        for _ in range(calls):
            function()

    return [seconds_of(several, given.device)[0] / calls for _ in range(given.repeats)]


def captured(function: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the kernels of a call as a CUDA graph, to time the device without Python's launches; on a CPU the call."""
    if torch.device(device).type != "cuda":
        return function
    function()  # compiles outside of the capture
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def copy_bandwidth(given: Namespace) -> float:
    """Bytes read and written per second by a plain copy of 1 GiB of random bytes on the device."""
    size = 1 << (16 if given.tiny else 30)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=given.device)
    target = torch.empty_like(source)
    return 2 * size / median(seconds_each(lambda: target.copy_(source), given))


def peaks(device: str) -> tuple[float | None, float | None]:
    """Peak bf16 FLOP/s and bytes/s of the device; None where it is not in the table."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    entries = [PEAKS[key] for key in PEAKS if key in name]
    return entries[0] if entries else (None, None)


def hardware(device: str) -> dict[str, Any]:
    """The machine, its GPU included."""
    machine = report.hardware(torch.get_num_threads(), {})
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return machine


def print_line(
    given: Namespace,
    name: str,
    *,
    ours: float | None,
    peer: float | None,
    ratio: float | None,
    unit: str,
    details: dict[str, Any],
    **more: Any,
) -> None:
    """The line of JSON of one measurement. more: settings besides the command line."""
    report.print_line(
        name,
        ours=ours,
        peer=peer,
        ratio=ratio,
        unit=unit,
        hardware=hardware(given.device),
        settings=report.settings(given, **more),
        details=details,
    )


def peak_memory_bytes(device: str) -> int | None:
    """Most bytes that tensors held since `reset_peak`; None on a CPU, where PyTorch does not count."""
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else None


def reset_peak(device: str) -> None:
    """Reset the peak of memory."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
