from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.extras.plan.trace_files import is_same, load_trace, save_trace
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.resharding.tracer import trace_loader

Weights = dict[str, Tensor]
Loader = Callable[[Weights, Weights], Any]


def traced(load: Loader, sources: dict[str, tuple[int, ...]], destinations: Weights, **kwargs: Any) -> Trace:
    meta = {name: torch.empty(shape, device="meta") for name, shape in sources.items()}
    return trace_loader(lambda offered: load(dict(offered), destinations), meta.items(), meta, destinations, **kwargs)


def carry_out(trace: Trace, values: Weights, destinations: list[Tensor]) -> Tensor:
    """Write by the trace; how often each element was written."""
    counts = [torch.zeros(tensor.shape, dtype=torch.int64) for tensor in destinations]
    copies = trace.copies
    for i in range(len(copies)):
        source = values[trace.sources[copies.source[i]].name]
        num_dims = source.dim()
        bounds = zip(copies.low[i, :num_dims], copies.high[i, :num_dims], strict=True)
        box = source[tuple(slice(int(low), int(high)) for low, high in bounds)]
        strides, offset = copies.strides[i, :num_dims].tolist(), int(copies.offset[i])
        number = int(copies.destination[i])
        destinations[number].as_strided(box.shape, strides, destinations[number].storage_offset() + offset).copy_(box)
        counts[number].as_strided(box.shape, strides, offset).add_(1)
    trace.fill(destinations)
    for i in range(len(trace.fills)):
        view, shape = counts[int(trace.fills.destination[i])], trace.fills.shape[i].tolist()
        view.as_strided(shape, trace.fills.strides[i].tolist(), int(trace.fills.offset[i])).add_(1)
    return torch.cat([count.reshape(-1) for count in counts])


def check_same(load: Loader, sources: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> Trace:
    """What the trace writes is what the loader writes, each element once, and tracing writes nothing."""
    values = {name: torch.randn(shape) for name, shape in sources.items()}
    wanted = {name: torch.full(shape, -7.0) for name, shape in shapes.items()}
    found = {name: torch.full(shape, -7.0) for name, shape in shapes.items()}
    trace = traced(load, sources, found)
    assert all(bool((tensor == -7).all()) for tensor in found.values())
    assert trace.untraced == {}
    load(values, wanted)
    counts = carry_out(trace, values, list(found.values()))
    for name in shapes:
        assert torch.equal(found[name], wanted[name]), name
    assert bool((counts == 1).all())
    return trace


def test_a_shard_of_a_fused_parameter_by_hand() -> None:
    # Rank 1 of 2 takes rows 2 and 3 of both, and puts `up` after `gate`.
    def load(weights: Weights, engine: Weights) -> None:
        engine["gate_up"].narrow(0, 0, 2).copy_(weights["gate"].narrow(0, 2, 2))
        engine["gate_up"].narrow(0, 2, 2).copy_(weights["up"].narrow(0, 2, 2))

    trace = check_same(load, {"gate": (4, 3), "up": (4, 3)}, {"gate_up": (4, 3)})
    copies = trace.copies
    assert copies.source.tolist() == [0, 1]
    assert copies.low.tolist() == [[2, 0, 0, 0], [2, 0, 0, 0]]
    assert copies.high.tolist() == [[4, 3, 1, 1], [4, 3, 1, 1]]
    assert copies.offset.tolist() == [0, 6]
    assert copies.strides.tolist() == [[3, 1, 0, 0], [3, 1, 0, 0]]
    assert trace.unused == ()


@pytest.mark.parametrize(
    ("load", "source", "shape", "num_boxes"),
    [
        (lambda x, y: y.copy_(x.t()), (4, 5), (5, 4), 1),
        (lambda x, y: y.copy_(x.reshape(-1)), (4, 5), (20,), 1),
        (lambda x, y: y.copy_(x.view(2, 2, 5).transpose(0, 1)), (4, 5), (2, 2, 5), 2),
        (lambda x, y: y.copy_(x.reshape(-1)[3:18]), (4, 5), (15,), 3),
        (lambda x, y: y.copy_(x[::2]), (6, 5), (3, 5), 3),
        (lambda x, y: y.copy_(x[:, 2:3]), (6, 5), (6, 1), 1),
        (lambda x, y: y.copy_(x.squeeze(1)), (6, 1, 5), (6, 5), 1),
        (lambda x, y: y.copy_(x[None].expand(3, 4)), (4,), (3, 4), 3),
        (lambda x, y: y.copy_(x), (), (2,), 2),
        (lambda x, y: y.copy_(x.permute(2, 0, 1).contiguous()), (2, 3, 4), (4, 2, 3), 1),
        (lambda x, y: [y[i].copy_(part) for i, part in enumerate(x.unbind(1))], (2, 3, 4), (3, 2, 4), 3),
        (lambda x, y: y.t().copy_(x.double()), (4, 5), (5, 4), 1),
        (lambda x, y: y.__setitem__(slice(1, 3), x), (2, 5), (4, 5), None),
    ],
)
def test_views_are_boxes(
    load: Callable[[Tensor, Tensor], Any], source: tuple[int, ...], shape: tuple[int, ...], num_boxes: int | None
) -> None:
    if num_boxes is None:
        destinations = {"y": torch.zeros(shape)}
        found = traced(lambda weights, engine: load(weights["x"], engine["y"]), {"x": source}, destinations)
        assert found.untraced == {"y": "the loader writes 10 of its 20 elements"}
        assert len(found.copies) == 0
        return
    trace = check_same(lambda weights, engine: load(weights["x"], engine["y"]), {"x": source}, {"y": shape})
    assert len(trace.copies) == num_boxes


@st.composite
def view_steps(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, Any]]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    probe = torch.empty(shape, device="meta")
    steps: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["permute", "narrow", "split", "flatten", "step"]))
        dim = draw(st.integers(0, probe.dim() - 1))
        if kind == "permute":
            argument: Any = draw(st.permutations(range(probe.dim())))
        elif kind == "narrow":
            begin = draw(st.integers(0, probe.shape[dim] - 1))
            argument = (dim, begin, draw(st.integers(1, probe.shape[dim] - begin)))
        elif kind == "split":
            factors = [n for n in range(1, probe.shape[dim] + 1) if probe.shape[dim] % n == 0]
            argument = (dim, draw(st.sampled_from(factors)))
        else:
            argument = dim
        if kind == "split" and probe.dim() == 4 or kind == "flatten" and not probe.is_contiguous():
            continue
        steps.append((kind, argument))
        probe = apply(probe, steps[-1:])
    return shape, steps


def apply(tensor: Tensor, steps: list[tuple[str, Any]]) -> Tensor:
    for kind, argument in steps:
        if kind == "permute":
            tensor = tensor.permute(argument)
        elif kind == "narrow":
            tensor = tensor.narrow(*argument)
        elif kind == "split":
            tensor = tensor.unflatten(argument[0], (argument[1], -1))
        elif kind == "flatten":
            tensor = tensor.view(-1)
        else:
            tensor = tensor[(slice(None),) * argument + (slice(None, None, 2),)]
    return tensor


@given(view_steps())
def test_any_view_is_copied_as_the_loader_would(case: tuple[tuple[int, ...], list[tuple[str, Any]]]) -> None:
    shape, steps = case
    result = tuple(apply(torch.empty(shape, device="meta"), steps).shape)
    check_same(lambda w, e: e["y"].copy_(apply(w["x"], steps)), {"x": shape}, {"y": result})


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 4), st.integers(1, 5)), max_size=5))
def test_of_writes_to_one_place_the_last_counts(blocks: list[tuple[int, int, int, int]]) -> None:
    def load(weights: Weights, engine: Weights) -> None:
        engine["y"].fill_(3.0)
        for row, rows, column, columns in blocks:
            where = (slice(row, row + rows), slice(column, column + columns))
            engine["y"][where].copy_(weights["x"].t()[where])

    check_same(load, {"x": (5, 6)}, {"y": (6, 5)})


def test_padding_is_filled() -> None:
    def load(weights: Weights, engine: Weights) -> None:
        engine["embed"][:5].data.copy_(weights["x"])
        engine["embed"][5:].data.fill_(0)

    trace = check_same(load, {"x": (5, 3)}, {"embed": (8, 3)})
    assert trace.fills.offset.tolist() == [15]
    assert trace.fills.shape.tolist() == [[3, 3, 1, 1]]
    assert trace.fills.value.tolist() == [0.0]


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda x, y: y.copy_(torch.cat([x, x])), "computed, not copied (aten.cat"),
        (lambda x, y: y.copy_((x * 2)[[0, 1, 0, 1]]), "computed, not copied (aten.mul"),
        (lambda x, y: (y.fill_(0), y[:2].copy_(x), y.mul_(2)), "changes it in place (aten.mul_"),
        (lambda x, y: y[:2].copy_(x), "writes 6 of its 12 elements"),
        (lambda x, y: None, "writes nothing"),
        (lambda x, y: (torch.zeros_like(y).copy_(x[:1]), y.copy_(torch.randn(4, 3))), "not part of the checkpoint"),
        (lambda x, y: y.copy_(x.bfloat16()[:1].expand(4, 3)), "rounded to torch.bfloat16"),
        (lambda x, y: (y[:2].copy_(x), y[2:].copy_(y[:2])), "another tensor of the engine"),
        (lambda x, y: (b := torch.empty(4, 3), b[:2].copy_(x), y.copy_(b)), "passes through a temporary"),
    ],
)
def test_what_is_not_copied_is_untraced(load: Callable[[Tensor, Tensor], Any], reason: str) -> None:
    live = {"y": torch.full((4, 3), -7.0)}
    trace = traced(lambda weights, engine: load(weights["x"], engine["y"]), {"x": (2, 3)}, live)
    assert reason in trace.untraced["y"]
    assert trace.unused == ("x",)
    assert len(trace.copies) == len(trace.fills) == 0
    assert bool((live["y"] == -7).all())


def test_the_rest_is_traced_beside_what_is_not() -> None:
    def load(weights: Weights, engine: Weights) -> None:
        engine["a"].copy_(weights["x"] + 1)
        engine["b"].copy_(weights["x"])

    live = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    trace = traced(load, {"x": (2, 3)}, live)
    assert list(trace.untraced) == ["a"]
    assert trace.copies.destination.tolist() == [1]


def test_a_loader_that_reads_values_is_refused() -> None:
    with pytest.raises(HandoffError, match="reads the values of weights.* on x"):
        traced(lambda w, e: e["y"].fill_(w["x"].item()), {"x": (1,)}, {"y": torch.zeros(3)})


def test_a_cast_that_keeps_values_is_none() -> None:
    live = {"y": torch.zeros(3, dtype=torch.bfloat16)}
    trace = traced(lambda w, e: e["y"].copy_(w["x"].to(torch.bfloat16)), {"x": (3,)}, live)
    assert trace.untraced == {}
    assert trace.destinations[0].dtype == torch.bfloat16
    assert trace.sources[0].dtype == torch.float32


def test_optional_destinations_appear_where_they_are_loaded() -> None:
    live = {"weight": torch.zeros(3), "bias": torch.zeros(3), "cache": torch.zeros(3)}

    def load(weights: Weights, engine: Weights) -> None:
        engine["weight"].copy_(weights["x"])
        engine["bias"].copy_(weights["x"])

    trace = traced(load, {"x": (3,)}, live, optional={"bias", "cache"})
    assert [spec.name for spec in trace.destinations] == ["weight", "bias"]
    assert trace.copies.destination.tolist() == [0, 1]


def test_destinations_may_be_views_of_one_storage() -> None:
    memory = torch.zeros(10)
    live = {"a": memory[2:5], "b": memory[5:9].view(2, 2).t()}
    trace = traced(lambda w, e: (e["a"].copy_(w["x"]), e["b"].copy_(w["y"])), {"x": (3,), "y": (2, 2)}, live)
    assert trace.untraced == {}
    carry_out(trace, {"x": torch.tensor([1.0, 2, 3]), "y": torch.tensor([[4.0, 5], [6, 7]])}, list(live.values()))
    assert memory.tolist() == [0, 0, 1, 2, 3, 4, 6, 5, 7, 0]


def test_without_drops_rows_and_keeps_numbers() -> None:
    live = {name: torch.zeros(4) for name in "abc"}

    def load(weights: Weights, engine: Weights) -> None:
        for tensor in engine.values():
            tensor[:3].copy_(weights["x"])
            tensor[3:].fill_(1)

    trace = traced(load, {"x": (3,)}, live).without({"b": "packed"})
    assert trace.copies.destination.tolist() == trace.fills.destination.tolist() == [0, 2]
    assert len(trace.destinations) == 3
    assert trace.untraced == {"b": "packed"}
    with pytest.raises(HandoffError, match="no destinations.*'z'"):
        trace.without({"z": "packed"})


def test_a_trace_is_saved_and_read_back(tmp_path: Path) -> None:
    live = {"y": torch.zeros(6, 5, dtype=torch.bfloat16), "z": torch.zeros(2)}

    def load(weights: Weights, engine: Weights) -> None:
        engine["y"][:4].copy_(weights["x"].view(2, 2, 5).transpose(0, 1).reshape(4, 5)[:, :])
        engine["y"][4:].fill_(0.5)

    def load_views(weights: Weights, engine: Weights) -> None:
        for i in range(4):
            engine["y"][i].copy_(weights["x"][3 - i])
        engine["y"][4:].fill_(0.5)

    trace = traced(load_views, {"x": (4, 5), "unused": (3,)}, live)
    path = tmp_path / "trace.npz"
    save_trace(trace, path)
    read = load_trace(path)
    assert is_same(read, trace)
    assert read.destinations == trace.destinations
    assert read.sources == trace.sources
    assert read.untraced == trace.untraced == {"z": "the loader writes nothing into it"}
    assert read.unused == ("unused",)
    assert np.array_equal(read.copies.strides, trace.copies.strides)
    assert read.fills.value.tolist() == [0.5]
    assert not is_same(traced(load, {"x": (4, 5), "unused": (3,)}, live), trace)
    path.write_bytes(b"PK nothing")
    with pytest.raises(HandoffError, match="cannot read a trace"):
        load_trace(path)


def test_sources_must_be_whole_meta_tensors() -> None:
    meta = torch.empty(4, 4, device="meta")
    with pytest.raises(HandoffError, match="source x must be a contiguous meta tensor"):
        trace_loader(list, [], {"x": torch.zeros(2)}, {})
    with pytest.raises(HandoffError, match="source x must be a contiguous meta tensor"):
        trace_loader(list, [], {"x": meta.t()}, {})
    with pytest.raises(HandoffError, match="share one storage"):
        trace_loader(list, [], {"x": meta, "y": meta[:2]}, {})
