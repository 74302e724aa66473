"""The estimate of a step's time against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.plan.rates import Assumptions, Rates, peak_flops, rates_of, rates_of_device
from hybrid_rl.extras.plan.step_time import Generation, Lengths, ModelWork, StepWork, step_time

# Round numbers: 1000 operations, and 100 bytes of each memory and link, a second; half of all of it is reached.
RATES = Rates("round", "1GB", 1000.0, 100.0, 100.0, 100.0)
HALF = Assumptions(0.5, 0.5, 0.5, 0.5, pass_seconds=1.0, network_bandwidth=50.0, host_memory_bandwidth=112.0)
MODEL = ModelWork(weights=30, head=20, num_layers=2, attention_width=5)
LENGTHS = Lengths(num_prompts=2, num_generations=3, prompt=4, completion=2)
WORK = StepWork(2, 8, LENGTHS, MODEL, None)


def test_a_forward_pass() -> None:
    # 2 prompts of 4 and 6 completions of 2 are 20 tokens: 2 x 30 each; the head only for 12.
    # Pairs: 2 x 8 within prompts, 6 x (2 x 4 + 2) of completions: 76, each 4 x 5 in 2 layers.
    assert MODEL.forward_flops(LENGTHS) == 2 * (30 * 20 + 20 * 12) + 4 * 76 * 5 * 2
    # Prompts computed for every sample: 36 tokens, 6 x 8 + 60 pairs.
    assert MODEL.forward_flops(replace(LENGTHS, is_shared=False)) == 2 * (30 * 36 + 20 * 12) + 4 * 108 * 5 * 2


def test_scoring_and_update_by_hand() -> None:
    flops = 4720
    assert MODEL.forward_flops(LENGTHS) == flops
    work = replace(
        WORK, scored={"reference": MODEL, "old": MODEL}, trained={"policy": (MODEL, 25)}, passes=2, optimizer_steps=3
    )
    seconds = step_time(work, RATES, HALF).seconds
    assert seconds["scoring"] == pytest.approx(2 * flops / 1000)  # two ranks, half of 1000 each
    optimizer = 3 * 25 * 28 / 50
    assert seconds["update"] == pytest.approx(3 * 2 * flops / 1000 + optimizer)
    checkpointed = step_time(replace(work, forward_passes=2), RATES, HALF).seconds
    assert checkpointed["update"] == pytest.approx(4 * 2 * flops / 1000 + optimizer)
    # In host memory, whose 112 bytes a second two ranks share; 6 bytes of each parameter cross PCIe at 50.
    on_host = step_time(replace(work, host_optimizers=frozenset({"policy"})), RATES, HALF).seconds
    assert on_host["update"] == pytest.approx(3 * 2 * flops / 1000 + 3 * (25 * 28 / 56 + 25 * 6 / 50))
    assert seconds["rollout"] == seconds["handoff"] == seconds["sleep and wake"] == 0


def test_rollout_by_hand() -> None:
    # Each of two engines has 3 samples of one prompt; two fit together, so a wave of 2 and one of 1.
    generation = Generation(1, max_num_seqs=64, kv_cache_tokens=13, kv_bytes=2, element_bytes=1)
    seconds = step_time(replace(WORK, generation=generation), RATES, HALF).seconds["rollout"]
    prefill = (2 * 30 * 4 + 4 * 8 * 5 * 2) / 500
    two, one = 2 * ((50 + 2 * 5 * 2) / 50 + 1), 2 * ((50 + 5 * 2) / 50 + 1)
    assert seconds == pytest.approx(prefill + two + one)
    # One engine of both ranks, with room for all 6: everything is read from two memories.
    shared = replace(generation, ranks_per_engine=2, kv_cache_tokens=None)
    seconds = step_time(replace(WORK, generation=shared), RATES, HALF).seconds["rollout"]
    assert seconds == pytest.approx(2 * prefill / 2 + 2 * ((50 + 6 * 5 * 2) / 100 + 1))
    # Without a cache of prefixes every sample computes its prompt.
    repeated = step_time(replace(WORK, generation=replace(shared, is_shared=False)), RATES, HALF).seconds["rollout"]
    assert repeated == pytest.approx(seconds + (6 - 2) * prefill / 2)
    # Where products take longer than reading, they count.
    slow = step_time(replace(WORK, generation=shared), replace(RATES, flops=100.0), HALF).seconds["rollout"]
    assert slow == pytest.approx(2 * prefill * 10 / 2 + 2 * (2 * 6 * 50 / 100 + 1))


def test_links_and_shares() -> None:
    rates = replace(RATES, peer_bandwidth=80.0)
    work = replace(WORK, handoff_bytes={"local": 100, "host": 100, "remote": 25, "pcie": 50}, moved_bytes=400)
    found = step_time(work, rates, HALF)
    assert found.seconds["handoff"] == pytest.approx(100 / 50 + 100 / 40 + 25 / 25 + 50 / 50)
    assert found.seconds["sleep and wake"] == pytest.approx(8)
    assert found.total == pytest.approx(14.5) and found.share("handoff") == pytest.approx(6.5 / 14.5)
    assert any("MFU" in line for line in found.assumptions) and any("4 tokens" in line for line in found.assumptions)


def test_experts_that_a_token_visits() -> None:
    model = replace(MODEL, experts=80, expert_share=0.25)
    assert model.parameters_per_token == 50
    assert model.read_elements(1) == 50 + 20
    assert model.read_elements(2) == pytest.approx(50 + 80 * (1 - 0.75**2))


def test_work_of_models_by_their_shapes() -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 12, "vocab_size": 100, "max_position_embeddings": 64}
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(Qwen2Config(**shape, tie_word_embeddings=False))
        tied = AutoModelForCausalLM.from_config(Qwen2Config(**shape, tie_word_embeddings=True))
        moe = Qwen3MoeConfig(**shape, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
        experts = AutoModelForCausalLM.from_config(moe)
    # A layer: queries and output 8 x 8, keys and values 8 x 4 with biases 16, three of 8 x 12, norms 2 x 8.
    layer = 2 * 64 + 2 * 32 + 16 + 3 * 96 + 16
    assert ModelWork.of(dense) == ModelWork(2 * layer + 8, 800, 2, 8)
    assert ModelWork.of(tied) == ModelWork.of(dense)
    found = ModelWork.of(experts)
    assert (found.experts, found.expert_share, found.attention_width) == (2 * 4 * 3 * 8 * 6, 0.5, 16)


def test_gpus_by_name() -> None:
    assert rates_of("h100").flops == 989e12
    with pytest.raises(ConfigError, match="GPU 'H10' are not known .did you mean H100.*; use one of A100"):
        rates_of("H10")
    found = rates_of_device("NVIDIA A100-SXM4-80GB")
    assert found is not None and found.name == "A100"
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and peak_flops("") is None
    assert rates_of_device("NVIDIA H100 PCIe") is None and rates_of_device("Tesla T4") is None
