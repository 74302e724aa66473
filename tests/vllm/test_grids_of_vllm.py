"""Grids against vLLM's own functions for the same layouts, and compressed-tensors', which vLLM loads: byte for byte."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype, ref_nvfp4_quant
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, quantize_weights
from vllm.scalar_type import scalar_types
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from hybrid_rl.vllm.quantization import vllm_config_of
from hybrid_rl.weights.grids import GRIDS

SHAPES = [(64, 64), (129, 96), (300, 416), (7, 32)]


def cases():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            weight = torch.randn(shape, generator=generator) * 0.02
            blank = weight.clone()
            blank[:, :32], blank[:3] = 0, 0
            yield from (each.to(dtype) for each in (weight, weight * 1e-6, blank))
        yield torch.zeros((32, 64), dtype=dtype)
        yield torch.randint(-24, 25, (64, 64), generator=generator).to(dtype) / 4  # ties


def quantised(name, weight, dtype=torch.float32):
    grid = GRIDS[name]
    return grid.quantise(weight, grid.maxima(weight), dtype)


def same(ours, theirs):
    return ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_fp8():
    with set_current_vllm_config(VllmConfig()):
        theirs = QuantFP8(static=False, group_shape=GroupShape.PER_TENSOR)
    for weight in cases():
        parts = quantised("fp8", weight)
        values, scale = theirs.forward_native(weight)
        assert same(parts["weight"], values) and same(parts["weight_scale"], scale.reshape(1))


def test_fp8_block():
    with torch.compiler.set_stance("force_eager"):
        for weight in cases():
            parts = quantised("fp8_block", weight)
            values, scales = per_block_cast_to_fp8(weight)
            assert same(parts["weight"], values) and same(parts["weight_scale_inv"], scales)


def test_int4():
    for weight in cases():
        parts = quantised("int4", weight)
        dequantised, codes, scales, _ = quantize_weights(weight.float().T, scalar_types.uint4b8, 32)
        scales = scales.reshape(-1, weight.shape[0]).T
        is_zero = scales == 0  # where vLLM divides by zero
        blank = is_zero.repeat_interleave(32, 1)
        codes = codes.T.masked_fill(blank, 8)
        assert same(parts["weight_scale"], scales.masked_fill(is_zero, 1.0))
        assert same(parts["weight_packed"], pack_to_int32((codes - 8).to(torch.int8).contiguous(), 4))
        assert torch.equal(GRIDS["int4"].dequantise(parts), dequantised.T.masked_fill(blank, 0.0))


def test_nvfp4():
    for weight in cases():
        parts = quantised("nvfp4", weight)
        whole = parts["weight_global_scale"]
        assert float(whole) == float(torch.tensor(448.0 * 6) / weight.abs().max().float().clamp(min=1e-8))
        values, scales = ref_nvfp4_quant(weight, whole, 16)
        assert torch.equal(parts["weight_scale"].float(), scales)
        assert same(parts["weight_packed"], pack_fp4_to_uint8(values))
        theirs = dequantize_to_dtype(
            parts["weight_packed"], parts["weight_scale"], 1 / whole, torch.float32, 16, swizzle=False
        )
        assert torch.equal(GRIDS["nvfp4"].dequantise(parts), theirs)


def test_vllms_own_methods_are_those_of_these_layouts():
    """What a GPU would run, as far as it is chosen without one."""
    assert vllm_config_of("fp8").weight_block_size is None and vllm_config_of("fp8").activation_scheme == "dynamic"
    assert vllm_config_of("fp8_block").weight_block_size == [128, 128]
    scheme = vllm_config_of("int4").get_scheme(torch.nn.Linear(64, 64), "model.layers.0.self_attn.o_proj")
    assert isinstance(scheme, CompressedTensorsWNA16)
    assert (scheme.group_size, scheme.symmetric, scheme.quant_type) == (32, True, scalar_types.uint4b8)
    # The scheme of nvfp4 without quantised activations asks for its kernel at once, which no CPU has.
    with pytest.raises(ValueError, match=r"MarlinNvFp4LinearKernel is not supported"):
        vllm_config_of("nvfp4").get_scheme(torch.nn.Linear(64, 64), "model.layers.0.self_attn.o_proj")
