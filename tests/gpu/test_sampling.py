"""Noise and sampling on the device against the CPU."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.compat.native import keyed_uniform
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.engines.sampling import SamplingTensors, sample
from tests.gpu import sampling_cases
from tests.gpu.device import DEVICE, cuda_only

PARAMS = {
    "full": {},
    "tempered": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all": {"temperature": 1.4, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("num_columns", [1, 2, 5, 4099])
def test_noise_is_equal_to_the_bit(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (257,), generator=generator)
    positions = torch.randint(-(2**40), 2**40, (257,), generator=generator)
    seeds[:3] = torch.tensor([0, -1, -(2**63)])
    expected = keyed_uniform(seeds, positions, num_columns)
    mine = keyed_uniform(seeds.to(DEVICE), positions.to(DEVICE), num_columns)
    assert mine.device.type == DEVICE
    assert torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("vocabulary", [5, 1000, 152064])
@pytest.mark.parametrize("name", PARAMS)
def test_the_same_tokens_are_drawn(name: str, vocabulary: int) -> None:
    """The cumulative sum runs in another order: a draw within rounding of the edge between two tokens may differ."""
    logits = 3 * torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(8, seed=row, **PARAMS[name]) for row in range(64)]
    positions = torch.arange(64) % 5
    drawn = {
        device: sample(logits.to(device), SamplingTensors.of(params, torch.device(device)), positions.to(device))
        for device in ("cpu", DEVICE)
    }
    (tokens, logprobs), (expected, expected_logprobs) = drawn[DEVICE], drawn["cpu"]
    same = tokens.cpu() == expected
    assert int(same.sum()) >= 63
    torch.testing.assert_close(logprobs.cpu()[same], expected_logprobs[same], rtol=1e-5, atol=1e-5)


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    """20,000 draws of 4 tokens: chi squared below the 99.99 % quantile for 3 degrees of freedom, 21.1."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    count = 20_000
    params = SamplingTensors.of([SamplingParams(1, seed=row) for row in range(count)], torch.device(DEVICE))
    logits = p.log().expand(count, 4).to(DEVICE)
    tokens, _ = sample(logits, params, torch.zeros(count, dtype=torch.int64, device=DEVICE))
    seen = torch.bincount(tokens.cpu(), minlength=4)
    assert float(((seen - count * p) ** 2 / (count * p)).sum()) < 21.1


@cuda_only
def test_the_kernels_draw_where_the_uniform_numbers_fall() -> None:
    """All cases of the kernels, within the bounds that triton_sampling.py derives for the device's arithmetic."""
    problems = sampling_cases.found("cuda")
    assert problems == dict.fromkeys(problems)


@cuda_only
def test_a_captured_draw_follows_its_numbers() -> None:
    from hybrid_rl.engines.triton_sampling import choose  # Triton is there only with CUDA

    logits = torch.zeros(4, 5000, device=DEVICE)
    temperature = torch.ones(4, device=DEVICE)
    uniform = torch.full((4,), 0.5, dtype=torch.float64, device=DEVICE)
    out = choose(logits, temperature, uniform).clone()  # compiled outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(logits, temperature, uniform, out)
    uniform.copy_(torch.tensor([0.00001, 0.25005, 0.50005, 0.99999]))
    graph.replay()
    assert out[:, 0].tolist() == [0, 1250, 2500, 4999]
