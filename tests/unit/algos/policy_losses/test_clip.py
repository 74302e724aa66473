"""The clipped surrogate: value and gradient by hand on every side of the clip, token by token and per sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import PolicyLoss, token_weights
from hybrid_rl.algos.policy_losses import Clip
from hybrid_rl.errors import ConfigError
from tests.unit.algos.policy_losses.samples import assert_is, columns, loss_and_gradient, loss_of, samples

DAPO = {"epsilon": 0.2, "epsilon_high": 0.28}


def single(ratio: float, advantage: float, **options: Any) -> tuple[PolicyLoss, float, float]:
    """The loss of one token with this ratio: record, value, gradient by its logprob."""
    logprob = torch.tensor([math.log(ratio) - 1.5], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([-1.5], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    one = torch.zeros(1, dtype=torch.int64)
    loss = loss_of(Clip(**{**DAPO, **options}), logprob, old, advantages, one == 0, one, 1)
    loss.per_token.sum().backward()
    assert logprob.grad is not None
    return loss, loss.per_token.item(), logprob.grad.item()


# d(ratio)/d(logprob) = ratio, so an unclipped token has gradient = value.
@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "value", "slope", "clipped"),
    [
        (1.0, 2.0, None, -2.0, -2.0, ""),
        (1.1, 2.0, None, -2.2, -2.2, ""),
        (1.5, 2.0, None, -2.56, 0.0, "high"),
        (1.5, -2.0, None, 3.0, 3.0, ""),
        (0.5, 2.0, None, -1.0, -1.0, ""),
        (0.5, -2.0, None, 1.6, 0.0, "low"),
        (6.0, -2.0, None, 12.0, 12.0, ""),
        (6.0, -2.0, 4.0, 8.0, 0.0, ""),
        (3.0, -2.0, 4.0, 6.0, 6.0, ""),
        (6.0, 2.0, 4.0, -2.56, 0.0, "high"),
        (1.5, 0.0, None, 0.0, 0.0, ""),
    ],
)
def test_one_token(
    ratio: float, advantage: float, delta: float | None, value: float, slope: float, clipped: str
) -> None:
    loss, got_value, got_slope = single(ratio, advantage, delta=delta)
    assert (got_value, got_slope) == pytest.approx((value, slope), rel=1e-12, abs=0)
    assert (bool(loss.clipped_low), bool(loss.clipped_high)) == (clipped == "low", clipped == "high")
    assert float(loss.ratio) == pytest.approx(ratio) and not loss.ratio.requires_grad


# Dual clip with c = 3: the loss of a negative advantage stops at 3 |A|, before that and elsewhere it is as without.
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "is_beyond"),
    [
        (6.0, -2.0, 6.0, 0.0, True),
        (2.9, -2.0, 5.8, 5.8, False),
        (0.5, -2.0, 1.6, 0.0, False),
        (6.0, 2.0, -2.56, 0.0, False),
        (1.0, 2.0, -2.0, -2.0, False),
        (6.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip(ratio: float, advantage: float, value: float, slope: float, is_beyond: bool) -> None:
    loss, got_value, got_slope = single(ratio, advantage, dual_clip=3.0)
    assert (got_value, got_slope) == pytest.approx((value, slope), rel=1e-12, abs=0)
    assert loss.metrics["clip_ratio/ceiling"].tolist() == [float(is_beyond)]
    assert not loss.clipped_high.any() or advantage > 0


@pytest.mark.parametrize("ratio", [0.1, 0.9, 1.2, 2.9, 3.1, 50.0])
@pytest.mark.parametrize("advantage", [-2.0, 3.0])
def test_dual_clip_is_delta_above_the_upper_bound(ratio: float, advantage: float) -> None:
    dual, delta = single(ratio, advantage, dual_clip=3.0), single(ratio, advantage, delta=3.0)
    assert dual[1:] == pytest.approx(delta[1:], rel=1e-14)
    with pytest.raises(ConfigError, match="delta=3.0 and dual_clip=2.0 both bound"):
        Clip(delta=3.0, dual_clip=2.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence_token"},
        {"delta": 4.0},
        {"dual_clip": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("advantage", "value", "slope"), [(1.0, -1.2, 0.0), (0.0, 0.0, 0.0), (-1.0, None, None)])
def test_a_ratio_beyond_float32(
    options: dict[str, Any], advantage: float, value: float | None, slope: float | None
) -> None:
    """ln p = -1 and -90 before: e^89 is no float32. Clipped it has no gradient; what is not clipped ends at e^20, and
    what two-sided or dual clip bounds at their bound, again without a gradient."""
    if value is None:
        bound = options.get("delta", options.get("dual_clip"))
        value, slope = (math.exp(20), math.exp(20)) if bound is None else (bound, 0.0)
    logprob, one = torch.tensor([-1.0], requires_grad=True), torch.zeros(1, dtype=torch.int64)
    loss = loss_of(Clip(**options), logprob, torch.tensor([-90.0]), torch.tensor([advantage]), one == 0, one, 1)
    loss.per_token.sum().backward()
    assert logprob.grad is not None
    assert (loss.per_token.item(), logprob.grad.item()) == pytest.approx((value, slope), rel=1e-6)


def test_at_the_old_policy_the_gradient_is_that_of_reinforce() -> None:
    """Ratio exactly 1 (old = own logprobs, detached): value -A, gradient -A, not half of it at the tie of the min."""
    logprobs = torch.tensor([-0.1, -2.0, -7.0], requires_grad=True)
    advantages, rows = torch.tensor([1.0, -3.0, 0.5]), torch.tensor([0, 0, 1])
    loss = loss_of(Clip(**DAPO), logprobs, logprobs, advantages, rows >= 0, rows, 2)
    assert loss.ratio.tolist() == [1.0] * 3
    loss.per_token.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 3.0, -0.5]


@pytest.fixture
def sequences() -> dict[str, Tensor]:
    """Row 0: the GSPO example; row 1: three tokens, the middle one masked with a logprob that must not matter."""
    return {
        "logprobs": torch.tensor([-1.0, -2.0, -1.0, -50.0, -3.0], dtype=torch.float64, requires_grad=True),
        "old_logprobs": torch.tensor([-1.2, -2.2, -1.5, -1.0, -2.9], dtype=torch.float64),
        "advantages": torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0], dtype=torch.float64),
        "mask": torch.tensor([True, True, True, False, True]),
        "rows": torch.tensor([0, 0, 1, 1, 1]),
    }


def test_sequence_level_is_gspo(sequences: dict[str, Tensor]) -> None:
    """exp(mean of .2, .2) = 1.221403; exp(mean of .5, -.1) = exp(.2) over the two unmasked tokens of row 1.

    d ratio / d logprob_t = ratio / |y|, and every token of the row carries the ratio: -A ratio |y| / |y| for each
    unmasked token, where the three places of row 1 (one of them masked, weight 0 later) are left out here.
    """
    loss = loss_of(Clip(epsilon=0.5, importance_sampling_level="sequence"), **sequences, num_rows=2)
    assert loss.ratio.tolist() == pytest.approx([1.221403] * 5, abs=5e-7)
    assert loss.per_token.tolist() == pytest.approx([-1.221403] * 2 + [2 * 1.221403, 0, 2 * 1.221403], abs=1e-6)
    loss.per_token[sequences["mask"]].sum().backward()
    gradient = sequences["logprobs"].grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([-1.221403, -1.221403, 2.442806, 0.0, 2.442806], abs=1e-6)


def test_sequence_level_clips_whole_sequences(sequences: dict[str, Tensor]) -> None:
    """At GSPO's 4e-4 row 0 (A > 0) is clipped, row 1 (A < 0, ratio above 1) is not."""
    loss = loss_of(Clip(epsilon=3e-4, epsilon_high=4e-4, importance_sampling_level="sequence"), **sequences, num_rows=2)
    assert loss.clipped_high.tolist() == [True, True, False, False, False] and not loss.clipped_low.any()
    assert loss.per_token[:2].tolist() == pytest.approx([-1.0004] * 2, rel=1e-12)
    loss.per_token[sequences["mask"]].sum().backward()
    gradient = sequences["logprobs"].grad
    assert gradient is not None and gradient[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_all_levels_written_out(level: str, dual_clip: float | None) -> None:
    given = columns()
    low, high = (0.2, 0.28) if level == "token" else (0.1, 0.12)
    record = Clip(epsilon=low, epsilon_high=high, dual_clip=dual_clip, importance_sampling_level=level)  # type: ignore[arg-type]
    loss, gradient = loss_and_gradient(record, given)
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    expected, sides = [], set()
    for places in samples(given):
        mean = math.exp(sum(new[t] - old[t] for t in places) / len(places)) if places else 0.0
        found = []
        for t in places:
            ratio = math.exp(new[t] - old[t]) if level == "token" else mean
            bounded, advantage = min(max(ratio, 1 - low), 1 + high), advantages[t]
            objective = min(ratio * advantage, bounded * advantage)
            is_free = ratio * advantage <= bounded * advantage
            if dual_clip is not None and advantage < 0 and objective < dual_clip * advantage:
                objective, is_free = dual_clip * advantage, False
            sides.add((is_free, advantage > 0))
            found.append((t, -objective, -ratio * advantage if is_free else 0.0))
        if level == "sequence":  # each token of a completion carries 1 / |y| of the ratio of all of them
            found = [(t, value, sum(slope for _, _, slope in found) / len(found)) for t, value, _ in found]
        expected += found
    assert_is(loss, gradient, expected)
    assert loss.per_sample == (level != "token")
    assert len(sides) >= 3  # clipped and not, with both signs: at least three of the four


def test_gspo_token_differs_where_advantages_do() -> None:
    """One completion, A = 1 and -1: the plain sequence ratio lets gradients cancel, GSPO-token keeps each token's."""
    arguments = {
        "old_logprobs": torch.tensor([-1.2, -2.2], dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mask": torch.tensor([True, True]),
        "rows": torch.tensor([0, 0]),
        "num_rows": 1,
    }
    slopes = {}
    for level in ("sequence", "sequence_token"):
        logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        loss = loss_of(Clip(epsilon=0.5, importance_sampling_level=level), logprobs, **arguments)  # type: ignore[arg-type]
        assert loss.per_token.tolist() == pytest.approx([-1.221403, 1.221403], abs=5e-7)
        (slopes[level],) = torch.autograd.grad(loss.per_token.sum(), logprobs)
    assert slopes["sequence"].tolist() == [0.0, 0.0]
    assert slopes["sequence_token"].tolist() == pytest.approx([-1.221403, 1.221403], abs=5e-7)


def test_luspo_is_the_sequence_level_with_sequence_sum() -> None:
    """arXiv:2602.05261: mean over completions of |y| min(s A, clip(s) A), at the paper's 2e-3 and 2.5e-3."""
    given = columns()
    record = Clip(epsilon=2e-3, epsilon_high=2.5e-3, importance_sampling_level="sequence")
    loss, _ = loss_and_gradient(record, given)
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    total = 0.0
    for places in samples(given):
        if not places:
            continue
        s = math.exp(sum(new[t] - old[t] for t in places) / len(places))
        advantage = advantages[places[0]]
        total -= len(places) * min(s * advantage, min(max(s, 1 - 2e-3), 1 + 2.5e-3) * advantage)
    weights = token_weights(
        given["mask"], given["rows"], 6, "sequence_sum", num_tokens=18, num_trajectories=6, max_completion_length=9
    )
    kept = torch.where(given["mask"], loss.per_token, 0.0)
    assert (weights * kept).sum().item() == pytest.approx(total / 6, rel=1e-7)  # weights are float32


def test_levels_agree_on_single_tokens() -> None:
    arguments = (-torch.rand(6), -torch.rand(6), torch.randn(6), torch.ones(6, dtype=torch.bool), torch.arange(6), 6)
    token, sequence, both = (
        loss_of(Clip(**DAPO, importance_sampling_level=level), *arguments)
        for level in ("token", "sequence", "sequence_token")
    )
    assert torch.equal(token.per_token, sequence.per_token) and torch.equal(token.per_token, both.per_token)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("wild", [-200.0, -math.inf, math.nan])
def test_masked_tokens_cannot_poison_the_gradient(level: str, wild: float) -> None:
    """exp(199) overflows fp32; 0 * inf in the backward pass would make every gradient NaN."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.1, wild, -1.0])
    mask, rows = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
    loss = loss_of(Clip(**DAPO, importance_sampling_level=level), logprobs, old, torch.ones(3), mask, rows, 2)
    torch.where(mask, loss.per_token, torch.zeros(3)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1), 0.0, -1.0], rel=1e-6)


def test_gradients_flow_through_logprobs_only() -> None:
    logprobs, old, advantages = (torch.full((2,), -1.0, requires_grad=True) for _ in range(3))
    rows = torch.zeros(2, dtype=torch.int64)
    loss_of(Clip(**DAPO), logprobs, old, advantages, rows == 0, rows, 1).per_token.sum().backward()
    assert logprobs.grad is not None and old.grad is None and advantages.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(1)}, r"must all be \[T\]"),
    ],
)
def test_bad_arguments(sequences: dict[str, Tensor], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(Clip(**DAPO), **{**sequences, **change}, num_rows=2)  # type: ignore[arg-type]
