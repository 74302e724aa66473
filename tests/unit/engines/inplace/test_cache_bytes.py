"""Bytes of a token's keys and values in bfloat16 for models whose numbers are published."""

import pytest
import torch

from hybrid_rl.engines.inplace.kv_cache import LayerShape, PagedCache


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
def test_bytes_per_token(layers: int, shape: tuple[int, int, int], expected: int) -> None:
    cached = dict.fromkeys(range(layers), LayerShape(*shape, torch.bfloat16))
    assert PagedCache(cached, 1, 1, torch.device("cpu")).num_bytes == expected
    if expected == 57_344:
        assert 40 * 10**9 // expected == 697_544  # tokens of 40 GB
