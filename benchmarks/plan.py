"""What planning a handoff costs, and what the plan moves: seconds and bytes per rank against gathering full tensors.

One rank of a model of many billions of parameters on 64 to 1024 ranks is planned on one core, from the shapes of the
trainer's tensors (fp32, FSDP2) and of the engine's (bf16, tensor parallel within a host). Nothing is allocated or sent.
Prints a table to stderr and one line of JSON per case.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.resharding.layout import SourceLayout, TensorSpec  # noqa: E402
from hybrid_rl.resharding.pieces import overlaps  # noqa: E402
from hybrid_rl.resharding.plan import Traffic, make_plan, traffic  # noqa: E402
from hybrid_rl.resharding.tables import MAX_DIMS, Copies  # noqa: E402
from hybrid_rl.resharding.trace import DestinationSpec, Fills, Trace  # noqa: E402

SOURCE, ENGINE = torch.float32, torch.bfloat16
RANKS_PER_HOST = 8
NONE, NO_DIMS = np.empty(0, dtype=np.int64), np.empty((0, MAX_DIMS), dtype=np.int64)
NO_FILLS = Fills(NONE, NONE, NO_DIMS, NO_DIMS, np.empty(0))
Taken = tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]  # name and shape of a source, the box that is taken


@dataclass
class Engine:
    """What one tensor-parallel rank of an engine takes, in the engine's order and as fused as vLLM's models are."""

    tp: int
    rank: int
    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    destinations: list[DestinationSpec] = field(default_factory=list)
    copies: list[list[int]] = field(default_factory=list)

    def take(self, *parts: Taken, stacked: int | None = None) -> None:
        """A destination of the parts below each other; of 3-dim parts, one by one for each of the first `stacked`."""
        extents = [[high - low for low, high in box] for _, _, box in parts]
        shape = [*extents[0]]
        shape[-2 if len(shape) > 1 else 0] = sum(extent[-2 if len(shape) > 1 else 0] for extent in extents)
        strides = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
        offset = 0
        rest = MAX_DIMS - len(shape)
        for (name, whole, box), extent in zip(parts, extents, strict=True):
            number = list(self.sources).index(name) if name in self.sources else len(self.sources)
            self.sources[name] = whole
            for row in range(stacked or 1):
                low, high = [a for a, _ in box], [b for _, b in box]
                at = offset
                if stacked:
                    low[0], high[0], at = row, row + 1, offset + row * strides[0]
                self.copies.append(
                    [number, *low, *[0] * rest, *high, *[1] * rest, len(self.destinations), at, *strides, *[0] * rest]
                )
            offset += extent[-2 if len(shape) > 1 else 0] * strides[-2 if len(shape) > 1 else 0]
        name = f"engine.{len(self.destinations)}"
        self.destinations.append(DestinationSpec(name, tuple(shape), tuple(strides), ENGINE))

    def whole(self, *parts: tuple[str, tuple[int, ...]]) -> None:
        """Replicated."""
        self.take(*((name, shape, tuple((0, extent) for extent in shape)) for name, shape in parts))

    def share(self, name: str, shape: tuple[int, ...], dim: int, of: tuple[int, int] | None = None) -> Taken:
        """This rank's part along one dim; of: of a range of it only."""
        begin, end = of or (0, shape[dim])
        step = (end - begin) // self.tp
        box = [(0, extent) for extent in shape]
        box[dim] = (begin + self.rank * step, begin + (self.rank + 1) * step)
        return name, shape, tuple(box)

    def experts(self, name: str, count: int, inner: int, hidden: int) -> None:
        """Stacked experts, each taken by itself: gate, up and down."""
        fused, down = (count, 2 * inner, hidden), (count, hidden, inner)
        gate, up = ((half * inner, (half + 1) * inner) for half in range(2))
        self.take(
            *(self.share(f"{name}.gate_up_proj", fused, 1, of=half) for half in (gate, up)),
            stacked=count,
        )
        self.take(self.share(f"{name}.down_proj", down, 2), stacked=count)

    def mlp(self, name: str, inner: int, hidden: int) -> None:
        """Gate and up fused, down."""
        self.take(*(self.share(f"{name}.{half}_proj.weight", (inner, hidden), 0) for half in ("gate", "up")))
        self.take(self.share(f"{name}.down_proj.weight", (hidden, inner), 1))

    def trace(self) -> Trace:
        """As the tracer would tell it."""
        rows, d = np.array(self.copies, dtype=np.int64), MAX_DIMS
        copies = Copies(
            source=rows[:, 0],
            low=rows[:, 1 : 1 + d],
            high=rows[:, 1 + d : 1 + 2 * d],
            destination=rows[:, 1 + 2 * d],
            offset=rows[:, 2 + 2 * d],
            strides=rows[:, 3 + 2 * d :],
        )
        sources = tuple(TensorSpec(name, shape, SOURCE) for name, shape in self.sources.items())
        return Trace(sources, tuple(self.destinations), copies, NO_FILLS, {}, ())


def qwen3_30b_a3b(tp: int, rank: int) -> Trace:
    """Qwen3-30B-A3B: 48 layers of 128 experts, 32 heads and 4 for keys of 128."""
    engine, hidden, vocab, heads, key_heads, head = Engine(tp, rank), 2048, 151936, 32, 4, 128
    engine.take(engine.share("model.embed_tokens.weight", (vocab, hidden), 0))
    for layer in range(48):
        at = f"model.layers.{layer}"
        key_rows = (key_heads * head, hidden)
        key_begin = rank * key_heads // tp * head  # ranks beyond the number of key heads share them
        key_box = ((key_begin, key_begin + max(1, key_heads // tp) * head), (0, hidden))
        engine.take(
            engine.share(f"{at}.self_attn.q_proj.weight", (heads * head, hidden), 0),
            *((f"{at}.self_attn.{kind}_proj.weight", key_rows, key_box) for kind in "kv"),
        )
        engine.take(engine.share(f"{at}.self_attn.o_proj.weight", (hidden, heads * head), 1))
        engine.whole((f"{at}.mlp.gate.weight", (128, hidden)))
        engine.experts(f"{at}.mlp.experts", 128, 768, hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            engine.whole((f"{at}.{norm}.weight", (hidden,)))
        for norm in "qk":
            engine.whole((f"{at}.self_attn.{norm}_norm.weight", (head,)))
    engine.whole(("model.norm.weight", (hidden,)))
    engine.take(engine.share("lm_head.weight", (vocab, hidden), 0))
    return engine.trace()


def deepseek_v3(tp: int, rank: int) -> Trace:
    """DeepSeek-V3 without its multi-token module and without quantisation: 671 billion parameters in 61 layers."""
    engine, hidden, vocab, heads, rope, latent = Engine(tp, rank), 7168, 129280, 128, 64, 512
    engine.take(engine.share("model.embed_tokens.weight", (vocab, hidden), 0))
    for layer in range(61):
        at = f"model.layers.{layer}"
        engine.whole(
            (f"{at}.self_attn.q_a_proj.weight", (1536, hidden)),
            (f"{at}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)),
        )
        engine.take(engine.share(f"{at}.self_attn.q_b_proj.weight", (heads * (128 + rope), 1536), 0))
        engine.take(engine.share(f"{at}.self_attn.kv_b_proj.weight", (heads * 256, latent), 0))
        engine.take(engine.share(f"{at}.self_attn.o_proj.weight", (hidden, heads * 128), 1))
        norms = {"self_attn.q_a_layernorm": 1536, "self_attn.kv_a_layernorm": latent}
        for norm, extent in (norms | dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)).items():
            engine.whole((f"{at}.{norm}.weight", (extent,)))
        if layer < 3:
            engine.mlp(f"{at}.mlp", 18432, hidden)
            continue
        engine.whole((f"{at}.mlp.gate.weight", (256, hidden)))
        engine.whole((f"{at}.mlp.gate.e_score_correction_bias", (256,)))
        engine.experts(f"{at}.mlp.experts", 256, 2048, hidden)
        engine.mlp(f"{at}.mlp.shared_experts", 2048, hidden)
    engine.whole(("model.norm.weight", (hidden,)))
    engine.take(engine.share("lm_head.weight", (vocab, hidden), 0))
    return engine.trace()


@dataclass(frozen=True)
class Case:
    """A model on so many ranks, in so many groups that hold everything each."""

    model: str
    build: Callable[[int, int], Trace]
    tp: int
    num_ranks: int
    replicas: int = 1


CASES = (
    Case("Qwen3-30B-A3B", qwen3_30b_a3b, 1, 64),
    Case("Qwen3-30B-A3B", qwen3_30b_a3b, 4, 8),
    Case("Qwen3-30B-A3B", qwen3_30b_a3b, 4, 64),
    Case("Qwen3-30B-A3B", qwen3_30b_a3b, 4, 64, replicas=8),
    Case("Qwen3-30B-A3B", qwen3_30b_a3b, 8, 64),
    Case("DeepSeek-V3", deepseek_v3, 8, 256),
    Case("DeepSeek-V3", deepseek_v3, 8, 1024),
    Case("DeepSeek-V3", deepseek_v3, 8, 1024, replicas=8),
)


def gathered(layout: SourceLayout, rank: int) -> dict[str, Traffic]:
    """What `full_tensor` receives on a rank over each link, in the trainer's dtype."""
    shape = np.ones((len(layout.tensors), MAX_DIMS), dtype=np.int64)
    for row, tensor in enumerate(layout.tensors):
        shape[row, : len(tensor.spec.shape)] = tensor.spec.shape
    number, zeros = np.arange(len(shape), dtype=np.int64), np.zeros_like(shape)
    read = np.array([tensor.spec.dtype.itemsize for tensor in layout.tensors], dtype=np.int64)
    whole = Copies(number, zeros, shape, number, zeros[:, 0], zeros)
    return traffic(overlaps(whole, layout, read, rank), layout, rank, read, read)


def measure(case: Case, given: Namespace) -> dict[str, Any]:
    """Plans of some ranks: seconds, and the means of their bytes."""
    hosts = [f"host{rank // RANKS_PER_HOST}" for rank in range(case.num_ranks)]
    sources = case.build(case.tp, 0).sources
    begin = time.perf_counter()
    layout = SourceLayout.fsdp(sources, case.num_ranks, replicas=case.replicas, hosts=hosts)
    layout_seconds = time.perf_counter() - begin
    seconds, reports, received = [], [], []
    for rank in np.linspace(0, case.num_ranks - 1, given.repeats).astype(int).tolist():
        trace = case.build(case.tp, rank % case.tp)
        begin = time.perf_counter()
        reports.append(make_plan(trace, layout, rank).report)
        seconds.append(time.perf_counter() - begin)
        received.append(gathered(layout, rank))
    written = fmean(found.total.written_bytes for found in reports)
    num_elements = sum(spec.num_bytes // spec.dtype.itemsize for spec in sources)
    return {
        "model": case.model,
        "parameters": num_elements,
        "ranks": case.num_ranks,
        "replicas": case.replicas,
        "tensor_parallel": case.tp,
        "plan_seconds": report.spread(seconds),
        "layout_seconds": layout_seconds,
        "num_copies": len(trace.copies),
        "num_pieces": max(found.num_pieces for found in reports),
        "num_buckets": max(found.num_buckets for found in reports),
        # A rank reads its own part and what its host holds where it lies; what comes from other hosts is cast first.
        "local_read_bytes": fmean(found.local.read_bytes for found in reports),
        "host_read_bytes": fmean(found.host.read_bytes for found in reports),
        "remote_sent_bytes": fmean(found.remote.written_bytes for found in reports),
        "written_bytes": written,
        "minimum_written_bytes": fmean(found.minimum.written_bytes for found in reports),
        "staging_bytes": max(found.point_to_point_staging_bytes for found in reports),
        "gather_host_bytes": fmean(links["host"].read_bytes for links in received),
        "gather_remote_bytes": fmean(links["remote"].read_bytes for links in received),
        # Every tensor in full in the trainer's dtype, again in the engine's, and the rank's share by load_weights.
        "gather_written_bytes": num_elements * (SOURCE.itemsize + ENGINE.itemsize) + written,
        "gather_staging_bytes": max(spec.num_bytes for spec in sources) * (1 + ENGINE.itemsize / SOURCE.itemsize),
    }


def show(found: list[dict[str, Any]]) -> None:
    """The table, in GB per rank."""
    columns = {
        "local": "local_read_bytes",
        "host": "host_read_bytes",
        "remote": "remote_sent_bytes",
        "written": "written_bytes",
        "gather: host": "gather_host_bytes",
        "remote ": "gather_remote_bytes",
        "written ": "gather_written_bytes",
    }
    table = Table("model", "tp", "ranks", "replicas", "plan, s", "pieces", *columns, title="GB per rank")
    for line in found:
        table.add_row(
            line["model"],
            *(str(line[key]) for key in ("tensor_parallel", "ranks", "replicas")),
            f"{line['plan_seconds']['median']:.2f}",
            str(line["num_pieces"]),
            *(f"{line[key] / 1e9:.2f}" for key in columns.values()),
        )
    Console(stderr=True, width=150).print(table)


def main() -> None:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=sorted({case.model for case in CASES}), help="which models")
    parser.add_argument("--repeats", type=report.positive, default=5, help="ranks that are planned")
    given = parser.parse_args()
    found = []
    for case in CASES:
        if case.model not in given.models:
            continue
        report.progress(f"{case.model}, tensor parallel {case.tp}, {case.num_ranks} ranks")
        line = measure(case, given)
        found.append(line)
        report.print_line(
            "plan",
            ours=line["written_bytes"],
            peer=line["gather_written_bytes"],
            ratio=line["gather_written_bytes"] / line["written_bytes"],
            unit="bytes written per rank",
            hardware=report.hardware(1, {}),
            settings=report.settings(given),
            details=line,
        )
    show(found)


if __name__ == "__main__":
    main()
