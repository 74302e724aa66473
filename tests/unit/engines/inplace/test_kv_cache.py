"""Memory of keys and values: bytes by hand, what is read from where it was written, and slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.engines.inplace import kv_cache
from hybrid_rl.engines.inplace.kv_cache import LayerShape, PagedCache, ShapeRecorder, region_bytes
from hybrid_rl.engines.inplace.slots import SlotTable
from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.cuda_region import CudaRegion
from hybrid_rl.models import AttentionOptions
from tests.support.cuda.cuda_stand_in import stand_in

SHAPE = LayerShape(num_heads=2, key_dim=8, value_dim=6, dtype=torch.float64)
WIDE = LayerShape(num_heads=3, key_dim=8, value_dim=17, dtype=torch.bfloat16)


def cache(num_blocks=6, block_size=4):
    made = PagedCache({0: SHAPE, 3: WIDE}, num_blocks, block_size, torch.device("cpu"))
    made.allocate()
    return made


def test_bytes_by_hand():
    """Values are padded to 16 and 32 dims."""
    assert (SHAPE.padded_value_dim, WIDE.padded_value_dim) == (16, 32)
    assert SHAPE.bytes_per_token == 2 * (8 + 16) * 8
    assert WIDE.bytes_per_token == 3 * (8 + 32) * 2
    made = cache()
    assert made.num_bytes == 6 * 4 * (2 * 24 * 8 + 3 * 40 * 2)
    assert made.num_bytes == sum(tensor.nbytes for layer in (0, 3) for tensor in made.memory(layer))
    made.free()
    assert (made.is_allocated, made.num_bytes) == (False, 6 * 4 * (2 * 24 * 8 + 3 * 40 * 2))


@pytest.mark.parametrize(
    ("layers", "shape", "expected"),
    [
        pytest.param(28, (4, 128, 128), 57_344, id="Qwen2.5-7B"),
        pytest.param(32, (32, 128, 128), 524_288, id="Llama-2-7B"),
        pytest.param(32, (8, 128, 128), 131_072, id="Llama-3-8B"),
        pytest.param(80, (8, 128, 128), 327_680, id="Qwen2.5-72B"),
        pytest.param(61, (1, 576, 0), 70_272, id="DeepSeek-V3, one latent per token"),
    ],
)
def test_bytes_per_token_of_published_models(layers: int, shape: tuple[int, int, int], expected: int) -> None:
    """In bfloat16."""
    cached = dict.fromkeys(range(layers), LayerShape(*shape, torch.bfloat16))
    assert PagedCache(cached, 1, 1, torch.device("cpu")).num_bytes == expected
    if expected == 57_344:
        assert 40 * 10**9 // expected == 697_544  # tokens of 40 GB


def test_views_show_blocks_tokens_heads_dims_of_memory_that_starts_at_zero():
    made = cache()
    for layer, shape in made.layers.items():
        keys, values = made.views(layer)
        assert keys.shape == (6, 4, shape.num_heads, 8)
        assert values.shape == (6, 4, shape.num_heads, shape.value_dim)
        assert not keys.any() and not values.any()
        assert keys.dtype == values.dtype == shape.dtype
    keys, values = made.views(0)
    keys[2, 3, 1, 5] = 7.0
    values[4, 0, 1, 5] = 8.0
    memory = made.memory(0)
    assert memory[0][2, 1, 5, 3] == 7.0  # [block, head, dim, token]
    assert memory[1][4, 1, 0, 5] == 8.0  # [block, head, token, dim]
    assert (int(memory[0].count_nonzero()), int(memory[1].count_nonzero())) == (1, 1)


def test_blocks_are_copied_whole_in_every_layer_from_what_was_there_before():
    made = cache()
    for layer in made.layers:
        for tensor in made.memory(layer):
            tensor.copy_(torch.randn(tensor.shape))
    before = {layer: [tensor.clone() for tensor in made.memory(layer)] for layer in made.layers}
    made.copy_blocks(torch.tensor([5, 5, 2]), torch.tensor([0, 2, 4]))  # 2 is read and written
    for layer in made.layers:
        for tensor, old in zip(made.memory(layer), before[layer], strict=True):
            assert torch.equal(tensor, old[[5, 1, 5, 3, 2, 5]])


def test_memory_that_was_freed_comes_back_as_zeros():
    made = cache()
    made.views(0)[0].fill_(1.0)
    made.free()
    made.allocate()
    assert not made.memory(0)[0].any()


def test_a_cache_in_a_region_sleeps_and_wakes_at_its_place_and_takes_all_layers_or_none():
    driver = stand_in()
    layers = {0: SHAPE, 3: WIDE}
    room = region_bytes(layers, 24)
    assert room == 24 * (2 * 24 * 8 + 3 * 40 * 2) + 2 * 512
    region = CudaRegion("kv_cache", capacity_bytes=room, device="cpu", chunk_bytes=4096, driver=driver.driver)
    made = PagedCache(layers, 6, 4, torch.device("cpu"), region)
    driver.reset(budget=driver.ledger().physical_bytes + 3 * 4096)
    with pytest.raises(MemoryStateError, match="'kv_cache' cannot grow"):
        made.allocate()
    assert not made.is_allocated and region.occupied_bytes == 0
    driver.reset()
    made.allocate()
    tensors = [tensor for layer in layers for tensor in made.memory(layer)]
    assert all(tensor.data_ptr() % 256 == 0 and not tensor.any() for tensor in tensors)
    assert sum(tensor.nbytes for tensor in tensors) == made.num_bytes and region.occupied_bytes == 4 * 4096
    tensors[3].fill_(1.0)
    places = [tensor.data_ptr() for tensor in tensors]
    made.free()
    assert not made.is_allocated and region.occupied_bytes == 0
    made.allocate()
    assert made.is_allocated and all(map(torch.equal, tensors, (tensor for i in layers for tensor in made.memory(i))))
    assert [tensor.data_ptr() for tensor in tensors] == places and not any(tensor.any() for tensor in tensors)
    tensors[0].fill_(float("nan"))
    made.clear()
    assert not tensors[0].any() and not region.is_asleep
    made.close()
    assert region.occupied_bytes == 0


def test_a_gpu_that_cannot_keep_addresses_is_an_error_with_a_way_on(monkeypatch):
    driver = stand_in()
    driver.reset(virtual_memory=False)

    def region(tag, *, capacity_bytes, device):
        assert device == torch.device("cuda", 0)
        return CudaRegion(tag, capacity_bytes=capacity_bytes, device="cpu", driver=driver.driver)

    monkeypatch.setattr(kv_cache, "CudaRegion", region)
    with pytest.raises(MemoryStateError, match="offer no virtual memory management; .*set rollout.engine=vllm or hf"):
        kv_cache.cache_region({0: SHAPE}, 24, torch.device("cuda", 0))
    driver.reset()
    made = kv_cache.cache_region({0: SHAPE}, 24, torch.device("cuda", 0))
    assert made.capacity_bytes == 3 * 4096 and made.occupied_bytes == 0  # 24 * 2 * 24 * 8 + 512
    assert kv_cache.cache_region({0: SHAPE}, 24, torch.device("cpu")) is None


def test_the_recorder_learns_shapes_and_answers_with_values():
    recorder = ShapeRecorder()
    value = torch.randn(1, 2, 6)
    out = recorder.attend(4, torch.randn(1, 6, 8), torch.randn(1, 2, 8), value, AttentionOptions())
    assert recorder.layers == {4: LayerShape(2, 8, 6, torch.float32)}
    assert torch.equal(out, value[:, [0, 0, 0, 1, 1, 1]])


# ---------------------------------------------------------------------------------------------------------- slots


def test_a_seat_holds_its_sequence_until_it_is_released():
    slots = SlotTable(3, 2)
    taken = [slots.take(SamplingParams(9, seed=i, top_k=i), length=10 + i, generated=i, last=70 + i) for i in range(3)]
    assert sorted(taken) == [0, 1, 2] and slots.num_free == 0
    chosen = np.array([taken[2], taken[0]])
    slots.advance(chosen, np.array([5, 6]))
    assert slots.length[taken].tolist() == [11, 11, 13]
    assert slots.generated[taken].tolist() == [1, 1, 3]
    assert slots.last[taken].tolist() == [6, 71, 5]
    slots.release(taken[1])
    again = slots.take(SamplingParams(9, temperature=0.5, seed=-3), length=1, generated=0, last=2)
    assert again == taken[1]
    rows = slots.sampling(np.array([again, taken[2]]))
    columns = {name: rows.columns[name].tolist() for name in ("seed", "top_k", "temperature")}
    assert columns == {"seed": [-3, 2], "top_k": [0, 2], "temperature": [0.5, 1.0]}
    assert rows.generated.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        ({}, (False, False, False)),
        ({"top_k": 1}, (True, False, False)),
        ({"top_p": 0.5}, (True, False, False)),
        ({"min_p": 0.5}, (True, False, False)),
        ({"temperature": 0.0}, (False, True, False)),
        ({"repetition_penalty": 0.5}, (False, False, True)),
    ],
    ids=str,
)
def test_what_no_row_asks_for_is_switched_off(params, flags):
    slots = SlotTable(4, 1)
    plain = slots.take(SamplingParams(1), length=1, generated=0, last=0)
    special = slots.take(SamplingParams(1, **params), length=1, generated=0, last=0)
    for chosen, expected in (([plain], (False,) * 3), ([plain, special], flags)):
        needs = slots.sampling(np.array(chosen)).needs
        assert (needs["truncates"], needs["greedy"], needs["penalises"]) == expected


def test_wider_tables_keep_what_they_hold():
    slots = SlotTable(2, 2)
    slots.blocks[1] = [7, 8]
    slots.widen(1)
    assert slots.blocks.shape == (2, 2)
    slots.widen(5)
    assert slots.blocks.tolist() == [[0, 0, 0, 0, 0], [7, 8, 0, 0, 0]]
