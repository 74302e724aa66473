"""Seconds of a weight handoff from FSDP2 shards into live vLLM engines on two CPU ranks of one host: written by plan
from the ranks' own memory, against gathering every tensor (`full_tensor`) for vLLM's `load_weights`.

Every step moves all weights first, so that nothing can be left as it was; sides take turns, and what one wrote has to
be, bit for bit, what the other one wrote.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.config.engine_keys import VLLMArgs  # noqa: E402
from hybrid_rl.config.schema import VLLMRolloutConfig  # noqa: E402
from hybrid_rl.controller.ranks import object_gather  # noqa: E402
from hybrid_rl.engines.base import TAGS  # noqa: E402
from hybrid_rl.resharding.handoff.base import HandoffReport, Source  # noqa: E402
from hybrid_rl.resharding.handoff.distributed import DistributedSource  # noqa: E402
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource  # noqa: E402
from hybrid_rl.resharding.handoff.verify import Verifier  # noqa: E402
from hybrid_rl.resharding.layout import SourceLayout  # noqa: E402
from hybrid_rl.resharding.rank_plan import BUCKET_BYTES  # noqa: E402
from hybrid_rl.training.sharding.fsdp import (  # noqa: E402
    ShardOptions,
    Shards,
    device_mesh,
    move_to_region,  # noqa: E402
    shard,
)
from hybrid_rl.weights.sources import named_weights  # noqa: E402

NUM_RANKS = 2
TIMEOUT = timedelta(minutes=10)
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


@dataclass
class Times:
    """Seconds of the slowest rank, and the most memory that a rank took beside what it had, per handoff."""

    seconds: list[float]
    extra_bytes: list[int]


def main() -> int:
    """Print one line per tensor-parallel size and transport."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[2, 1], choices=[1, 2])
    parser.add_argument("--transport", nargs="+", default=["ipc", "distributed"], choices=["ipc", "distributed"])
    parser.add_argument("--layers", type=report.positive, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--handoffs", type=report.positive, default=9, help="of each side, after one to warm up")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("benchmarks/handoff.py needs vLLM: make vllm")
    for threads in arguments.threads:
        for tensor_parallel in arguments.tensor_parallel:
            for transport in arguments.transport:
                report.progress(f"tensor parallel {tensor_parallel}, {transport}, {threads} thread(s) a rank")
                print_result(arguments, threads, tensor_parallel, transport)
    return 0


def print_result(arguments: Namespace, threads: int, tensor_parallel: int, transport: str) -> None:
    """Run both ranks and print what they measured."""
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiving, sending = spawn.Pipe(duplex=False)
        ranks = [
            spawn.Process(target=run_rank, args=(rank, folder, sending, arguments, threads, tensor_parallel, transport))
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        sending.close()
        try:
            results: dict[str, Any] = receiving.recv()
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                process.kill()
    ours, verified, peer = results["ours"], results["verified"], results["peer"]
    plan, extra = results["plan"], max(results["ours"].extra_bytes)
    report.print_line(
        "handoff",
        ours=median(ours.seconds),
        peer=median(peer.seconds),
        ratio=report.ratio_of_medians(peer.seconds, ours.seconds),
        unit="seconds",
        hardware=report.hardware(threads, {"vllm": results["vllm"]}),
        settings=report.settings(
            arguments, threads=threads, tensor_parallel=tensor_parallel, transport=transport, ranks=NUM_RANKS
        ),
        details={
            "model_bytes_bfloat16": results["model_bytes"],
            "ours_seconds": report.spread(ours.seconds),
            "ours_with_verification_seconds": report.spread(verified.seconds),
            "ratio_with_verification": report.ratio_of_medians(peer.seconds, verified.seconds),
            "peer_seconds": report.spread(peer.seconds),
            "ours_extra_peak_bytes": extra,
            "peer_extra_peak_bytes": max(peer.extra_bytes),
            "bucket_bytes": results["bucket_bytes"],
            "plan_of_rank_0": plan,
        },
    )


def run_rank(
    rank: int, folder: str, sending: Any, arguments: Namespace, threads: int, tensor_parallel: int, transport: str
) -> None:
    """One rank: shards, an engine, and both ways between them."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    store = dist.FileStore(str(Path(folder) / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    gather = object_gather(NUM_RANKS, TIMEOUT)
    bench = Bench(rank, gather, arguments, tensor_parallel, transport)
    results = bench.run(arguments.handoffs)
    if rank == 0:
        sending.send(results)
    bench.close()
    dist.destroy_process_group()


class Bench:
    """The trainer's shards and the engine of one rank."""

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]],
        arguments: Namespace,
        tensor_parallel: int,
        transport: str,
    ) -> None:
        from hybrid_rl.vllm.library import VLLMEngine

        self.rank, self.gather = rank, gather
        self.shards = sharded_model({**SHAPE, "num_hidden_layers": arguments.layers}, arguments.seed)
        region = move_to_region(self.shards, "actor")
        config = VLLMRolloutConfig(
            tensor_parallel_size=tensor_parallel,
            kv_cache_memory_bytes=2**24,
            max_num_seqs=8,
            engine_args=VLLMArgs(enforce_eager=True),
        )
        self.engine = VLLMEngine(
            self.shards.module, config, dtype=torch.bfloat16, device=torch.device("cpu"), max_length=128
        )
        self.engine.wake(TAGS)
        tensors = named_weights(self.shards.module)
        layout = SourceLayout.of(tensors, gather(socket.gethostname()))
        self.source: Source = DistributedSource(layout, rank, tensors, gather=gather)
        if transport == "ipc":
            self.source = IpcSource.connect(layout, IpcExport(layout, rank, tensors, [region]), gather)
        self.verifier = Verifier(self.engine.weights.trace, layout, gather=gather)
        self.version = 0
        self.last: HandoffReport | None = None

    def run(self, num_handoffs: int) -> dict[str, Any]:
        """Take turns; what rank 0 tells."""
        sides = {"ours": self.ours, "verified": self.verified, "peer": self.peer}
        times = {name: Times([], []) for name in sides}
        for turn in range(num_handoffs + 1):
            self.train()
            written: dict[str, list[Tensor]] = {}
            for name, side in sides.items():
                seconds, extra = self.measured(side)
                if turn:
                    times[name].seconds.append(seconds)
                    times[name].extra_bytes.append(extra)
                written[name] = [tensor.clone() for tensor in self.engine.weights.destinations]
                for tensor in self.engine.weights.destinations:
                    tensor.zero_()
            if not all(map(torch.equal, written["ours"], written["peer"])):
                raise AssertionError("the two ways wrote different weights")
            del written
            gc.collect()
        assert self.last is not None
        plan = {
            "written_bytes": self.last.num_bytes,
            "minimum_bytes": self.last.minimum_bytes,
            "bytes_by_link": dict(self.last.link_bytes),
            "engine_bytes": self.engine.weight_bytes,
            "pieces": self.last.num_pieces,
            "buckets": self.last.num_buckets,
            "staging_bytes": self.last.staging_bytes,
        }
        num_elements = sum(p.numel() for p in self.shards.module.parameters())
        return {
            **times,
            "plan": plan,
            "model_bytes": 2 * num_elements,
            "bucket_bytes": BUCKET_BYTES,
            "vllm": vllm_version(),
        }

    def measured(self, side: Callable[[], None]) -> tuple[float, int]:
        """Seconds from when the last rank begins to when the last one is done, and the memory that it took."""
        gc.collect()
        process = psutil.Process()
        reset_peak()
        before = process.memory_info().rss
        self.gather(None)
        start = time.perf_counter()
        side()
        self.gather(None)
        seconds = time.perf_counter() - start
        return max(self.gather(seconds)), max(self.gather(peak_bytes() - before))

    def train(self) -> None:
        """Weights that no handoff has seen."""
        with torch.no_grad():
            for parameter in self.shards.module.parameters():
                parameter.to_local().normal_(0, 0.02)  # type: ignore[attr-defined]

    def ours(self) -> None:
        """Write by plan."""
        self.version += 1
        self.last = self.engine.update_weights(self.source, self.version)

    def verified(self) -> None:
        """Write by plan, then re-read and compare every byte."""
        self.ours()
        self.verifier.verify(self.source, self.engine.weights.destinations, version=self.version)

    def peer(self) -> None:
        """Gather every tensor on every rank, for vLLM's own loader, which casts."""

        def full() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in self.shards.module.named_parameters():
                yield name, parameter.full_tensor()  # type: ignore[attr-defined]

        with torch.no_grad():
            model: Any = self.engine.weights.model
            model.load_weights(full())

    def close(self) -> None:
        """Release the engine and the source."""
        self.engine.close()
        self.source.close()


def sharded_model(shape: dict[str, Any], seed: int) -> Shards:
    """A Qwen2 of random weights over all ranks, in fp32, to be computed in bf16; never whole on any of them."""
    with torch.device("meta"):
        module = Qwen2ForCausalLM(Qwen2Config(**shape))
    options = ShardOptions(1, NUM_RANKS, torch.bfloat16)
    shards = shard(module, device_mesh(options, "cpu"), options)
    module.to_empty(device="cpu")
    torch.manual_seed(seed + dist.get_rank())
    return shards


def vllm_version() -> str:
    """The version of whatever vLLM is called here."""
    from hybrid_rl.vllm.versions import installed_version

    return str(installed_version())


def reset_peak() -> None:
    """Make the largest resident set of this process the present one."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The largest resident set since `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
