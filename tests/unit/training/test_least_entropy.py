"""top_entropy_quantile is computed over the whole mini-batch: all its micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.training.mini_batch import look_ahead
from hybrid_rl.training.spec import Counts, LossSpec, MiniBatch, loss_mask
from tests.unit.training.combination_case import START, TEMPERATURE, TableModel, resolved, tiny_batch, train

KEYS: dict[str, Any] = {"top_entropy_quantile": 0.3, "entropy_coef": 0.1, "mask_truncated_completions": True}


@pytest.mark.parametrize("keys", [{}, {"beta": 0.1, "kl_estimator": "exact", "use_bias_correction_kl": False}], ids=str)
def test_cutting_changes_nothing(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One micro-batch finds the quantile itself; of several a forward pass finds it."""
    config = resolved(KEYS | keys)
    whole, *others = (train(config, monkeypatch, dense=False, cut=cut) for cut in (1, 2, 5))
    everything = train(resolved({**KEYS, **keys, "top_entropy_quantile": 1.0}), monkeypatch, dense=False)
    assert 0.3 <= whole.metrics["top_entropy/tokens"] < 0.6  # tokens after the same one have the same entropy
    assert not torch.allclose(whole.gradients[0], everything.gradients[0], atol=1e-3)
    for other in others:
        torch.testing.assert_close(other.gradients[0], whole.gradients[0], rtol=0, atol=1e-7)
        assert other.metrics["top_entropy/tokens"] == pytest.approx(whole.metrics["top_entropy/tokens"])


def test_all_ranks_count() -> None:
    config = resolved(KEYS)
    batch = tiny_batch(config, dense=False, engine_noise=0.3)
    model = TableModel(START)
    shown: list[torch.Tensor] = []
    there = torch.tensor([7.0, 8.0, 9.0])

    def gather(mine: torch.Tensor) -> list[torch.Tensor]:
        shown.append(mine)
        return [mine, there]

    context = RankContext(mesh=RankMesh(dp_shard=2), gather=gather)
    mini, micro_batches = MiniBatch(Counts()), [[3, 0], [], [4]]
    found = look_ahead(model, batch, micro_batches, LossSpec.of(config), mini, None, context).least_entropy  # type: ignore[arg-type]
    chosen = batch.select([3, 0, 4])
    logs = (START / TEMPERATURE).log_softmax(1).float()
    before = [
        [prompt.tolist()[-1], *ids.tolist()[:-1]]
        for prompt, ids in ((chosen["prompt_ids"][row], chosen["completion_ids"][row]) for row in range(3))
    ]
    entropies = -(logs.exp() * logs).sum(1)[torch.tensor(sum(before, []))]
    expected = torch.cat([entropies[loss_mask(chosen, mask_truncated_completions=True)], there])
    torch.testing.assert_close(shown[0], expected[:-3])
    torch.testing.assert_close(found, torch.quantile(expected, 0.7).double(), rtol=1e-6, atol=0)
