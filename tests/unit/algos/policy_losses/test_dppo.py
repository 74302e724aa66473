"""DPPO: divergences by hand and as lower bounds of the whole, which side of the trust region is masked, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import LossInputs, PolicyLoss
from hybrid_rl.algos.policy_losses.dppo import DPPO, binary_divergence, top_divergence

V = 12


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def tv(old: list[float], new: list[float]) -> float:
    return sum(abs(p - q) for p, q in zip(old, new, strict=True)) / 2


def kl(old: list[float], new: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(old, new, strict=True) if p)


def whole(num_tokens: int, seed: int, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(num_tokens, V, dtype=torch.float64, generator=generator)).log_softmax(1)


@pytest.mark.parametrize(
    ("old", "new", "total_variation"),
    # The paper's two cases: a ratio of 100 moves less mass than one of 0.81.
    [(1e-4, 1e-2, 0.0099), (0.99, 0.80, 0.19), (0.3, 0.3, 0.0)],
)
def test_binary_by_hand(old: float, new: float, total_variation: float) -> None:
    assert float(binary_divergence(logs(new), logs(old), "tv")) == pytest.approx(total_variation, rel=1e-9, abs=1e-15)
    expected = kl([old, 1 - old], [new, 1 - new])
    assert float(binary_divergence(logs(new), logs(old), "kl")) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize(("old", "new"), [(0.0, 0.0), (-1e-9, 0.0), (0.0, -1e-9), (-0.7, 0.0), (-50.0, -60.0)])
def test_binary_stays_finite(kind: str, old: float, new: float) -> None:
    """Certain tokens have nothing left over: 0 ln(0 / 0) must not come up, and float32 rounding is no divergence."""
    value = float(binary_divergence(torch.tensor([new]), torch.tensor([old]), kind))
    assert math.isfinite(value) and (value > 0.4 if old == -0.7 else abs(value) < 1e-7)


@pytest.mark.parametrize("num_top", [1, 3, V])
@pytest.mark.parametrize(("kind", "reference"), [("tv", tv), ("kl", kl)])
def test_top_k_against_a_loop(num_top: int, kind: str, reference: Any) -> None:
    num_tokens = 60
    new, old = whole(num_tokens, 1), whole(num_tokens, 2)
    token_ids = torch.arange(num_tokens) % V
    ids = old.topk(num_top, dim=1).indices
    chosen = old.gather(1, token_ids[:, None])[:, 0]
    mine = top_divergence(new, token_ids, chosen, ids, old.gather(1, ids), kind)
    assert not mine.requires_grad and mine.dtype == torch.float64
    inside = 0
    for t in range(num_tokens):
        kept = sorted({*ids[t].tolist(), int(token_ids[t])})
        inside += len(kept) == num_top
        p, q = old[t].exp().tolist(), new[t].exp().tolist()
        events = [[x[i] for i in kept] + [max(1 - sum(x[i] for i in kept), 0.0)] for x in (p, q)]
        if len(kept) == V:
            events = [event[:-1] for event in events]
        assert float(mine[t]) == pytest.approx(reference(*events), rel=1e-9, abs=1e-10)
        # A lower bound of the divergence over the vocabulary, exact where all of it is kept.
        assert float(mine[t]) <= reference(p, q) + 1e-9
        if num_top == V:
            assert float(mine[t]) == pytest.approx(reference(p, q), rel=1e-9, abs=1e-10)
    assert inside > 0 and (num_top == V or inside < num_tokens)


def test_the_only_best_token_sampled_is_the_binary_divergence() -> None:
    new, old = whole(20, 3), whole(20, 4)
    ids = old.argmax(1)
    top = old.gather(1, ids[:, None])
    for kind in ("tv", "kl"):
        mine = top_divergence(new, ids, top[:, 0], ids[:, None], top, kind)
        expected = binary_divergence(new.gather(1, ids[:, None])[:, 0], top[:, 0], kind)
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def single(ratio: float, advantage: float, divergence: float, clip_ratio_c: float | None) -> tuple[PolicyLoss, Any]:
    log_ratio = logs(ratio).requires_grad_()
    divergences, advantages = (torch.tensor([x], dtype=torch.float64) for x in (divergence, advantage))
    loss = DPPO(divergence_threshold=0.2, clip_ratio_c=clip_ratio_c).surrogate(log_ratio, advantages, divergences)
    loss.per_token.sum().backward()
    assert log_ratio.grad is not None
    return loss, (loss.per_token.item(), log_ratio.grad.item())


# d ratio / d ln p = ratio: where nothing is masked, gradient = value.
@pytest.mark.parametrize(
    ("ratio", "advantage", "divergence", "clip_ratio_c", "value", "masked"),
    [
        (1.5, 2.0, 0.3, None, 0.0, "high"),  # away from the old policy, outside
        (1.5, 2.0, 0.1, None, -3.0, ""),  # away, but inside
        (9.0, 2.0, 0.1, None, -18.0, ""),  # a huge ratio alone masks nothing
        (0.5, 2.0, 0.3, None, -1.0, ""),  # outside, but on the way back
        (0.5, -2.0, 0.3, None, 0.0, "low"),
        (0.5, -2.0, 0.1, None, 1.0, ""),
        (1.5, -2.0, 0.3, None, 3.0, ""),
        (1.0, 2.0, 0.3, None, -2.0, ""),
        (1.5, 2.0, 0.2, None, -3.0, ""),  # at the threshold
        (9.0, -2.0, 0.3, 5.0, 10.0, ""),  # the weight is bounded, its gradient is not stopped
        (1.5, 0.0, 0.3, None, 0.0, ""),
    ],
)
def test_one_token(
    ratio: float, advantage: float, divergence: float, clip_ratio_c: float | None, value: float, masked: str
) -> None:
    loss, got = single(ratio, advantage, divergence, clip_ratio_c)
    assert got == pytest.approx((value, value), rel=1e-12, abs=0)
    assert (bool(loss.clipped_low), bool(loss.clipped_high)) == (masked == "low", masked == "high")
    assert float(loss.ratio) == pytest.approx(ratio) and not loss.ratio.requires_grad and loss.weight.requires_grad


def inputs(num_tokens: int = 40, **changes: Any) -> LossInputs:
    new, old = whole(num_tokens, 5).requires_grad_(), whole(num_tokens, 6)
    token_ids = torch.arange(num_tokens) % V
    chosen = new.gather(1, token_ids[:, None])[:, 0]
    old_chosen = old.gather(1, token_ids[:, None])[:, 0]
    top = old.topk(3, dim=1)
    generator = torch.Generator().manual_seed(8)
    columns: dict[str, Any] = {
        "logprobs": chosen,
        "old_logprobs": old_chosen,
        "rollout_logprobs": old_chosen + 0.05 * torch.randn(num_tokens, dtype=torch.float64, generator=generator),
        "advantages": torch.randn(num_tokens, dtype=torch.float64, generator=generator),
        "mask": torch.arange(num_tokens) % 5 != 0,
        "rows": torch.arange(num_tokens) // 10,
        "num_rows": 4,
        "entropy": torch.zeros(num_tokens, dtype=torch.float64),
        "log_probs": new,
        "token_ids": token_ids,
        "old_top_ids": top.indices,
        "old_top_logprobs": top.values,
    }
    return LossInputs(**{**columns, **changes})


@pytest.mark.parametrize("divergence_type", ["binary_tv", "binary_kl", "topk_tv", "topk_kl"])
@pytest.mark.parametrize("clip_ratio_c", [None, 2.0])
def test_record_against_a_loop(divergence_type: Any, clip_ratio_c: float | None) -> None:
    """Value and gradient, sample by sample; the gradient is min(r, C) A M at ln p of the sampled token and 0 at every
    other place of the vocabulary."""
    given = inputs()
    record = DPPO(divergence_type=divergence_type, divergence_threshold=0.1, clip_ratio_c=clip_ratio_c)
    loss = record.loss(given)
    assert given.log_probs is not None and given.token_ids is not None
    (gradient,) = torch.autograd.grad(loss.per_token[given.mask].sum(), given.log_probs)
    scope, kind = divergence_type.split("_")
    old_logprobs = given.rollout_logprobs if scope == "binary" else given.old_logprobs
    numbers = 0
    for t in range(40):
        p, q = math.exp(old_logprobs[t]), math.exp(given.logprobs[t].detach())
        events = ([p, 1 - p], [q, 1 - q])
        if scope == "topk":
            assert given.old_top_ids is not None
            kept = sorted({*given.old_top_ids[t].tolist(), int(given.token_ids[t])})
            old = whole(40, 6)[t].exp()
            events = tuple(
                [float(x[i]) for i in kept] + [1 - sum(float(x[i]) for i in kept)]
                for x in (old, given.log_probs[t].detach().exp())
            )
        divergence = (tv if kind == "tv" else kl)(*events)
        advantage, ratio = float(given.advantages[t]), q / p
        away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
        masked = away and divergence > 0.1
        expected = 0.0 if masked else -min(ratio, clip_ratio_c or math.inf) * advantage
        row = gradient[t].tolist()
        if given.mask[t]:
            numbers += masked
            assert float(loss.per_token[t].detach()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert row.pop(int(given.token_ids[t])) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert row == pytest.approx([0.0] * len(row), abs=0)
    assert 0 < numbers < 32


def test_thresholds_of_the_paper() -> None:
    """0.15 for total variation, 0.05 for KL: at p = 0.5 masks begin at 0.65 and, -ln(4 q (1 - q)) / 2 = 0.05, at
    0.65424."""
    for divergence_type, inside, outside in [("binary_tv", 0.649, 0.651), ("binary_kl", 0.6542, 0.6543)]:
        for new, masked in [(inside, False), (outside, True)]:
            chosen, old, one = logs(new), logs(0.5), torch.ones(1, dtype=torch.float64)
            zero = torch.zeros(1, dtype=torch.int64)
            given = LossInputs(chosen, old - 1, one, one > 0, zero, 1, one, old)
            loss = DPPO(divergence_type=divergence_type).loss(given)  # type: ignore[arg-type]
            assert bool(loss.clipped_high) == masked


def test_needs_follow_the_divergence() -> None:
    assert DPPO().needs == DPPO(divergence_type="binary_kl").needs == frozenset()
    assert DPPO(divergence_type="topk_tv").needs == frozenset({"old_logprobs", "log_probs", "old_top"})
    assert DPPO().corrects_rollout and not DPPO(divergence_type="topk_kl").corrects_rollout


@pytest.mark.parametrize("divergence_type", ["binary_kl", "topk_kl"])
@pytest.mark.parametrize("wild", [-200.0, -math.inf, math.nan])
def test_masked_tokens_cannot_poison_the_gradient(divergence_type: Any, wild: float) -> None:
    given = inputs()
    old = torch.where(given.mask, given.old_logprobs, wild)
    given = inputs(old_logprobs=old, rollout_logprobs=old)
    per_token = DPPO(divergence_type=divergence_type).loss(given).per_token
    assert given.log_probs is not None
    (gradient,) = torch.autograd.grad(
        torch.where(given.mask, per_token, torch.zeros_like(per_token)).sum(), given.log_probs
    )
    assert gradient.isfinite().all() and not gradient[~given.mask].any()


@pytest.mark.parametrize("divergence_type", ["binary_tv", "topk_kl"])
def test_how_tokens_are_cut_changes_nothing(divergence_type: Any) -> None:
    """Rows 2, 0, 1, 3 one by one give what all of them give together."""
    record, given = DPPO(divergence_type=divergence_type), inputs()
    together = record.loss(given)
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask", "entropy", "log_probs", "token_ids")
    for row in (2, 0, 1, 3):
        mine = given.rows == row
        cut = {name: getattr(given, name)[mine] for name in (*names, "old_top_ids", "old_top_logprobs")}
        part = record.loss(LossInputs(**cut, rows=torch.zeros(10, dtype=torch.int64), num_rows=1))
        assert torch.equal(part.per_token, together.per_token[mine])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="the column old_top_ids is None"):
        DPPO(divergence_type="topk_tv").loss(inputs(old_top_ids=None))
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        DPPO().surrogate(torch.zeros(2), torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="kind='js' is unknown; use tv or kl"):
        binary_divergence(torch.zeros(2), torch.zeros(2), "js")
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        binary_divergence(torch.zeros(2), torch.zeros(1), "tv")
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must be \[T, V\]"):
        top_divergence(torch.zeros(2, V), ids, torch.zeros(2), ids, torch.zeros(2, 1), "tv")
    with pytest.raises(ValueError, match=r"must be \[2, K\]"):
        top_divergence(torch.zeros(2, V), ids[:, 0], torch.zeros(2), ids, torch.zeros(2, 2), "tv")
