"""How a mini-batch is cut and ordered changes neither loss nor gradient, for every policy loss, aggregation and further
term."""

import pytest
import torch

from hybrid_rl.controller import RankContext
from hybrid_rl.models import CausalLM
from hybrid_rl.training.spec import Counts, LossSpec
from tests.reference.grpo_case import build_model, flatten_gradient
from tests.unit.training.objective_steps import STEPS, backward, prepared_batch, step_batch, step_config

pytestmark = pytest.mark.slow

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()


def outcome(name: str, micro_batches: list[list[int]], dtype: torch.dtype) -> tuple[float, torch.Tensor, torch.Tensor]:
    config = step_config(name)
    batch = prepared_batch(step_batch(config), config, [rows for rows in micro_batches if rows], RankContext())
    model = CausalLM(build_model(dtype))
    loss, learned = backward(model, batch, config, micro_batches, Counts.of(batch, LossSpec.of(config)))
    return loss, flatten_gradient(model.module), torch.zeros(1) if learned is None else learned


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.sweep), torch.float64], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("name", STEPS)
def test_cut_and_order_change_nothing(name: str, dtype: torch.dtype) -> None:
    """1, 2, 4, 8 micro-batches, the samples shuffled, and with empty ones between them; in float64 1 and 8."""
    expected = outcome(name, [list(range(16))], dtype)
    assert expected[1].abs().max() > 1e-5
    for size in (8, 4, 2) if dtype == torch.float32 else (2,):
        cuts = [ORDER[start : start + size] for start in range(0, 16, size)]
        found = outcome(name, [[], *cuts, []], dtype)
        assert abs(found[0] - expected[0]) < TOLERANCE[dtype] * max(1.0, abs(expected[0]))
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE[dtype])
