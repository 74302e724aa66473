"""What all objectives of this room have in common."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import PolicyObjective, WholeMiniBatch
from hybrid_rl.algos.policy_losses import (
    A3PO,
    CISPO,
    GMPO,
    SAPO,
    VESPO,
    Clip,
    Decoupled,
    LambdaGRPO,
    Reinforce,
)
from tests.unit.algos.policy_losses.samples import (
    GROUPS,
    LENGTHS,
    MASK,
    VERSION,
    WILD,
    Columns,
    columns,
    loss_and_gradient,
    part,
)

RECORDS = {
    "clip": Clip(epsilon_high=0.28),
    "dual_clip": Clip(dual_clip=1.5),
    "gspo": Clip(epsilon=3e-2, epsilon_high=4e-2, importance_sampling_level="sequence"),
    "gspo_token": Clip(epsilon=3e-2, epsilon_high=4e-2, importance_sampling_level="sequence_token"),
    "decoupled": Decoupled(),
    "a3po": A3PO(),
    "cispo": CISPO(epsilon=0.5, epsilon_high=0.5),
    "sapo": SAPO(),
    "gmpo": GMPO(),
    "reinforce": Reinforce(),
    "vespo": VESPO(),
    "lambda_grpo": LambdaGRPO(),
}


def extras(record: PolicyObjective, given: Columns) -> dict[str, Tensor]:
    """What else a loss is given: parameters, and what was prepared of the whole mini-batch."""
    whole = WholeMiniBatch(
        given["old_logprobs"], given["advantages"], given["mask"], given["rows"], len(LENGTHS), GROUPS, seed=1
    )
    prepared = record.prepare(whole)
    if prepared is None:
        return {}
    return {"prepared": prepared, "parameters": torch.tensor([0.8], dtype=torch.float64, requires_grad=True)}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("cut", [[[0], [1], [2], [3], [4], [5]], [[5, 2], [0, 4, 3, 1]], [[3, 1, 5, 0, 4, 2]]])
def test_how_a_mini_batch_is_cut_changes_nothing(name: str, cut: list[list[int]]) -> None:
    record, given = RECORDS[name], columns()
    more = extras(record, given)
    loss, gradient = loss_and_gradient(record, given, **more)
    for chosen in cut:
        some, places = part(given, chosen)
        theirs = dict(more, prepared=more["prepared"][places]) if more else {}
        got, slopes = loss_and_gradient(record, some, **theirs)
        kept = some["mask"]
        torch.testing.assert_close(got.per_token[kept], loss.per_token[places][kept], rtol=1e-12, atol=0)
        torch.testing.assert_close(slopes, gradient[places], rtol=1e-12, atol=1e-15)
        for ours, whole in ((got.weight, loss.weight), (got.clipped_low, loss.clipped_low)):
            torch.testing.assert_close(ours[kept], whole[places][kept], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_tokens_have_no_part_in_it(name: str, dtype: torch.dtype) -> None:
    """Whatever a masked token holds, values are finite and gradients the same, and 0 at the token."""
    record, results = RECORDS[name], []
    for wild in (-1e4, -torch.inf, torch.nan, -1.0):
        given = columns()
        given = {key: column.to(dtype) if column.is_floating_point() else column for key, column in given.items()}
        given["logprobs"] = given["logprobs"].detach().requires_grad_()
        given["old_logprobs"][WILD] = given["rollout_logprobs"][WILD] = wild
        loss, gradient = loss_and_gradient(record, given, **extras(record, given))
        assert loss.per_token.dtype == loss.weight.dtype == dtype
        assert loss.per_token[MASK].isfinite().all() and gradient.isfinite().all() and not gradient[~MASK].any()
        results.append((loss.per_token.detach()[MASK], gradient))
    for per_token, gradient in results[1:]:
        assert torch.equal(per_token, results[0][0]) and torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_an_advantage_that_is_no_number_at_a_masked_token_reaches_nothing(name: str, wild: float) -> None:
    """Where a completion has one ratio, the gradient of all of its tokens passes there."""
    record, given = RECORDS[name], columns()
    loss, gradient = loss_and_gradient(record, given, **extras(record, given))
    given["advantages"] = torch.where(MASK, given["advantages"], wild)
    spoilt, found = loss_and_gradient(record, given, **extras(record, given))
    assert torch.equal(spoilt.per_token[MASK], loss.per_token[MASK]) and torch.equal(found, gradient)


@pytest.mark.parametrize("name", RECORDS)
def test_gradients_flow_through_logprobs_only(name: str) -> None:
    record, given = RECORDS[name], columns()
    others = ("old_logprobs", "rollout_logprobs", "advantages")
    for column in others:
        given[column].requires_grad_()
    loss, gradient = loss_and_gradient(record, given, **extras(record, given))
    assert gradient.any() and not loss.ratio.requires_grad
    rest = torch.autograd.grad(loss.per_token[MASK].sum(), [given[column] for column in others], allow_unused=True)
    assert rest == (None,) * 3


@pytest.mark.parametrize("name", [name for name in RECORDS if name != "lambda_grpo"])
def test_at_the_old_policy_all_are_reinforce(name: str) -> None:
    """All ratios 1: the gradient of the mean over a completion's tokens is -A / |y| at each of them."""
    record, given = RECORDS[name], columns()
    given["old_logprobs"] = given["rollout_logprobs"] = given["logprobs"].detach().clone()
    given["token_versions"] = torch.full_like(given["rows"], VERSION)
    _, gradient = loss_and_gradient(record, given)
    expected = torch.where(MASK, -given["advantages"], torch.zeros_like(gradient))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", RECORDS)
def test_metrics_are_one_number_per_token(name: str) -> None:
    record, given = RECORDS[name], columns()
    loss, _ = loss_and_gradient(record, given, **extras(record, given))
    for column in (*loss.metrics.values(), loss.weight, loss.ratio, loss.clipped_low, loss.clipped_high):
        assert column.shape == MASK.shape
    assert all(column[MASK].isfinite().all() for column in loss.metrics.values())
