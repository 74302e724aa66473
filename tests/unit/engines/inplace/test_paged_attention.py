"""Paged attention against softmax written out in fp64: the compiled operator, and its oracle in PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan

import pytest
import torch
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.engines.inplace.host_to_device import Tables
from hybrid_rl.engines.inplace.kv_cache import LayerShape, PagedCache
from hybrid_rl.engines.inplace.paged_attention import PagedBatch, _TorchForm, paged_attention
from hybrid_rl.models import AttentionOptions

CPU = torch.device("cpu")
# (new tokens, tokens with the new ones) of each sequence: decode rows and chunks, around every edge of a block.
RAGGED = [(1, 1), (1, 16), (5, 5), (1, 17), (40, 40), (2, 33), (1, 200), (17, 64), (9, 121), (1, 31), (8, 180)]
DECODE = [(1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 32), (1, 33), (1, 150), (1, 200)]
OPTIONS = [
    AttentionOptions(),
    AttentionOptions(window=1),
    AttentionOptions(window=3, scale=0.4),
    AttentionOptions(window=17),
    AttentionOptions(softcap=1.3),
    AttentionOptions(scale=0.3, window=17, softcap=0.7),
]
DIMS = (8, 16, 24, 32, 64, 80, 128)
RATIOS = (1, 2, 3, 7, 8)


@dataclass
class Case:
    """A pass whose old tokens lie in the cache. query, key, value hold every token of every sequence."""

    cache: PagedCache
    batch: PagedBatch
    query: list[Tensor]
    key: list[Tensor]
    value: list[Tensor]

    def new(self, tensors: list[Tensor]) -> Tensor:
        """The tokens of the pass, one sequence after the other."""
        return torch.cat([t[len(t) - n :] for t, n in zip(tensors, self.batch.num_queries, strict=True)])

    def attend(self, form, options: AttentionOptions, layer: int = 0) -> Tensor:
        return form.attend(layer, self.new(self.query), self.new(self.key), self.new(self.value), options)

    def expected(self, options: AttentionOptions) -> Tensor:
        rows = zip(self.query, self.key, self.value, self.batch.num_queries, strict=True)
        return torch.cat([written_out(*(t.double() for t in (q, k, v)), n, options) for q, k, v, n in rows])

    def cached(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence as they are found through its table."""
        place = torch.arange(self.batch.context_lengths[row])
        blocks = self.batch.block_table[row][place // self.cache.block_size].long()
        keys, values = self.cache.views(0)
        return keys[blocks, place % self.cache.block_size], values[blocks, place % self.cache.block_size]


def written_out(query, key, value, count, options):
    """Attention of the last `count` tokens of a sequence: query [L, H, D], key and value [L, H_kv, D]."""
    scale = query.shape[2] ** -0.5 if options.scale is None else options.scale
    ratio = query.shape[1] // key.shape[1]
    key, value = (tensor[:, [head // ratio for head in range(query.shape[1])]] for tensor in (key, value))
    place = torch.arange(len(query))
    position = place[len(query) - count :, None]
    scores = torch.einsum("qhd,lhd->hql", query[len(query) - count :], key) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    hidden = place > position
    if options.window is not None:
        hidden |= place <= position - options.window
    return torch.einsum("hql,lhd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def case(
    lengths: Sequence[tuple[int, int]] = tuple(RAGGED),
    *,
    dim: int = 16,
    value_dim: int | None = None,
    ratio: int = 2,
    key_heads: int = 2,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    is_rounded: bool = False,
    fill: float = torch.nan,
    shared: Sequence[tuple[int, int, int]] = (),
) -> Case:
    """Random tokens in blocks out of order. fill: what places hold that were never written. shared: (row, other row,
    blocks): the row begins with that many blocks of the other."""
    value_dim = dim if value_dim is None else value_dim
    tensors = [
        [torch.randn(length, heads, size).to(dtype) for _, length in lengths]
        for heads, size in ((key_heads * ratio, dim), (key_heads, dim), (key_heads, value_dim))
    ]
    counts = [-(-length // block_size) for _, length in lengths]
    order = torch.randperm(sum(counts) + 3, dtype=torch.int32)
    shape = LayerShape(key_heads, dim, value_dim, dtype, is_rounded)
    cache = PagedCache({0: shape}, len(order), block_size, CPU)
    cache.allocate()
    for memory in cache.memory(0):
        memory.fill_(fill if memory.is_floating_point() else 77)
    # Behind the end of a sequence the compiled form does not look; the other looks, and hides what it found.
    table = torch.full((len(lengths), max(counts)), 2**30 if isnan(fill) else 0, dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[start : start + count]
        start += count
    for row, other, count in shared:
        table[row, :count] = table[other, :count]
        for rows in tensors:
            rows[row][: count * block_size] = rows[other][: count * block_size]
    made = Case(cache, PagedBatch(table, [n for n, _ in lengths], [length for _, length in lengths]), *tensors)
    writes = {row for row, _, _ in shared}
    for row, (new, length) in enumerate(lengths):
        if row in writes:
            continue  # what it shares the other row writes, now or before; the rest is new
        place = torch.arange(length - new)
        blocks = table[row][place // block_size].long()
        old_key, old_value = (rows[row][: length - new] for rows in (made.key, made.value))
        cache.write(0, (blocks, place % block_size), old_key, old_value)
    return made


def compiled(made: Case):
    form = paged_attention(made.cache, made.batch, Tables(CPU))
    assert type(form).__name__ == "_CompiledForm", "the extension is not built"
    return form


def torch_form(made: Case) -> _TorchForm:
    return _TorchForm(made.cache, made.batch, Tables(CPU))  # on a CPU nothing need be sent


def close(mine: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """float32: sums of products of size 1 in another order. bfloat16: half a unit in the last place of the output."""
    rounding = 2e-6 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(mine.double(), expected, rtol=rounding, atol=4e-6)


SHAPES = [
    (dim, ratio, block_size, options)
    for (dim, ratio, block_size), options in zip(
        itertools.product(DIMS, RATIOS, (16, 32)), itertools.cycle(OPTIONS), strict=False
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["chunks", "decode"])
@pytest.mark.parametrize("dim", DIMS)
def test_the_compiled_form_is_attention_written_out(dim, lengths, dtype):
    for _, ratio, block_size, options in (shape for shape in SHAPES if shape[0] == dim):
        made = case(lengths, dim=dim, ratio=ratio, block_size=block_size, dtype=dtype)
        close(made.attend(compiled(made), options), made.expected(options), dtype)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_forms_take_every_option(options, block_size):
    made = case(block_size=block_size, fill=0.0, dim=24, ratio=3)
    expected = made.expected(options)
    close(made.attend(compiled(made), options), expected, torch.float32)
    close(made.attend(torch_form(made), options), expected, torch.float32)


class PlainKernel:
    """The forward pass of a varlen kernel, written out."""

    def forward(self, query, key, value, runs, options):
        assert runs.causal and runs.query_offsets.dtype == runs.key_offsets.dtype == torch.int32
        parts = []
        queries, keys = (itertools.pairwise(offsets.tolist()) for offsets in (runs.query_offsets, runs.key_offsets))
        for (first, last), (start, end) in zip(queries, keys, strict=True):
            count, length = last - first, end - start
            own = torch.cat([torch.zeros(length - count, *query.shape[1:]), query[first:last]])
            parts.append(written_out(own, key[start:end], value[start:end], count, options))
        return torch.cat(parts), None


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_chunks_for_a_varlen_kernel(options, monkeypatch):
    """What CUDA does with chunks, but for the kernel: which keys are gathered for whom, and which runs they form."""
    monkeypatch.setattr(native, "operator", lambda name: None)
    made = case(block_size=4, ratio=3)
    form = paged_attention(made.cache, made.batch, Tables(CPU), PlainKernel())
    assert type(form).__name__ == "_VarlenForm"
    close(made.attend(form, options), made.expected(options), torch.float32)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=["plain", "all"])
@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["chunks", "decode"])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_the_torch_form_takes_any_block_and_dtype(block_size, lengths, options):
    made = case(lengths, block_size=block_size, fill=0.0, dtype=torch.float64, dim=8, value_dim=6)
    form = paged_attention(made.cache, made.batch, Tables(CPU))
    assert isinstance(form, _TorchForm)
    torch.testing.assert_close(made.attend(form, options), made.expected(options), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 6), (16, 40), (24, 16), (8, 1), (192, 128)])
def test_values_may_have_dims_of_their_own(dim, value_dim):
    made = case(dim=dim, value_dim=value_dim, ratio=3)
    out = made.attend(compiled(made), AttentionOptions())
    assert out.shape[2] == value_dim
    close(out, made.expected(AttentionOptions()), torch.float32)


@pytest.mark.parametrize("form", ["compiled", "torch"])
def test_the_new_tokens_lie_in_the_cache_and_nothing_else_moved(form):
    made = case(fill=0.0, value_dim=10)
    places = sum(made.batch.context_lengths)
    made.attend(compiled(made) if form == "compiled" else torch_form(made), AttentionOptions())
    for row in range(len(made.key)):
        for found, own in zip(made.cached(row), (made.key[row], made.value[row]), strict=True):
            assert torch.equal(found, own)
    for memory in made.cache.views(0):
        assert int(memory.ne(0).any(-1).any(-1).sum()) == places


@pytest.mark.parametrize("num_old", [32, 0], ids=["written before", "written in this pass"])
@pytest.mark.parametrize("form", ["compiled", "torch"])
def test_sequences_may_share_blocks(form, num_old):
    """Two blocks of row 0 also begin rows 1 and 2, which compute only what is their own."""
    lengths = [(40 - num_old, 40), (8, 40), (1, 33)]
    made = case(lengths, fill=0.0, shared=[(1, 0, 2), (2, 0, 2)])
    assert torch.equal(made.batch.block_table[1, :2], made.batch.block_table[0, :2])
    chosen = compiled(made) if form == "compiled" else torch_form(made)
    close(made.attend(chosen, AttentionOptions()), made.expected(AttentionOptions()), torch.float32)


@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["chunks", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_was_never_written_does_not_matter(options, dtype, lengths):
    torch.manual_seed(1)
    clean = case(lengths, fill=0.0, dtype=dtype, dim=24)
    torch.manual_seed(1)
    dirty = case(lengths, fill=torch.nan, dtype=dtype, dim=24)
    assert torch.equal(dirty.attend(compiled(dirty), options), clean.attend(compiled(clean), options))


@pytest.mark.parametrize("lengths", [RAGGED, DECODE * 20], ids=["chunks", "decode"])
def test_two_threads_give_the_bits_of_one(lengths):
    made = case(lengths, dim=64, ratio=3)
    work = sum(n * 6 * length * 128 for n, length in lengths)
    assert work > 8 * 2**19  # so that threads are used at all
    before = torch.get_num_threads()
    try:
        outs = []
        for num_threads in (1, 2, 2):
            torch.set_num_threads(num_threads)
            outs.append(made.attend(compiled(made), AttentionOptions()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch():
    made = case()
    together = made.attend(compiled(made), AttentionOptions())
    starts = [0, *itertools.accumulate(made.batch.num_queries)]
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        batch = PagedBatch(made.batch.block_table[row : row + 1].contiguous(), [end - start], [RAGGED[row][1]])
        one = replace(
            made, batch=batch, query=made.query[row : row + 1], key=made.key[row : row + 1], value=made.value[row:][:1]
        )
        assert torch.equal(one.attend(compiled(one), AttentionOptions()), together[start:end])


@pytest.mark.parametrize("offset", [0, -25_000], ids=["around zero", "all far below"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_large_scores_pick_the_largest_and_do_not_overflow(dtype, offset):
    """Scores are exact multiples of 128 up to +-1e4, all different: the best visible token has all the weight."""
    lengths = [(40, 40), (1, 77)]
    made = case(lengths, ratio=1, key_heads=1, dtype=dtype)
    for query, key in zip(made.query, made.key, strict=True):
        query.zero_()
        key.zero_()
        query[:, 0, 0], query[:, 0, 1] = 128.0, 1.0
        key[:, 0, 0] = torch.randperm(155)[: len(key)].to(dtype) - 77
        key[:, 0, 1] = torch.tensor(offset, dtype=dtype)
    blocks = made.batch.block_table[1][torch.arange(76) // 16].long()
    made.cache.views(0)[0][blocks, torch.arange(76) % 16] = made.key[1][:76]
    out = made.attend(compiled(made), AttentionOptions(scale=1.0))
    keys = made.key[0][:, 0, 0]
    best = [int(keys[: i + 1].argmax()) for i in range(40)]
    expected = torch.cat([made.value[0][best], made.value[1][made.key[1][:, 0, 0].argmax()][None]])
    assert torch.equal(out, expected)


def test_exponentials_are_exact_to_a_few_units_in_the_last_place():
    """Two tokens with scores 0 and x and values 0 and 1: the answer is e^x / (1 + e^x), down to where floats end."""
    x = torch.cat([torch.linspace(-86.9, 0, 3000), torch.tensor([-1e-30, -0.5 * 0.6931472, -0.6931472, -104.0, -1e4])])
    made = case([(1, 2)] * len(x), ratio=1, key_heads=1)
    for row, score in enumerate(x):
        for tensors in (made.query, made.key, made.value):
            tensors[row].zero_()
        made.query[row][1, 0, 0] = score
        made.key[row][1, 0, 0] = made.value[row][1] = 1.0
        for memory in made.cache.views(0):
            memory[made.batch.block_table[row, 0], 0] = 0.0
    out = made.attend(compiled(made), AttentionOptions(scale=1.0))
    assert torch.equal(out[:, 0, :1].expand(-1, 16), out[:, 0])
    expected = x.double().exp() / (1 + x.double().exp())
    torch.testing.assert_close(out[:, 0, 0].double(), expected, rtol=4e-7, atol=1e-38)


def test_no_tokens_no_output():
    made = case([(1, 5)])
    empty = torch.empty(0, 4, 16)
    new = torch.empty(0, 2, 16)
    where = (torch.zeros(0, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    out = native.operator("paged_attention")(empty, new, new, *made.cache.memory(0), *where, 1.0, 0, 0.0)
    assert out.shape == (0, 4, 16)


# ------------------------------------------------------------------------------------------------------- refusals

NAMES = ("query", "key", "value", "keys", "values", "block_table", "query_start", "context_length")


def changed(name, change):
    return lambda arguments: arguments | {name: change(arguments[name])}


def all_double(arguments):
    return arguments | {name: arguments[name].double() for name in NAMES[:5]}


def put(index, number):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = number
        return tensor

    return change


def strided(tensor):
    return tensor.repeat_interleave(2, -1)[..., ::2]


REFUSED = {
    "block beyond the cache": (changed("block_table", put((1, 1), 99)), "sequence 1 names block 99 of"),
    "negative block": (changed("block_table", put((0, 0), -1)), "sequence 0 names block -1"),
    "more context than table": (changed("context_length", put(0, 1000)), "sequence 0 needs 63 blocks, its table has 3"),
    "more queries than context": (changed("context_length", put(0, 2)), "sequence 0 has 3 queries and a context of 2"),
    "negative context": (changed("context_length", put(0, -5)), "sequence 0 has 3 queries"),
    "queries that go back": (changed("query_start", put(1, 9)), "sequence 1 has -5 queries"),
    "queries from 1": (changed("query_start", put(0, 1)), "must run from 0 to the number of queries"),
    "queries too few": (changed("query_start", put(2, 3)), "must run from 0 to the number of queries"),
    "starts too few": (changed("query_start", lambda t: t[:2]), "block_table must be int32"),
    "int64 table": (changed("block_table", lambda t: t.long()), "block_table must be int32"),
    "int32 context": (changed("context_length", lambda t: t.int()), "context_length int64"),
    "another dtype": (changed("value", lambda t: t.bfloat16()), "all be float32 or all bfloat16"),
    "float64": (all_double, "all be float32 or all bfloat16"),
    "a token too few": (changed("key", lambda t: t[1:]), "differ in tokens, heads or dims"),
    "a head too many": (changed("value", lambda t: t.repeat(1, 2, 1)), "differ in tokens, heads or dims"),
    "heads that do not divide": (changed("query", lambda t: t[:, :3].contiguous()), "differ in tokens, heads or dims"),
    "another dim": (changed("query", lambda t: t[..., :8].contiguous()), "differ in tokens, heads or dims"),
    "two dims": (changed("query", lambda t: t[:, 0].contiguous()), r"must be \[T, heads, dim\]"),
    "blocks of 8": (changed("keys", lambda t: t[..., :8].contiguous()), "multiples of 16"),
    "values too narrow": (changed("value", lambda t: t.repeat(1, 1, 2)), "multiples of 16"),
    "strided query": (changed("query", strided), "must be contiguous"),
    "strided cache": (changed("values", strided), "must be contiguous"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_before_anything_is_written(name):
    change, message = REFUSED[name]
    made = case([(3, 40), (1, 20)], fill=0.0)
    memory = [tensor.clone() for tensor in made.cache.memory(0)]
    new = (made.new(made.query), made.new(made.key), made.new(made.value))
    table = made.batch.block_table.clone()
    table[1, 2] = 0
    where = (table, torch.tensor([0, 3, 4]), torch.tensor([40, 20]))
    operator = native.operator("paged_attention")
    arguments = dict(zip(NAMES, (*new, *made.cache.memory(0), *where), strict=True))
    with pytest.raises(RuntimeError, match=message):
        operator(*change(arguments).values(), 1.0, 0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(made.cache.memory(0), memory, strict=True))
    operator(*arguments.values(), 1.0, 0, 0.0)
