"""Clip-Cov and KL-Cov: which tokens are chosen, over the whole mini-batch in any order, and what becomes of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import Clip, LossInputs, WholeMiniBatch
from hybrid_rl.algos.policy_losses.covariance import (
    ClipCov,
    KLCov,
    draw_by_covariance,
    highest_covariance,
    token_covariance,
    token_keys,
)


def batch(seed: int = 1, num_samples: int = 12, draw: int = 0) -> WholeMiniBatch:
    """Samples of 1 to 30 tokens in groups of three, a fifth of the tokens masked. float32 logprobs, as on ranks."""
    generator = torch.Generator().manual_seed(draw)
    lengths = torch.randint(1, 31, (num_samples,), generator=generator)
    rows = torch.repeat_interleave(torch.arange(num_samples), lengths)
    return WholeMiniBatch(
        old_logprobs=-3 * torch.rand(len(rows), generator=generator),
        advantages=torch.randn(num_samples, generator=generator)[rows],
        mask=torch.rand(len(rows), generator=generator) < 0.8,
        rows=rows,
        num_rows=num_samples,
        groups=torch.arange(num_samples) // 3,
        seed=seed,
    )


def reordered(whole: WholeMiniBatch, order: list[int]) -> tuple[WholeMiniBatch, Tensor]:
    """The same samples in another order, and where each of its tokens was before."""
    places = torch.cat([(whole.rows == row).nonzero()[:, 0] for row in order])
    counts = [int((whole.rows == row).sum()) for row in order]
    moved = WholeMiniBatch(
        whole.old_logprobs[places],
        whole.advantages[places],
        whole.mask[places],
        torch.repeat_interleave(torch.arange(len(order)), torch.tensor(counts)),
        whole.num_rows,
        whole.groups[order],
        whole.seed,
    )
    return moved, places


def covariances(whole: WholeMiniBatch) -> list[float]:
    """Written out."""
    kept = [i for i in range(len(whole.rows)) if whole.mask[i]]
    logprobs, advantages = whole.old_logprobs.double().tolist(), whole.advantages.double().tolist()
    means = [sum(column[i] for i in kept) / len(kept) for column in (logprobs, advantages)]
    return [(logprobs[i] - means[0]) * (advantages[i] - means[1]) if i in kept else 0.0 for i in range(len(whole.rows))]


def test_covariance_by_hand() -> None:
    """ln p -1, -3, advantages 2, -2, means -2 and 0: (1)(2) and (-1)(-2) are 2; the masked token counts nowhere."""
    mask = torch.tensor([True, False, True])
    mine = token_covariance(torch.tensor([-1.0, -900.0, -3.0]), torch.tensor([2.0, math.nan, -2.0]), mask)
    assert mine.tolist() == [2.0, 0.0, 2.0]
    whole = batch()
    mine = token_covariance(whole.old_logprobs, whole.advantages, whole.mask)
    assert mine.tolist() == pytest.approx(covariances(whole), rel=1e-12, abs=1e-15)


def test_covariance_is_the_same_to_the_last_bit_in_any_order() -> None:
    """Sums of numbers of many sizes: added up in another order they would round otherwise."""
    generator = torch.Generator().manual_seed(11)
    logprobs, advantages = torch.randn(2, 500, dtype=torch.float64, generator=generator).exp() ** 3
    mask, order = torch.arange(500) % 3 != 0, torch.randperm(500, generator=generator)
    moved = token_covariance(logprobs[order], advantages[order], mask[order])
    assert torch.equal(moved, token_covariance(logprobs, advantages, mask)[order])


@pytest.mark.parametrize("ratio", [1e-4, 0.05, 0.3, 1.0])
def test_the_highest_covariances_are_chosen(ratio: float) -> None:
    whole = batch()
    values, num_tokens = covariances(whole), int(whole.mask.sum())
    ranked = sorted((i for i in range(len(values)) if whole.mask[i]), key=lambda i: -values[i])
    expected = set(ranked[: max(1, int(ratio * num_tokens))])
    assert set(highest_covariance(whole, ratio=ratio).nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("ratio", [1e-4, 0.05, 1.0])
def test_tokens_are_drawn_between_the_bounds(ratio: float) -> None:
    whole = batch()
    values = covariances(whole)
    inside = {i for i, value in enumerate(values) if whole.mask[i] and 0.2 < value < 1.0}
    drawn = set(draw_by_covariance(whole, ratio=ratio, lower=0.2, upper=1.0).nonzero()[:, 0].tolist())
    assert drawn <= inside and len(drawn) == min(len(inside), max(1, int(ratio * int(whole.mask.sum()))))
    assert len(inside) > 20


def test_nothing_between_the_bounds_nothing_drawn() -> None:
    assert not draw_by_covariance(batch(), ratio=1.0, lower=50.0, upper=60.0).any()


def test_a_mini_batch_without_tokens() -> None:
    whole = batch()
    empty = WholeMiniBatch(
        whole.old_logprobs, whole.advantages, whole.mask & False, whole.rows, whole.num_rows, whole.groups, 1
    )
    assert not highest_covariance(empty, ratio=1.0).any()
    assert not draw_by_covariance(empty, ratio=1.0, lower=-9.0, upper=9.0).any()


@pytest.mark.parametrize("order", [list(range(11, -1, -1)), [5, 0, 7, 2, 11, 9, 1, 3, 10, 4, 8, 6]])
def test_the_order_of_samples_changes_nothing(order: list[int]) -> None:
    whole = batch()
    moved, places = reordered(whole, order)
    for record in (ClipCov(clip_cov_ratio=0.1, clip_cov_lb=0.0), KLCov(kl_cov_ratio=0.1)):
        chosen = record.prepare(whole)
        assert 0 < chosen.sum() < len(chosen) and chosen.dtype == torch.float32
        assert torch.equal(record.prepare(moved), chosen[places])
    assert torch.equal(token_keys(moved), token_keys(whole)[places])


def test_ties_do_not_follow_the_order_of_samples() -> None:
    """Four samples with a token of the same covariance: which of them is chosen is the same in any order."""
    logprobs = torch.tensor([[-1.0, -2.0, -2.1 - number / 10] for number in range(4)]).flatten()
    rows = torch.arange(12) // 3
    whole = WholeMiniBatch(logprobs, torch.tensor([4.0, 0, 0] * 4), rows >= 0, rows, 4, rows[::3], seed=3)
    chosen = highest_covariance(whole, ratio=0.125)
    assert chosen[::3].sum() == 1 and chosen.sum() == 1
    moved, places = reordered(whole, [3, 2, 1, 0])
    assert torch.equal(highest_covariance(moved, ratio=0.125), chosen[places])
    winners = {
        int(highest_covariance(WholeMiniBatch(**{**vars(whole), "seed": seed}), ratio=0.125).nonzero())
        for seed in range(30)
    }
    assert winners == {0, 3, 6, 9}


def test_the_seed_draws_evenly() -> None:
    """Every candidate comes up about as often: 400 draws of 1 in 20 are 20 each, within five standard deviations."""
    rows = torch.arange(20) // 4
    logprobs = -torch.arange(20.0) / 20
    counts: Counter[int] = Counter()
    for seed in range(400):
        whole = WholeMiniBatch(logprobs, logprobs, rows >= 0, rows, 5, rows[::4], seed)
        drawn = draw_by_covariance(whole, ratio=0.05, lower=-9.0, upper=9.0).nonzero()[:, 0].tolist()
        counts.update(drawn)
        assert len(drawn) == 1
    assert len(counts) == 20 and max(counts.values()) < 20 + 5 * math.sqrt(19)


def test_keys_tell_tokens_apart() -> None:
    """Equal tokens at equal places of unlike samples, and equal tokens of one sample; only equal samples share them."""
    rows = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -1.0, -1.0, -3.0, -1.0, -1.0, -2.0])
    whole = WholeMiniBatch(logprobs, torch.ones(9), rows >= 0, rows, 3, rows[::3], seed=0)
    keys = token_keys(whole).tolist()
    assert len(set(keys[:6])) == 6 and keys[6:] == keys[:3]


def micro_batch(**changes: Any) -> LossInputs:
    num_tokens = 10
    generator = torch.Generator().manual_seed(4)
    columns: dict[str, Any] = {
        "logprobs": torch.randn(num_tokens, dtype=torch.float64, generator=generator).requires_grad_(),
        "old_logprobs": torch.randn(num_tokens, dtype=torch.float64, generator=generator),
        "advantages": torch.randn(num_tokens, dtype=torch.float64, generator=generator),
        "mask": torch.arange(num_tokens) != 3,
        "rows": torch.arange(num_tokens) // 5,
        "num_rows": 2,
        "prepared": (torch.arange(num_tokens) % 3 == 0).float(),
    }
    columns["entropy"] = columns["rollout_logprobs"] = columns["old_logprobs"]
    return LossInputs(**{**columns, **changes})


def test_clip_cov_takes_the_gradient_from_what_was_drawn() -> None:
    """Everything else is the clipped surrogate with bounds 0 and 2, and the drawn tokens are 0."""
    given = micro_batch()
    loss = ClipCov().loss(given)
    (gradient,) = torch.autograd.grad(loss.per_token[given.mask].sum(), given.logprobs)
    plain = Clip(epsilon=1.0).loss(given)
    (expected,) = torch.autograd.grad(plain.per_token[given.mask].sum(), given.logprobs)
    drawn = torch.arange(10) % 3 == 0
    assert not loss.per_token[drawn].any() and not gradient[drawn].any() and expected[drawn & given.mask].all()
    assert torch.equal(loss.per_token[~drawn], plain.per_token[~drawn]) and torch.equal(
        gradient[~drawn], expected[~drawn]
    )
    assert torch.equal(loss.clipped_high, plain.clipped_high | (drawn & (given.advantages > 0)))
    assert torch.equal(loss.clipped_low, plain.clipped_low | (drawn & (given.advantages < 0)))
    assert torch.equal(loss.metrics["covariance/selected_share"], drawn.double())


@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_kl_cov_against_a_loop(coef: float) -> None:
    """-r A, + coef |ln r| where chosen; the gradient of that is -r A + coef sign(ln r)."""
    given = micro_batch()
    loss = KLCov(kl_cov_coef=coef).loss(given)
    (gradient,) = torch.autograd.grad(loss.per_token[given.mask].sum(), given.logprobs)
    for i in range(10):
        if i == 3:
            assert gradient[i] == 0
            continue
        log_ratio = float(given.logprobs[i].detach() - given.old_logprobs[i])
        value = slope = -math.exp(log_ratio) * float(given.advantages[i])
        if i % 3 == 0:
            value, slope = value + coef * abs(log_ratio), slope + math.copysign(coef, log_ratio)
        assert float(loss.per_token[i].detach()) == pytest.approx(value, rel=1e-12)
        assert float(gradient[i]) == pytest.approx(slope, rel=1e-12)
    assert not loss.clipped_low.any() and not loss.clipped_high.any()


def test_kl_cov_does_not_clip_and_begins_as_reinforce() -> None:
    """At ratio 1 the penalty has no gradient yet."""
    logprobs = torch.tensor([0.0, 3.0], dtype=torch.float64, requires_grad=True)
    old, chosen, rows = torch.zeros(2).double(), torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64)
    inputs = LossInputs(logprobs, old, torch.ones(2).double(), rows == 0, rows, 1, prepared=chosen)
    KLCov().loss(inputs).per_token.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-1.0, -math.exp(3.0)], rel=1e-12)


@pytest.mark.parametrize("record", [ClipCov(clip_cov_ratio=0.2, clip_cov_lb=0.0), KLCov(kl_cov_ratio=0.2)])
def test_how_the_mini_batch_is_cut_changes_nothing(record: Any) -> None:
    """Prepared once for all ranks, then cut into samples in another order: the same loss of every token."""
    whole = batch()
    prepared = record.prepare(whole)
    generator = torch.Generator().manual_seed(9)
    logprobs = whole.old_logprobs + 0.1 * torch.randn(len(whole.rows), generator=generator)

    def loss(mine: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        columns = [whole.old_logprobs[mine], whole.advantages[mine], whole.mask[mine]]
        old = whole.old_logprobs[mine]
        given = LossInputs(logprobs[mine], *columns, rows, num_rows, old, old, prepared=prepared[mine])
        return record.loss(given).per_token

    together = loss(torch.arange(len(whole.rows)), whole.rows, whole.num_rows)
    for row in (7, 2, 11, 0):
        mine = (whole.rows == row).nonzero()[:, 0]
        assert torch.equal(loss(mine, torch.zeros_like(mine), 1), together[mine])


@pytest.mark.parametrize("record", [ClipCov(), KLCov()])
@pytest.mark.parametrize("wild", [-200.0, -math.inf, math.nan])
def test_masked_tokens_cannot_poison_anything(record: Any, wild: float) -> None:
    given = micro_batch()
    old = torch.where(given.mask, given.old_logprobs, wild)
    given = micro_batch(old_logprobs=old)
    per_token = record.loss(given).per_token
    torch.where(given.mask, per_token, torch.zeros_like(per_token)).sum().backward()
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.isfinite().all() and not given.logprobs.grad[~given.mask].any()
    whole = batch()
    poisoned = WholeMiniBatch(**{**vars(whole), "old_logprobs": torch.where(whole.mask, whole.old_logprobs, wild)})
    assert torch.equal(record.prepare(poisoned), record.prepare(whole))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"the column prepared is None"):
        ClipCov().loss(micro_batch(prepared=None))
    with pytest.raises(ValueError, match=r"must all be \[T\].*'prepared': \(9,\)"):
        KLCov().loss(micro_batch(prepared=torch.zeros(9)))
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        token_covariance(torch.zeros(2), torch.zeros(3), torch.ones(2, dtype=torch.bool))
