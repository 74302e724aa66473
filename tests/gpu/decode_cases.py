"""Cases and a plain PyTorch reference for paged decode attention, on any device.

As a script it runs the cases on the CPU through Triton's interpreter, which must be chosen before Triton is imported
(TRITON_INTERPRET=1), and prints one JSON object: gaps, by case the largest gap to the reference, relative to the
largest value; plans, what is wrong with the plan of each of PLANS, null if nothing is. With the argument `swept` it
runs what else there is: the cases in SWEPT, which `make sweep` alone runs in the interpreter.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.gpu.interpreter import use_interpreter


@dataclass(frozen=True)
class Case:
    """One call. lengths: tokens in the cache per sequence, 0 = padding of the batch."""

    name: str
    lengths: tuple[int, ...] = (1, 7, 33, 70)
    num_heads: int = 4
    num_key_heads: int = 2
    dim: int = 32
    value_dim: int | None = None
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    spare_table: int = 0  # entries of the block table behind the longest sequence
    table_by_block: bool = False  # the entries of all sequences for one block lie side by side
    strided: bool = False  # caches and queries are views of larger tensors


RAGGED = (1, 2, 15, 16, 17, 130, 0, 300, 64)
FEW = (17, 0, 300)  # one part, none, three: where it is not the lengths that are new
CASES = [
    Case("plain"),
    Case("one sequence", lengths=(513,)),
    Case("one token", lengths=(1,)),
    Case("padding", lengths=(0, 5, 0, 0, 40, 0)),
    Case("only padding", lengths=(0, 0)),
    *(Case(f"block {size}", RAGGED, block_size=size) for size in (1, 4, 16, 32)),
    *(Case(f"group {ratio}", FEW, num_heads=2 * ratio) for ratio in (1, 2, 3, 4, 5, 6, 7, 8)),
    Case("one key head", FEW, num_heads=20, num_key_heads=1),
    *(Case(f"dim {dim}", (3, 90), dim=dim) for dim in (8, 36, 64, 80, 96, 112, 128, 192, 256)),
    Case("value dim", (3, 90), dim=48, value_dim=32),
    *(Case(f"window {window}", RAGGED, block_size=4, window=window) for window in (1, 3, 16, 64, 200, 1000)),
    *(Case(f"softcap {cap}", FEW, softcap=cap) for cap in (0.5, 30.0)),
    Case("window and softcap", RAGGED, window=21, softcap=2.0, block_size=4),
    Case("scale", scale=0.7),
    Case("wide table", FEW, spare_table=300),
    Case("strided", FEW, strided=True),
    Case("table by block", FEW, block_size=4, table_by_block=True),
    Case("one long among short", lengths=(3, 1900, 0, 40, 129), num_heads=2, num_key_heads=1, dim=16),
]
# Between the ones that stay, of the same kind.
SWEPT = {
    *(f"block {size}" for size in (1, 32)),
    *(f"group {ratio}" for ratio in (2, 3, 4, 6, 7)),
    *(f"dim {dim}" for dim in (8, 64, 80, 96, 112, 128, 192)),
    *(f"window {window}" for window in (3, 16, 200, 1000)),
    *("wide table", "one key head", "softcap 30.0", "padding"),
}
# (lengths, key heads, window, programs wanted) -> tokens of a part, worked out by hand.
PLANS = [
    ((128,), 2, None, 64, 128),  # nothing to cut
    ((4096,), 2, None, 64, 128),  # 64 programs / 2 key heads = 32 parts of 128
    ((4096,), 2, None, 16, 512),  # 8 parts
    ((32768,), 1, None, 4096, 256),  # 128 parts at most
    ((1000, 1000, 0, 50), 1, None, 8, 384),  # 2050 tokens / 8 = 257, rounded up to whole 128
    ((1000, 1000, 0, 50), 1, 200, 8, 128),  # 450 tokens are seen
    ((300,) * 260, 4, None, 16, 19584),  # 78,000 / 4: the batch alone fills the device, and has two tiles
]


def build(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `paged_decode`. What must not be read is NaN (cache) or far out of range (block table)."""
    generator = torch.Generator().manual_seed(3)
    value_dim = case.value_dim or case.dim
    needed = [-(-length // case.block_size) for length in case.lengths]
    num_blocks = sum(needed) + 2
    free = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((len(case.lengths), max(max(needed), 1) + case.spare_table), 2**30, dtype=torch.int32)
    caches = []
    for dim in (case.dim, value_dim):
        shape = (num_blocks, case.block_size, case.num_key_heads * (2 if case.strided else 1), dim)
        caches.append(torch.full(shape, torch.nan))
    caches = [cache[:, :, :: 2 if case.strided else 1] for cache in caches]
    for row, length in enumerate(case.lengths):
        blocks = [free.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for token in range(length):
            for cache in caches:
                place = cache[blocks[token // case.block_size], token % case.block_size]
                place.copy_(torch.randn(place.shape, generator=generator))
    query = torch.randn(len(case.lengths), 2 * case.num_heads, case.dim, generator=generator)
    query = query[:, ::2] if case.strided else query[:, : case.num_heads].contiguous()
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    key_cache, value_cache = (_moved(cache, device, dtype) for cache in caches)
    return {
        "query": _moved(query, device, dtype),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table.t().contiguous().to(device).t() if case.table_by_block else table.to(device),
        "context_length": lengths.to(device),
        "scale": case.scale,
        "window": case.window,
        "softcap": case.softcap,
    }


def _moved(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """On the device, with the strides that it has."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return moved.copy_(tensor)


def reference(arguments: dict[str, Any]) -> Tensor:
    """The same in float64, sequence by sequence and head by head."""
    query, keys, values = (arguments[name].double().cpu() for name in ("query", "key_cache", "value_cache"))
    table, lengths = arguments["block_table"].cpu(), arguments["context_length"].tolist()
    num_heads, dim = query.shape[1:]
    group = num_heads // keys.shape[2]
    scale = dim**-0.5 if arguments["scale"] is None else arguments["scale"]
    out = torch.zeros(len(lengths), num_heads, values.shape[3], dtype=torch.float64)
    for row, length in enumerate(lengths):
        begin = 0 if arguments["window"] is None else max(0, length - arguments["window"])
        tokens = [(int(table[row, t // keys.shape[1]]), t % keys.shape[1]) for t in range(begin, length)]
        for head in range(num_heads if tokens else 0):
            k = torch.stack([keys[block, place, head // group] for block, place in tokens])
            v = torch.stack([values[block, place, head // group] for block, place in tokens])
            scores = scale * (k @ query[row, head])
            if arguments["softcap"] is not None:
                scores = arguments["softcap"] * torch.tanh(scores / arguments["softcap"])
            out[row, head] = scores.softmax(0) @ v
    return out


def newest(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Take the key and value of the newest token of every sequence out of the caches, which hold NaN there then."""
    taken: list[list[Tensor]] = [[], []]
    caches = (arguments["key_cache"], arguments["value_cache"])
    for row, length in enumerate(arguments["context_length"].tolist()):
        for cache, rows in zip(caches, taken, strict=True):
            if length == 0:
                rows.append(torch.full_like(cache[0, 0], torch.inf))
                continue
            block = int(arguments["block_table"][row, (length - 1) // cache.shape[1]])
            place = cache[block, (length - 1) % cache.shape[1]]
            rows.append(place.clone())
            place.fill_(torch.nan)
    key, value = (torch.stack(rows) for rows in taken)
    return key, value


def gap(case: Case, device: str, dtype: torch.dtype) -> float:
    """Largest difference of kernel and reference, relative to the largest value; infinite where either is NaN, or where
    storing the newest keys and values did not give the caches that they were taken from, to the bit."""
    from hybrid_rl.engines.inplace.triton_decode import paged_decode, paged_store  # Triton, which not everybody has

    arguments = build(case, device, dtype)
    expected = reference(arguments)
    names = ("key_cache", "value_cache", "block_table", "context_length")
    before = [arguments[name].clone() for name in names[:2]]
    paged_store(*newest(arguments), *(arguments[name] for name in names))
    for name, cache in zip(names[:2], before, strict=True):
        if not torch.equal(arguments[name].nan_to_num(nan=7e4), cache.nan_to_num(nan=7e4)):
            return float("inf")
    out = paged_decode(**arguments)
    if out.dtype != dtype or not out.isfinite().all():
        return float("inf")
    padding = [row for row, length in enumerate(case.lengths) if length == 0]
    if out[padding].count_nonzero():
        return float("inf")
    return float((out.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def plan_problem(
    lengths: tuple[int, ...], heads: int, window: int | None, programs: int, size: int, device: str = "cpu"
) -> str | None:
    """What is wrong with the plan of a batch: its parts must tile what every sequence sees, in pieces of `size`."""
    from hybrid_rl.engines.inplace.triton_decode import plan_parts  # Triton, which not everybody has

    lengths_there = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = plan_parts(lengths_there, num_key_heads=heads, window=window, num_programs=programs)
    if len(plan.parts) != len(lengths) + programs // heads:
        return f"room for {len(plan.parts)} parts"
    expected: list[list[int]] = []
    first = [0]
    for row, end in enumerate(lengths):
        begin = 0 if window is None else max(0, end - window)
        expected += [[row, at, min(at + size, end)] for at in range(begin, end, size)]
        first.append(len(expected))
    if plan.first.tolist() != first or plan.parts[: len(expected)].tolist() != expected:
        return f"first {plan.first.tolist()}, parts {plan.parts[: plan.first[-1]].tolist()}"
    return None


def main() -> None:
    """Run cases in float32, a few in the narrow types."""
    use_interpreter()
    swept = sys.argv[1:] == ["swept"]
    gaps = {case.name: gap(case, "cpu", torch.float32) for case in CASES if (case.name in SWEPT) is swept}
    problems = [] if swept else [plan_problem(*plan) for plan in PLANS]
    if not swept:
        gaps |= {"bfloat16": gap(CASES[0], "cpu", torch.bfloat16), "float16": gap(CASES[0], "cpu", torch.float16)}
    print(json.dumps({"gaps": gaps, "plans": problems}))


if __name__ == "__main__":
    main()
