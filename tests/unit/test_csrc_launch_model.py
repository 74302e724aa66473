"""The kernels of csrc for CUDA, compiled as C++ over a stand-in of the launch model (`launch_model/`) with the address
and the undefined-behaviour sanitizer, against the operator for CPUs, to the bit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.extras.plan.trace_files import load_trace
from hybrid_rl.extras.plan.traffic import fsdp_layout
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Pieces
from hybrid_rl.resharding.execute import HashedBoxes, copy_pieces, hash_pieces
from hybrid_rl.resharding.rank_plan import make_plan

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).parent / "launch_model"
LAYOUTS = ROOT / "benchmarks" / "layouts"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASTS = [(a, b) for a in FLOATS for b in FLOATS]
PLAIN = (torch.uint8, torch.int16, torch.int32, torch.float64)
PAIRS = [pair for pair in CASTS if pair[0] != pair[1]] + [(dtype, dtype) for dtype in PLAIN]
WIDTHS, PATHS = 6, ("aligned", "shifted", "turned", "scattered")
MOST_UNITS = 1 << 31


@dataclass
class Case:
    """One call of the operator: its table, and the tensors whose memory the table names."""

    table: Tensor
    hashes: Tensor
    tensors: list[tuple[Tensor, bool]]  # and whether it is written
    expected: list[Tensor]  # of the written ones, then the hashes
    most_units: int = MOST_UNITS


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as a program that takes cases."""
    return compile_model(tmp_path_factory.mktemp("launch_model"), ROOT / "csrc")


def compile_model(folder: Path, csrc: Path) -> Path:
    """The program of the sources in `csrc`; skips if there is no compiler with sanitizers."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    probe = folder / "probe.cpp"
    probe.write_text("#include <ucontext.h>\nint main() { _Float16 one = 1; return one != 1; }\n")
    made = [compiler, "-std=c++20", *sanitize, str(probe), "-o", str(folder / "probe")]
    if subprocess.run(made, capture_output=True, check=False).returncode != 0:
        pytest.skip("g++ has no sanitizers, no ucontext or no _Float16")
    target, source = folder / "strided_copy", folder / "strided_copy.cpp"
    # Beside its own copy of the sources, which a test may break.
    source.write_text(
        (MODEL / "strided_copy.cpp")
        .read_text()
        .replace("../../../csrc/strided_copy_kernels.cu", "strided_copy_kernels.cu")
    )
    command = [
        compiler,
        "-O0",
        "-g1",
        "-std=c++20",
        *sanitize,
        "-fno-strict-aliasing",
    ]  # as nvcc: bits are read as bits
    command += [f"-I{MODEL}", f"-I{csrc}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def run(program: Path, cases: Sequence[Case], folder: Path) -> np.ndarray:
    """Run the cases and compare all that they wrote; the number of pieces by width, path and whether hashed."""
    given, found = folder / "cases", folder / "results"
    with given.open("wb") as file:
        file.write(np.int64(len(cases)).tobytes())
        for case in cases:
            head = [case.most_units, len(case.table), len(case.hashes), len(case.tensors)]
            file.write(np.array(head, dtype=np.int64).tobytes())
            file.write(case.table.numpy().tobytes() + case.hashes.numpy().tobytes())
            for tensor, is_written in case.tensors:
                about = [tensor.data_ptr(), tensor.nbytes, is_written]
                file.write(np.array(about, dtype=np.int64).tobytes() + bytes_of(tensor))
    done = subprocess.run([str(program), str(given), str(found)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    results = memoryview(found.read_bytes())
    for number, case in enumerate(cases):
        *written, hashes = case.expected
        for what, tensor in [("hashes", hashes), *((f"tensor {i}", tensor) for i, tensor in enumerate(written))]:
            content, results = results[: tensor.nbytes], results[tensor.nbytes :]
            assert content == bytes_of(tensor), f"case {number}: {what} differ"
    assert not len(results)
    counts = np.zeros((WIDTHS, len(PATHS), 2), dtype=np.int64)
    for line in done.stdout.splitlines():
        width, path, hashed, count = map(int, line.split())
        counts[width, path, hashed] = count
    return counts


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Recorder:
    """Stands in for native.operator: keeps what the operator is called with, and does nothing."""

    def __init__(self) -> None:
        self.table = self.hashes = torch.empty(0)

    def __call__(self, name: str, device_type: str = "cpu") -> Any:
        def record(table: Tensor, hashes: Tensor) -> None:
            self.table, self.hashes = table.clone(), hashes.clone()

        return record


def case_of(
    pieces: Pieces, sources: list[Tensor], targets: list[Tensor], hashed: bool, most_units: int = MOST_UNITS
) -> Case:
    """A copy, with what the CPU makes of it."""
    hashes = torch.arange(5, 5 + len(sources)) if hashed else torch.zeros(0, dtype=torch.int64)
    extra: dict[str, Any] = {"hashes": hashes, "seeds": torch.arange(len(sources)) * 7919 - 3} if hashed else {}
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "operator", recorder)
        copy_pieces(pieces, sources, targets, **extra)
    before = [target.clone() for target in targets]
    copy_pieces(pieces, sources, targets, **extra)
    expected = [target.clone() for target in targets]
    for target, kept in zip(targets, before, strict=True):
        target.copy_(kept)
    tensors = [(source, False) for source in sources] + [(target, True) for target in targets]
    return Case(recorder.table, recorder.hashes, tensors, [*expected, hashes], most_units)


def hash_case(boxes: HashedBoxes, tensors: list[Tensor], dtypes: list[torch.dtype]) -> Case:
    """Boxes that are hashed and not copied."""
    hashes, seeds = torch.zeros(len(tensors), dtype=torch.int64), torch.arange(len(tensors))
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "operator", recorder)
        hash_pieces(boxes, tensors, dtypes, hashes=hashes, seeds=seeds)
    hash_pieces(boxes, tensors, dtypes, hashes=hashes, seeds=seeds)
    return Case(recorder.table, recorder.hashes, [(tensor, False) for tensor in tensors], [hashes])


# ------------------------------------------------------------------------------------------------------------- pieces


@dataclass(frozen=True)
class Side:
    """Where a piece lies in one tensor, whose memory begins `shift` elements after a multiple of 64 bytes."""

    strides: tuple[int, ...]
    offset: int = 0
    shift: int = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, draw: np.random.Generator) -> Tensor:
        """Any bits, in as much memory as the piece reaches and no byte more."""
        reach = self.offset + 1 + sum((n - 1) * step for n, step in zip(shape, self.strides, strict=True))
        count = reach if min(shape, default=1) > 0 else self.offset
        raw = torch.from_numpy(draw.integers(0, 256, (self.shift + count) * dtype.itemsize, dtype=np.uint8))
        memory = torch.empty(len(raw), dtype=torch.uint8)  # 64-aligned, unlike NumPy's
        return memory.copy_(raw).view(dtype)[self.shift :]


@dataclass(frozen=True)
class Box:
    """A piece: shape, source, destination, number of the first element in the global tensor."""

    shape: tuple[int, ...]
    source: Side
    target: Side
    number: int = 0
    global_strides: tuple[int, ...] | None = None


def table_of(boxes: Sequence[Box]) -> Pieces:
    """Each box between tensors of its own."""

    def dims(values: Sequence[Sequence[int]], fill: int) -> np.ndarray:
        return np.array([[*row, *[fill] * (MAX_DIMS - len(row))] for row in values], dtype=np.int64)

    number = np.arange(len(boxes), dtype=np.int64)
    return Pieces(
        source=number,
        source_rank=np.zeros_like(number),
        source_offset=np.array([box.source.offset for box in boxes], dtype=np.int64),
        source_strides=dims([box.source.strides for box in boxes], 0),
        destination=number,
        destination_offset=np.array([box.target.offset for box in boxes], dtype=np.int64),
        destination_strides=dims([box.target.strides for box in boxes], 0),
        shape=dims([box.shape for box in boxes], 1),
        global_offset=np.array([box.number for box in boxes], dtype=np.int64),
        global_strides=dims([box.global_strides or box.source.strides for box in boxes], 0),
    )


def copies(
    boxes: Sequence[Box], dtypes: tuple[torch.dtype, torch.dtype], seed: int, most_units: int = MOST_UNITS
) -> Iterator[Case]:
    """The boxes copied in one call, without and with their hash."""
    draw = np.random.default_rng(seed)
    sources = [box.source.tensor(box.shape, dtypes[0], draw) for box in boxes]
    targets = [box.target.tensor(box.shape, dtypes[1], draw) for box in boxes]
    for hashed in (False, True):
        yield case_of(table_of(boxes), sources, targets, hashed, most_units)


def directed() -> list[Box]:
    """One or more for every path and every branch in it."""
    edge = 2**32 - 700  # the upper half of the elements' numbers changes within the piece
    return [
        Box((300,), Side((1,)), Side((1,)), edge),  # less than a word, or no multiple of one, at the end
        Box((5, 64), Side((80, 1)), Side((64, 1)), edge),  # rows of whole words
        Box((9, 301), Side((301, 1)), Side((303, 1)), edge),  # every row begins elsewhere
        Box((3, 200), Side((256, 1), 3, 1), Side((208, 1), 5), edge),
        Box((2, 200), Side((256, 1), 0, 5), Side((208, 1), 0, 2), edge),
        *(Box((90,), Side((1,), 0, shift), Side((1,), 0, 7), edge) for shift in (2, 4)),  # a word from before the row
        Box((70, 9), Side((9, 1)), Side((11, 1)), edge),  # rows too short for words
        Box((128, 64), Side((1, 128)), Side((64, 1)), edge),  # whole tiles, aligned
        Box((64, 70), Side((1, 64)), Side((72, 1)), edge),
        Box((2, 130, 67), Side((9000, 1, 132)), Side((9000, 67, 1), 1), edge),  # ragged ones
        Box((80, 96), Side((1, 80), 2, 1), Side((96, 1)), edge),  # unaligned source
        Box((80, 96), Side((1, 80)), Side((96, 1), 3), edge),  # unaligned destination
        Box((20, 30), Side((60, 2)), Side((90, 3)), edge),  # nothing runs through
        Box((7, 6, 5, 4), Side((1, 7, 42, 210)), Side((120, 20, 4, 1)), edge),
        Box((1,), Side((1,), 0, 1), Side((1,), 0, 3)),
        Box((0, 5), Side((5, 1)), Side((5, 1))),  # nothing at all
    ]


def random_box(draw: np.random.Generator) -> Box:
    """A shape, and strides of any order with gaps on both sides."""
    extents = draw.choice([1, 2, 3, 5, 8, 16, 17, 40, 63, 64, 65, 130, 301], draw.integers(1, MAX_DIMS + 1)).tolist()
    while np.prod(extents) > 12_000:
        extents.pop()
    sides = []
    for _ in range(2):
        strides, step = [0] * len(extents), int(draw.choice([1, 1, 1, 1, 2]))
        order = range(len(extents)) if draw.random() < 0.5 else draw.permutation(len(extents)).tolist()
        for dim in reversed(list(order)):
            strides[dim] = step
            step = step * extents[dim] + int(draw.choice([0, 0, 0, 1, 8, 16]))
        sides.append(Side(tuple(strides), int(draw.choice([0, 0, 1, 8, 16])), int(draw.choice([0, 0, 1, 3, 4, 7]))))
    number = int(draw.choice([0, 2**32 - 900, 2**40 + 5]))
    return Box(tuple(extents), *sides, number)


def real(path: Path, num_ranks: int, count: int, draw: np.random.Generator) -> list[Box]:
    """Some pieces that the last engine of `num_ranks` ranks takes of a model of real size: shapes cut to what a
    stand-in can run, strides to what holds them with the same rest by 64, offsets to that rest."""
    trace = load_trace(path)
    plan = make_plan(trace, fsdp_layout(trace.sources, num_ranks), num_ranks - 1)
    pieces = Pieces.join([bucket.pieces for bucket in plan.buckets])
    number = pieces.num_elements
    kinds = np.unique(np.stack([pieces.shape.max(axis=1), number], axis=1), axis=0, return_index=True)[1]
    rows = draw.choice(kinds, min(count, len(kinds)), replace=False)
    return [_shrunk(pieces, int(row)) for row in rows]


def _shrunk(pieces: Pieces, row: int) -> Box:
    shape = tuple(n if n <= 150 else 128 + n % 64 for n in pieces.shape[row].tolist())
    sides = []
    for strides, offset in (
        (pieces.source_strides, pieces.source_offset),
        (pieces.destination_strides, pieces.destination_offset),
    ):
        small, span = [0] * MAX_DIMS, 1
        for dim in sorted(range(MAX_DIMS), key=lambda d: strides[row, d]):
            if shape[dim] > 1:
                step = int(strides[row, dim])
                small[dim] = span + (step - span) % 64
                span = small[dim] * shape[dim]
        sides.append(Side(tuple(small), int(offset[row]) % 64))
    return Box(shape, *sides, int(pieces.global_offset[row]), tuple(pieces.global_strides[row].tolist()))


# -------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.slow
def test_every_kernel_copies_and_hashes_as_the_cpu_does(program: Path, tmp_path: Path) -> None:
    cases = [case for i, pair in enumerate(PAIRS) for case in copies(directed(), pair, i)]
    counts = run(program, cases, tmp_path)
    assert counts.min() > 0, f"kernels that had no piece: {np.argwhere(counts == 0).tolist()}"


@pytest.mark.slow
def test_random_strides_dtypes_and_alignments(program: Path, tmp_path: Path) -> None:
    run(program, random_cases(len(PAIRS), 11), tmp_path)


@pytest.mark.slow
@pytest.mark.sweep
def test_many_random_strides_dtypes_and_alignments(program: Path, tmp_path: Path) -> None:
    run(program, random_cases(200, 12), tmp_path)


def random_cases(count: int, seed: int) -> list[Case]:
    draw = np.random.default_rng(seed)
    cases = []
    for number in range(count):
        boxes = [random_box(draw) for _ in range(draw.integers(1, 5))]
        cases += list(copies(boxes, PAIRS[number % len(PAIRS)], number))
    return cases


@pytest.mark.slow
def test_pieces_of_several_blocks_and_pieces_that_are_cut(program: Path, tmp_path: Path) -> None:
    boxes = [
        Box((70_000,), Side((1,)), Side((1,))),
        Box((50_001,), Side((1,), 1), Side((1,), 2)),
        Box((200, 260), Side((1, 200)), Side((260, 1))),
        Box((20_000,), Side((3,)), Side((2,))),
    ]
    run(program, list(copies(boxes, (torch.float32, torch.bfloat16), 1)), tmp_path)
    run(program, list(copies(boxes, (torch.bfloat16, torch.bfloat16), 1, 9000)), tmp_path)


@pytest.mark.slow
def test_hash_of_what_is_only_read(program: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    cases = []
    for read in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        boxes = [box for box in directed() if min(box.shape) > 0]
        pieces = table_of(boxes)
        tensors = [box.source.tensor(box.shape, read, draw) for box in boxes]
        written = [read, *(dtype for dtype in FLOATS if read in FLOATS)]
        for number in range(len(written)):
            boxes = HashedBoxes(
                tensor=pieces.source,
                offset=pieces.source_offset,
                strides=pieces.source_strides,
                shape=pieces.shape,
                dtype=np.full_like(pieces.source, number),
                parameter=pieces.source,
                global_offset=pieces.global_offset,
                global_strides=pieces.global_strides,
            )
            cases.append(hash_case(boxes, tensors, written))
    run(program, cases, tmp_path)


@pytest.mark.slow
def test_pieces_of_real_models(program: Path, tmp_path: Path) -> None:
    check_real(
        program, tmp_path, [LAYOUTS / f"{name}.npz" for name in ("qwen2.5-7b-tp2-rank1", "qwen3-30b-a3b-tp1-rank0")]
    )


@pytest.mark.slow
@pytest.mark.sweep
def test_pieces_of_all_real_models(program: Path, tmp_path: Path) -> None:
    paths = sorted(LAYOUTS.glob("*.npz"))
    assert len(paths) > 20
    check_real(program, tmp_path, paths)


def check_real(program: Path, folder: Path, paths: Sequence[Path]) -> None:
    cases = []
    for number, path in enumerate(paths):
        size = int(path.stem.split("-tp")[1].split("-")[0])
        boxes = real(path, max(7, size) // size * size, 12, np.random.default_rng(number))
        for pair in (CASTS[1], (torch.int16, torch.int16)):  # a cast, and bfloat16's bits
            cases += list(copies(boxes, pair, number))
    counts = run(program, cases, folder)
    assert counts.sum() >= 30 * len(paths) and (counts[:, :2].sum(axis=(0, 2)) > 0).all()


# file, what stands there, what a slip would have made of it
SLIPS = {
    "a word of the source past the row": (
        "strided_copy_kernels.cu",
        " && words + span <= row + int64_t{length} * W::kFrom",
        "",
    ),
    "a word of the source before the row": ("strided_copy_kernels.cu", "words >= row && ", ""),
    "elements past the end of a row": (
        "strided_copy_kernels.cu",
        "min((slot + 1) * kCount - offset, length)",
        "(slot + 1) * kCount - offset",
    ),
    "a row that ends in one word more": (
        "strided_copy_kernels.cu",
        "(length + 2 * (count - 1)) / count",
        "length / count",
    ),
    "bytes that are shifted by twos": ("strided_copy_group.cuh", "(shift & 3u) * 8", "(shift & 2u) * 8"),
    "hash: the upper half of numbers": (
        "strided_copy_group.cuh",
        "if (upper == static_cast<uint32_t>((number + (kCount - 1) * stride) >> 32))",
        "if (true)",
    ),
    "hash: the blocks of a piece": (
        "strided_copy_kernels.cu",
        "if (threadIdx.x == 0) {\n      unsigned",
        "if (threadIdx.x == 0 && blockIdx.x == 0) {\n      unsigned",
    ),
    "tile: read before it is full": (
        "strided_copy_kernels.cu",
        "    __syncthreads();\n    if (e.wide_target",
        "    if (e.wide_target",
    ),
    "tile: filled before it is read": (
        "strided_copy_kernels.cu",
        "    __syncthreads(); // the next tile takes its place\n",
        "",
    ),
    "tile: ragged lines by words": (
        "strided_copy_kernels.cu",
        "e.wide_target && width % kWideTo == 0",
        "e.wide_target",
    ),
    "words of 16 bytes at multiples of 8": (
        "strided_copy_kernels.cu",
        "return rest % 16 == 0;",
        "return rest % 8 == 0;",
    ),
    "a NaN that keeps its bits": ("strided_copy_group.cuh", "return is_nan ? 0x7FC0u :", "return false ? 0x7FC0u :"),
}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_the_kernels_is_found(tmp_path: Path, slip: str) -> None:
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    file, right, wrong = SLIPS[slip]
    text = (csrc / file).read_text()
    assert text.count(right) == 1
    (csrc / file).write_text(text.replace(right, wrong))
    program = compile_model(tmp_path, csrc)
    pairs = [CASTS[1], *((dtype, dtype) for dtype in (torch.uint8, torch.int16))]
    boxes = [*directed(), Box((200, 260), Side((1, 200)), Side((260, 1)))]
    cases = [case for i, pair in enumerate(pairs) for case in copies(boxes, pair, i)]
    with pytest.raises(AssertionError):
        run(program, cases, tmp_path)
