"""rollout.kv_cache_dtype=int8: keys and values of 8 bits, from the operator to the engine."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.engines.base import TAGS
from hybrid_rl.engines.inplace.host_to_device import Tables
from hybrid_rl.engines.inplace.kv_cache import LayerShape, PagedCache, ShapeRecorder
from hybrid_rl.engines.inplace.paged_attention import paged_attention
from hybrid_rl.errors import ConfigError
from hybrid_rl.models import AttentionOptions, CausalLM
from hybrid_rl.models.exact import missing_operators
from hybrid_rl.models.int8.rounding import round_torch
from tests.unit.engines.engines import inplace
from tests.unit.engines.inplace.test_exact_engine import generated, requests
from tests.unit.engines.inplace.test_paged_attention import CPU, OPTIONS, Case, case, close, compiled, torch_form
from tests.unit.models.families import build

is_built = native.operator("paged_attention_int8") is not None and not missing_operators()
needs_extension = pytest.mark.skipif(not is_built, reason="the compiled extension is not built")


def as_rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Integers and scales of the last dim by PyTorch."""
    rows = tensor.float().flatten(0, -2)
    values, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows))
    round_torch(rows, values, scales)
    return values.view(tensor.shape), scales.view(tensor.shape[:-1])


def on_grid(tensor: Tensor) -> Tensor:
    values, scales = as_rounded(tensor)
    return values.double() * scales.double()[..., None]


def expected(made: Case, options: AttentionOptions) -> Tensor:
    key, value = ([on_grid(tensor) for tensor in rows] for rows in (made.key, made.value))
    return replace(made, key=key, value=value).expected(options)


@needs_extension
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=4),
    dim=st.sampled_from([1, 8, 24, 64, 80]),
    value_dim=st.sampled_from([1, 16, 40]),
    ratio=st.sampled_from([1, 2, 3, 7, 8]),
    block_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    options=st.sampled_from(OPTIONS),
)
@settings(max_examples=60, deadline=None)
def test_the_operator_is_attention_over_rounded_keys_and_values(lengths, dim, value_dim, options, **shape) -> None:
    """Within the bounds of a cache that is not rounded; integers and scales to the bit."""
    made = case([(new, new + old) for new, old in lengths], dim=dim, value_dim=value_dim, is_rounded=True, **shape)
    close(made.attend(compiled(made), options), expected(made, options), shape["dtype"])
    size = made.cache.block_size
    for row, length in enumerate(made.batch.context_lengths):
        place = torch.arange(length)
        block = made.batch.block_table[row][place // size].long()
        held = [memory[block, place % size] for memory in made.cache.views(0)]
        held += [memory.transpose(1, 2)[block, place % size] for memory in made.cache.memory(0)[2:]]
        key, value = as_rounded(made.key[row]), as_rounded(made.value[row])
        for mine, theirs in zip(held, (key[0], value[0], key[1], value[1]), strict=True):
            assert torch.equal(mine, theirs)


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_operator_and_oracle_take_every_option(options: AttentionOptions, dtype: torch.dtype) -> None:
    made = case(fill=0.0, dim=24, ratio=3, dtype=dtype, is_rounded=True)
    for form in (compiled(made), torch_form(made)):
        close(made.attend(form, options), expected(made, options), dtype)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_the_oracle_takes_any_block(block_size: int, monkeypatch) -> None:
    """Blocks that the operator does not take, and any without the extension."""
    monkeypatch.setattr(native, "operator", lambda name: None)
    made = case(block_size=block_size, fill=0.0, dim=8, value_dim=6, is_rounded=True)
    form = paged_attention(made.cache, made.batch, Tables(CPU))
    close(made.attend(form, OPTIONS[-1]), expected(made, OPTIONS[-1]), torch.float32)


@needs_extension
def test_a_key_that_is_not_finite_is_not_hidden() -> None:
    made = case([(3, 9), (1, 4)], is_rounded=True)
    made.key[0][8, 1, 3] = torch.inf
    out = made.attend(compiled(made), AttentionOptions())
    hidden = out.isnan().any(-1)
    assert hidden.tolist() == [[False] * 4, [False] * 4, [False, False, True, True], [False] * 4]


@given(
    exponents=st.lists(st.integers(-30, 30), min_size=1, max_size=6),
    dim=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_read_is_what_was_written_to_half_a_step(exponents: list[int], dim: int, dtype: torch.dtype) -> None:
    count = len(exponents)
    cache = PagedCache({2: LayerShape(2, dim, dim, dtype, is_rounded=True)}, 4, 4, CPU)
    cache.allocate()
    size = 2.0 ** torch.tensor(exponents)[:, None, None]
    key, value = ((torch.randn(count, 2, dim) * size).to(dtype) for _ in range(2))
    place = torch.arange(count) // 4 + 1, torch.arange(count) % 4
    cache.write(2, place, key, value)
    for new, held in zip((key, value), cache.read(2, place), strict=True):
        top = new.double().abs().amax(-1, keepdim=True)
        assert held.dtype == torch.float32
        # Half a step, and the rounding of the scale, of which a number has up to 127, and of the product.
        assert bool(((held.double() - new.double()).abs() <= top / 254 + 3 * 2.0**-24 * top).all())
        torch.testing.assert_close(held.abs().amax(-1, keepdim=True).double(), top, rtol=2.0**-22, atol=0.0)


def test_bytes_copies_and_zeros() -> None:
    """Scales are in the blocks, so that all that moves blocks moves them."""
    shape = LayerShape(2, 64, 64, torch.float32, is_rounded=True)
    assert shape.bytes_per_token == 2 * (64 + 4 + 64 + 4)
    assert shape.bytes_per_token / replace(shape, is_rounded=False).bytes_per_token == (64 + 4) / (4 * 64)
    assert LayerShape(2, 8, 6, torch.bfloat16, is_rounded=True).bytes_per_token == 2 * (8 + 16 + 8)
    cache = PagedCache({0: shape}, 6, 16, CPU)
    cache.allocate()
    assert cache.num_bytes == 6 * 16 * 272 == sum(tensor.nbytes for tensor in cache.memory(0))
    place = torch.full((16,), 3), torch.arange(16)
    cache.write(0, place, *torch.randn(2, 16, 2, 64))
    cache.copy_blocks(torch.tensor([3, 0]), torch.tensor([5, 3]))
    copied, source = (cache.read(0, torch.tensor(block)) for block in (5, 3))
    assert not any(tensor.any() for tensor in source)
    assert all(float(tensor.abs().amax(-1).min()) > 0 for tensor in copied)
    cache.clear()
    assert not any(tensor.any() for tensor in cache.memory(0))


SETTINGS: list[dict[str, Any]] = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 5, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    {"max_num_seqs": 16, "speculation": "on"},
]


@needs_extension
@pytest.mark.parametrize(("family", "dtype"), [("qwen2", torch.float32), ("gemma2", torch.bfloat16)])
def test_samples_do_not_depend_on_what_runs_together(family: str, dtype: torch.dtype) -> None:
    """To the bit, if all else adds up in one order: batches, chunks, prefixes, followers, drafts, and a cache so small
    that sequences wait and are computed again."""
    model = CausalLM(build(family, dtype=dtype), exact=True)
    sent = requests(random.Random(4), 4)
    samples, *others = (
        [(sample.completion_ids, sample.logprobs) for sample in generated(model, sent, kv_cache_dtype="int8", **each)]
        for each in ({}, *SETTINGS, {"kv_cache_memory_bytes": 3 * 16 * bytes_per_token(model)})
    )
    assert all(other == samples for other in others)
    plain = [(sample.completion_ids, sample.logprobs) for sample in generated(model, sent)]
    assert plain != samples


def bytes_per_token(model: CausalLM) -> int:
    recorder, zero = ShapeRecorder("int8"), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        model.hidden_states(zero, zero, recorder)
    return sum(layer.bytes_per_token for layer in recorder.layers.values())


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "deepseek-v3"])
def test_logprobs_are_near_those_of_a_cache_in_full_precision(family: str, block_size: int) -> None:
    """Also after sleep, in a cache a quarter as large. Greedy, up to where the texts part."""
    sent = [replace(r, params=replace(r.params, temperature=0.0)) for r in requests(random.Random(5), 4)]
    full, rounded = (inplace(family, block_size=block_size, kv_cache_dtype=name).ready() for name in ("auto", "int8"))
    rounded.engine.sleep(TAGS)
    rounded.ready(2)
    pairs = zip(*(sorted(rig.run(sent, v), key=lambda s: s.id) for rig, v in ((full, 1), (rounded, 2))), strict=True)
    gaps = []
    for plain, mine in pairs:
        for tokens, logprobs in zip(
            zip(plain.completion_ids, mine.completion_ids, strict=False),
            zip(plain.logprobs, mine.logprobs, strict=False),
            strict=True,
        ):
            if tokens[0] != tokens[1]:
                break
            gaps.append(abs(logprobs[0] - logprobs[1]))
    assert len(gaps) > 60 and 0 < max(gaps) < 0.02


def test_what_has_no_such_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounds keys and values in float32 and bfloat16, not in torch.float64"):
        inplace(dtype=torch.float64, kv_cache_dtype="int8")
