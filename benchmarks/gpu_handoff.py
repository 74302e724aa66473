"""Weights from a trainer in float32 into vLLM in bfloat16, in one process on one GPU, for the largest model that fits.

Two lines of JSON. `handoff`: seconds of `update_weights` by the traced write; `peer` is what vLLM's own weight transfer
does once the tensors have arrived on this GPU, cast to the engine's dtype: its layer by layer reload (in the details:
its loader alone, one tensor after another, and from a full state in bfloat16). `bandwidth`: bytes read and written per
second while a plan is carried out, with and without the content hash; `peer` is what a plain copy reads and writes.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.device import SHAPES, Shape  # noqa: E402

MAX_LENGTH = 64
# Trainer, engine, a full state; and room for the other memory of vLLM and CUDA.
BYTES_PER_PARAMETER, ROOM_BYTES = 4 + 2 + 2, 6 << 30


def main() -> None:
    """Both lines."""
    parser = device.parser_of(__doc__, repeats=5)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: the largest that fits")
    arguments = device.parse(parser)
    if arguments.tiny:
        arguments.repeats = 1
    if importlib.util.find_spec("vllm") is None:
        for name in ("handoff", "bandwidth"):
            left_out = {"left_out": "vllm is not installed"}
            device.print_line(
                arguments, f"gpu_handoff {name}", ours=None, peer=None, ratio=None, unit="", details=left_out
            )
        return
    arguments.shape = "tiny" if arguments.tiny else arguments.shape or largest(arguments)
    shape = device.TINY_FOR_VLLM if arguments.tiny else SHAPES[arguments.shape]
    measure(arguments, device.plain_model(arguments, shape, MAX_LENGTH, torch.float32))


def largest(given: Namespace) -> str:
    """The first shape that fits in memory; the smallest if the memory is unknown."""
    if torch.device(given.device).type != "cuda":
        return list(SHAPES)[-1]
    free = torch.cuda.mem_get_info()[0] - ROOM_BYTES
    fitting = [name for name, shape in SHAPES.items() if num_parameters(shape) * BYTES_PER_PARAMETER < free]
    return (fitting or list(SHAPES)[-1:])[0]


def num_parameters(shape: Shape) -> int:
    """Parameters of a shape."""
    with torch.device("meta"):
        module = Qwen2ForCausalLM(device.config_of(shape, MAX_LENGTH))
    return sum(parameter.numel() for parameter in module.parameters())


def measure(given: Namespace, module: Any) -> None:
    """Engine, handoffs, verdict."""
    from hybrid_rl.config.engine_keys import VLLMArgs
    from hybrid_rl.config.schema import VLLMRolloutConfig
    from hybrid_rl.engines.base import TAGS
    from hybrid_rl.resharding.handoff.tensor import TensorSource
    from hybrid_rl.resharding.handoff.verify import Verifier
    from hybrid_rl.vllm.library import VLLMEngine  # imports vLLM

    engine = VLLMEngine(
        module,
        VLLMRolloutConfig(
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            engine_args=VLLMArgs(max_num_batched_tokens=256, enforce_eager=True),
        ),
        dtype=device.DTYPES[given.dtype],
        device=torch.device(given.device),
        max_length=MAX_LENGTH,
    )
    engine.wake(TAGS)
    source = TensorSource.of(module)
    reports = [engine.update_weights(source, version + 1) for version in range(given.repeats + 1)]
    seconds = [item.seconds for item in reports[1:]]
    extra = extra_bytes(given, lambda: engine.update_weights(source, len(reports) + 1))
    weights = engine.weights
    verify_seconds = Verifier(weights.trace, source.layout()).verify(
        source, weights.destinations, version=len(reports) + 1
    )
    measure_bandwidth(given, source, weights)
    # Last, because what vLLM's reload leaves behind need not be where the plan writes.
    peers = {name: timed(given, lambda load=load: load(module, engine)) for name, load in PEERS.items()}
    details = {
        "seconds": report.spread(seconds),
        "first_seconds": reports[0].seconds,  # makes the plan
        "verify_seconds": verify_seconds,
        "link_bytes": dict(reports[-1].link_bytes),
        "num_pieces": reports[-1].num_pieces,
        "num_buckets": reports[-1].num_buckets,
        "staging_bytes": reports[-1].staging_bytes,
        "extra_bytes": extra,
        "derived": dict(weights.derived.reasons),
        "num_parameters": sum(parameter.numel() for parameter in module.parameters()),
        "peers": peers,
    }
    ours, peer = median(seconds), peers["weight_transfer"]["seconds"]
    name = f"gpu_handoff handoff {given.shape}"
    device.print_line(given, name, ours=ours, peer=peer, ratio=peer / ours, unit="s", details=details)
    engine.close()


def measure_bandwidth(given: Namespace, source: Any, weights: Any) -> None:
    """Measure the plan by itself, beside a plain copy."""
    from hybrid_rl.resharding.rank_plan import make_plan

    layout = source.layout()
    plan = make_plan(weights.trace, layout, 0)
    names = [sharded.spec.name for sharded in layout.tensors]
    num_bytes = 0
    for bucket in plan.buckets:
        sizes = [source.tensors[name].itemsize for name in names], [t.itemsize for t in weights.destinations]
        for count, taken, put in zip(
            bucket.pieces.num_elements, bucket.pieces.source, bucket.pieces.destination, strict=True
        ):
            num_bytes += int(count) * (sizes[0][taken] + sizes[1][put])
    plain = median(device.seconds_each(lambda: source.deliver(plan, weights.destinations), given, calls=3))
    copied = device.copy_bandwidth(given)
    details = {
        "seconds": plain,
        "num_bytes": num_bytes,
        "num_buckets": len(plan.buckets),
        "peak_share": None if (peak := device.peaks(given.device)[1]) is None else num_bytes / plain / peak,
    }
    rate, name = num_bytes / plain, f"gpu_handoff bandwidth {given.shape}"
    device.print_line(given, name, ours=rate, peer=copied, ratio=rate / copied, unit="bytes/s", details=details)


def cast(module: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
    """The trainer's tensors in the engine's dtype, each made when it is asked for."""
    dtype = next(model.parameters()).dtype
    return ((name, parameter.detach().to(dtype)) for name, parameter in module.named_parameters())


def one_by_one(module: Any, engine: Any) -> None:
    """Cast a tensor, let vLLM's loader copy it, go on to the next."""
    engine.weights.model.load_weights(cast(module, engine.weights.model))


def full_state(module: Any, engine: Any) -> None:
    """Cast everything, then let vLLM's loader copy it."""
    engine.weights.model.load_weights(iter([*cast(module, engine.weights.model)]))


def weight_transfer(module: Any, engine: Any) -> None:
    """vLLM's reload of live weights, as its weight transfer engines begin and end an update."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = engine.weights.model
    initialize_layerwise_reload(model)
    model.load_weights(cast(module, model))
    finalize_layerwise_reload(model, engine._llm.vllm_config.model_config)


PEERS: dict[str, Callable[[Any, Any], None]] = {
    "one_by_one": one_by_one,
    "full_state": full_state,
    "weight_transfer": weight_transfer,
}


def timed(given: Namespace, call: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a call, and its memory above what was there before."""
    with torch.no_grad():
        extra = extra_bytes(given, call)
        return {"seconds": median(device.seconds_each(call, given, calls=1)), "extra_bytes": extra}


def extra_bytes(given: Namespace, call: Callable[[], Any]) -> int | None:
    """The most bytes that a call takes; None on a CPU."""
    if torch.device(given.device).type != "cuda":
        call()
        return None
    before = torch.cuda.memory_allocated()
    device.reset_peak(given.device)
    call()
    device.synchronize(given.device)
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
