"""Quantised weights in a live vLLM: what it holds is what its own functions make of the trainer's weights."""

import math
from contextlib import contextmanager

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, quantize_weights
from vllm.scalar_type import scalar_types
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from hybrid_rl import Trainer
from hybrid_rl.errors import EngineStateError, HandoffError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.models.lora.factors import low_rank_changes
from hybrid_rl.planning.engines import vllm_weights_share
from hybrid_rl.weights.plain import plain
from tests.support.inside.trainers import position_of
from tests.support.inside.vllm import writer_of
from tests.support.inside.workers import engine_of, module_of, side_of, worker_of
from tests.support.tiny import build_model, build_tokenizer, spread, sums
from tests.vllm.test_trainer import KEYS

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256}
SHAPE["tie_word_embeddings"] = False
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# What the grids of a model with random weights do to the logprobs of its samples, at most.
GAPS = {"fp8": 0.1, "fp8_block": 0.1, "int4": 0.5, "nvfp4": 0.5}


def of_vllm(grid, weight):
    """The tensors of a layer, by vLLM's functions and the library of its format."""
    if grid == "fp8":
        with set_current_vllm_config(VllmConfig()):
            quantise = QuantFP8(static=False, group_shape=GroupShape.PER_TENSOR)
        values, scale = quantise.forward_native(weight)
        return {"weight": values, "weight_scale": scale.reshape(1)}
    if grid == "fp8_block":
        with torch.compiler.set_stance("force_eager"):
            values, scales = per_block_cast_to_fp8(weight)
        return {"weight": values, "weight_scale_inv": scales}
    if grid == "int4":
        _, codes, scales, _ = quantize_weights(weight.T, scalar_types.uint4b8, 32)
        packed = pack_to_int32((codes.T - 8).to(torch.int8).contiguous(), 4)
        return {"weight_packed": packed, "weight_scale": scales.T}
    whole = (torch.tensor(448.0 * 6) / weight.abs().max()).reshape(1)
    values, scales = ref_nvfp4_quant(weight, whole, 16)
    scales = scales.to(torch.float8_e4m3fn)
    return {"weight_packed": pack_fp4_to_uint8(values), "weight_scale": scales, "weight_global_scale": whole}


@torch.no_grad()
def check_bytes(engine, module, grid):
    """Compare every linear layer of an engine of one rank."""
    held = dict(zip((s.name for s in engine.weights.trace.destinations), engine.weights.destinations, strict=True))
    weights, count = dict(module.named_parameters()), 0
    for path, layer in module.named_modules():
        stem, _, name = path.rpartition(".")
        joined = next((joined for joined, parts in PARTS.items() if name in parts), name)
        parts = PARTS.get(joined, (name,))
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head" or name != parts[0]:
            continue
        whole = torch.cat([weights[f"{stem}.{part}.weight"] for part in parts])
        for suffix, expected in of_vllm(grid, whole).items():
            own = held[f"{stem}.{joined}.{suffix}"]
            if expected.shape == (1,):
                expected = expected.expand(len(parts))
            assert torch.equal(own.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), path
            count += 1
    assert count == 8 * (3 if grid == "nvfp4" else 2)


@contextmanager
def run(tmp_path, grid, *, aware=True, **keys):
    keys = {
        **KEYS,
        "quantization": grid,
        "quantization_aware": aware,
        "max_steps": 3,
        "output_dir": str(tmp_path),
        **keys,
    }
    with Trainer(build_model(**SHAPE), spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        trainer.fit()
        yield trainer, [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]


def publish(trainer):
    position_of(trainer).policy_version += 1
    return trainer.generating.update_weights(trainer.policy_version)[0]


def test_a_trainer_on_the_engines_grid_and_what_can_go_wrong_with_scales(tmp_path, monkeypatch):
    with run(tmp_path, "nvfp4") as (trainer, lines):
        for line in lines:
            assert line["sampling/sampling_logp_difference/max"] < 1e-5 and line["handoff/probe_gap"] < 1e-5
            assert line["timing/verify"] > 0 and line["handoff/unproven_bytes"] == 0
        worker = worker_of(trainer)
        engine, module = engine_of(worker), module_of(worker)
        check_bytes(engine, module, "nvfp4")
        linear = sum(p.numel() for n, p in module.named_parameters() if p.dim() > 1 and "embed" not in n) - 64 * 128
        rest = sum(p.nbytes for p in module.parameters()) - 4 * linear
        # Four bits and a sixteenth of a byte for each weight, and the scales of 7 weights in each of two layers.
        assert engine.weight_bytes - rest == pytest.approx(linear * 9 / 16 + 14 * 4, abs=64 * 64 * 4)

        tables = 64 * 64 * 4  # of the rotary embedding, which no handoff writes
        assert vllm_weights_share(module, trainer.config, 4).num_bytes == engine.weight_bytes + tables

        # A factor of all weights is seen in scales alone.
        writer, before = writer_of(engine), {}
        write = writer.write
        names = [spec.name for spec in writer.weights.trace.destinations]
        codes = {name: engine.weights.destinations[names.index(name)].clone() for name in names if "packed" in name}

        def stale(source, version, model_config):
            before.update({n: t.clone() for n, t in zip(names, engine.weights.destinations, strict=True)})
            delivered = write(source, version, model_config)
            for name, tensor in zip(names, engine.weights.destinations, strict=True):
                if name.endswith("layers.1.mlp.down_proj.weight_global_scale"):
                    tensor.copy_(before[name])
            return delivered

        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.dim() > 1 and "proj" in name:
                    parameter.mul_(2.0)
        monkeypatch.setattr(writer, "write", stale)
        with pytest.raises(HandoffError, match=r"in model\.layers\.1\.mlp\.down_proj\.weight_global_scale\."):
            publish(trainer)
        with pytest.raises(EngineStateError, match="never given any"):
            trainer.generate("1+2=")
        monkeypatch.undo()
        publish(trainer)
        assert all(torch.equal(engine.weights.destinations[names.index(name)], kept) for name, kept in codes.items())
        check_bytes(engine, module, "nvfp4")
        # The probe finds stale scales as well, if nothing compares bytes.
        monkeypatch.setattr(writer, "write", stale)
        monkeypatch.setattr(side_of(worker), "verify", lambda version: {})
        with torch.no_grad():
            module.model.layers[1].mlp.down_proj.weight.mul_(4.0)
        with pytest.raises(HandoffError, match="engine and trainer differ by .* in the logprobs of the probe prompt"):
            publish(trainer)
        monkeypatch.undo()
        with torch.no_grad():
            module.model.layers[0].self_attn.q_proj.weight[0, 0] = math.nan
        with pytest.raises(HandoffError, match=r"layers\.0\.self_attn\.q_proj\.weight has values that are not finite"):
            publish(trainer)
    assert all(type(layer) is torch.nn.Linear for layer in module.modules() if isinstance(layer, torch.nn.Linear))


@pytest.mark.sweep
@pytest.mark.parametrize("grid", GAPS)
def test_an_engine_on_a_grid_holds_what_vllms_functions_make(grid, tmp_path):
    with run(tmp_path, grid, aware=False, max_steps=5) as (trainer, lines):
        for line in lines:
            assert 1e-4 < line["sampling/sampling_logp_difference/max"] < GAPS[grid]
            assert line["handoff/probe_gap"] < 1e-5  # whose half of the trainer is on the grid
            assert line["timing/verify"] > 0 and line["handoff/unproven_bytes"] == 0
        worker = worker_of(trainer)
        check_bytes(engine_of(worker), module_of(worker), grid)
        assert side_of(worker).joined == engine_of(worker).quantisation.joined


@pytest.mark.sweep
@pytest.mark.parametrize("grid", ["int4", "nvfp4"])
def test_adapters_are_added_before_the_one_rounding(grid, tmp_path):
    keys = {"lora.r": 4, "handoff.probe_tolerance": 5.0, "learning_rate": 1e-2}
    with run(tmp_path, grid, aware=False, **keys) as (trainer, lines):
        assert all(line["timing/verify"] > 0 for line in lines)
        worker = worker_of(trainer)
        merged = module_of(worker)
        changes = low_rank_changes(merged, torch.float32)
        with plain(merged), torch.no_grad():
            for name, parameter in merged.named_parameters():
                if name in changes:
                    box = tuple(slice(0, extent) for extent in parameter.shape)
                    parameter.copy_(changes[name].merged(parameter, box))
            assert changes
            check_bytes(engine_of(worker), merged, grid)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("grid", "size"), [("fp8", 2), ("fp8_block", 1), ("int4", 2), ("int4", 1), ("nvfp4", 2), ("nvfp4", 1)]
)
def test_shards_are_quantised_as_the_whole(grid, size, tmp_path):
    """Two ranks of FSDP2, tensor parallel or as two replicas: the same samples as one rank, and, of a trainer on the
    grid, its logprobs."""
    aware = grid in ("int4", "nvfp4")
    keys = {"num_ranks": 2, "tensor_parallel_size": size, "ray.env_vars": {"TMPDIR": "/" + "tmp"}}
    with run(tmp_path, grid, aware=aware, **keys) as (_, lines):
        for line in lines:
            limit = 1e-5 if aware else GAPS[grid]
            assert line["sampling/sampling_logp_difference/max"] < limit
            assert line["timing/verify"] > 0 and line["handoff/unproven_bytes"] == 0
