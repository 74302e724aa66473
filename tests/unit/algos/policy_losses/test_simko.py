"""SimKO: the gradient that forking tokens spread over candidates or sharpen, and that all others keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import Clip, LossInputs
from hybrid_rl.algos.policy_losses.simko import SimKO, row_quantile
from hybrid_rl.config import load_config, resolve
from tests.unit.training.written_estimators import Sample, Token
from tests.unit.training.written_losses import Case, Ratio, Slopes, entropy_of, is_open, own, token_ratios

OPTIONS: dict[str, Any] = {
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "num_candidates": 3,
    "mix_topk_coef": 0.01,
    "lambda_top1": 1.1,
}
# ln of these; candidates in order: 2, 0, 3.
P = (0.3, 0.1, 0.4, 0.15, 0.05)


def single(token: int, advantage: float, ratio: float, forking: bool, **options: Any) -> tuple[Any, float, list[float]]:
    """The loss of one token of P: record, value, gradient by ln p of every token."""
    log_probs = torch.tensor([P, P], dtype=torch.float64).log().requires_grad_()
    chosen = log_probs[:, token]
    # Beside it another token of the sample, of advantage 0: the one with more entropy forks.
    rows, entropy = torch.zeros(2, dtype=torch.int64), torch.tensor([float(forking), 0.5])
    inputs = LossInputs(
        logprobs=chosen,
        old_logprobs=chosen.detach() - math.log(ratio),
        advantages=torch.tensor([advantage, 0.0], dtype=torch.float64),
        mask=rows == 0,
        rows=rows,
        num_rows=1,
        entropy=entropy,
        log_probs=log_probs,
        token_ids=torch.full((2,), token),
    )
    loss = SimKO(**{**OPTIONS, **options}).loss(inputs)
    loss.per_token[0].backward()
    assert log_probs.grad is not None
    return loss, loss.per_token[0].item(), log_probs.grad[0].tolist()


@pytest.mark.parametrize("ratio", [1.0, 1.1, 0.5])
def test_a_correct_forking_token_lifts_the_candidates(ratio: float) -> None:
    """-r A, with -r A (1 - alpha) at the token and -r A alpha / K at each candidate: token 1 is none of them."""
    loss, value, gradient = single(1, 2.0, ratio, True)
    scale = -2 * ratio
    third = 0.01 / 3 * scale
    assert value == pytest.approx(scale, rel=1e-12)
    assert gradient == pytest.approx([third, 0.99 * scale, third, third, 0.0], rel=1e-12)
    assert float(loss.ratio[0]) == pytest.approx(ratio, rel=1e-12)


def test_a_correct_forking_token_that_is_a_candidate_gets_both() -> None:
    _, value, gradient = single(0, 1.0, 1.0, True, mix_topk_coef=0.3)
    assert value == pytest.approx(-1.0) and gradient == pytest.approx([-0.8, 0.0, -0.1, -0.1, 0.0], rel=1e-12)


def test_that_is_the_derivative_of_the_papers_ratio() -> None:
    """(1 - alpha) r + alpha / K sum of sg(r / r_k) r_k as the paper has it, with the old policy's ln p of candidates:
    the same value and gradient, whatever that old policy thought of them."""
    log_probs = torch.tensor([P], dtype=torch.float64).log().requires_grad_()
    candidates, old = [2, 0, 3], torch.tensor([0.2, 0.05, 0.5, 0.15, 0.1], dtype=torch.float64).log()
    ratios = (log_probs[0] - old).exp()
    mixed = 0.7 * ratios[1] + 0.1 * sum((ratios[1] / ratios[k]).detach() * ratios[k] for k in candidates)
    (expected,) = torch.autograd.grad(-mixed, log_probs)
    _, value, gradient = single(1, 1.0, 2.0, True, mix_topk_coef=0.3, epsilon_high=5.0)
    assert value == pytest.approx(-mixed.item(), rel=1e-12)
    assert gradient == pytest.approx(expected[0].tolist(), rel=1e-12)


@pytest.mark.parametrize(
    ("token", "advantage", "forking", "factor"),
    [
        (2, -2.0, True, 1.1),  # wrong, the best candidate, forking: punished more
        (0, -2.0, True, 1.0),  # wrong, but not the best
        (2, -2.0, False, 1.0),  # wrong and best, but no fork
        (2, 2.0, False, 1.0),
        (1, 2.0, False, 1.0),
    ],
)
def test_only_the_sampled_token_elsewhere(token: int, advantage: float, forking: bool, factor: float) -> None:
    """No other place of the vocabulary moves: an entropy bonus would move all of them."""
    loss, value, gradient = single(token, advantage, 1.1, forking)
    expected = [0.0] * 5
    expected[token] = -1.1 * advantage * factor
    assert value == pytest.approx(expected[token], rel=1e-12) and gradient == pytest.approx(expected, rel=1e-12, abs=0)
    assert float(loss.metrics["simko/punished_share"][0]) == (factor > 1)


def test_without_advantage_nothing_moves() -> None:
    """Neither candidates nor entropy: a bonus would still push."""
    for token in range(5):
        assert single(token, 0.0, 1.1, True)[2] == [0.0] * 5


@pytest.mark.parametrize(
    ("token", "advantage", "ratio", "value", "side"),
    [(1, 2.0, 1.5, -2.4, "high"), (2, -2.0, 0.5, 1.76, "low"), (2, -2.0, 1.5, 3.3, "")],
)
def test_the_clip_stops_candidates_too(token: int, advantage: float, ratio: float, value: float, side: str) -> None:
    loss, got, gradient = single(token, advantage, ratio, True)
    assert got == pytest.approx(value, rel=1e-12)
    assert any(gradient) == (side == "")
    assert (bool(loss.clipped_low[0]), bool(loss.clipped_high[0])) == (side == "low", side == "high")


def quantile(numbers: list[float], q: float) -> float:
    numbers = sorted(numbers)
    place = q * (len(numbers) - 1)
    low = math.floor(place)
    return numbers[low] + (numbers[math.ceil(place)] - numbers[low]) * (place - low)


@pytest.mark.parametrize("q", [0.0, 0.5, 0.8, 1.0])
def test_quantiles_of_samples(q: float) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(50, dtype=torch.float64, generator=generator)
    rows, mask = torch.arange(50) // 7, torch.rand(50, generator=generator) < 0.7
    mask[7:14] = False
    mine = row_quantile(values, mask, rows, 8, q).tolist()
    for row in range(8):
        kept = values[(rows == row) & mask].tolist()
        assert mine[row] == (pytest.approx(quantile(kept, q), rel=1e-12) if kept else math.inf)
    assert mine[1] == math.inf


def micro_batch(num_tokens: int = 30, **changes: Any) -> LossInputs:
    generator = torch.Generator().manual_seed(6)
    log_probs = torch.randn(num_tokens, 8, dtype=torch.float64, generator=generator).log_softmax(1).requires_grad_()
    token_ids = torch.randint(0, 8, (num_tokens,), generator=generator)
    token_ids[::3] = log_probs.argmax(1)[::3]
    chosen = log_probs.gather(1, token_ids[:, None])[:, 0]
    old = chosen.detach() + 0.1 * torch.randn(num_tokens, dtype=torch.float64, generator=generator)
    columns: dict[str, Any] = {
        "logprobs": chosen,
        "old_logprobs": old,
        "rollout_logprobs": old,
        "advantages": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)[torch.arange(num_tokens) // 10],
        "mask": torch.arange(num_tokens) % 7 != 0,
        "rows": torch.arange(num_tokens) // 10,
        "num_rows": 3,
        "entropy": -(log_probs.exp() * log_probs).sum(1),
        "log_probs": log_probs,
        "token_ids": token_ids,
    }
    return LossInputs(**{**columns, **changes})


def gradient_of(loss: Tensor, given: LossInputs) -> Tensor:
    assert given.log_probs is not None
    (gradient,) = torch.autograd.grad(
        torch.where(given.mask, loss, torch.zeros_like(loss)).sum(), given.log_probs, retain_graph=True
    )
    return gradient


def test_record_against_a_loop() -> None:
    """Value and gradient at every place of the vocabulary, sample by sample; entropies have no gradient."""
    given = micro_batch()
    record = SimKO(mix_topk_coef=0.3, forking_quantile=0.6)
    loss = record.loss(given)
    gradient = gradient_of(loss.per_token, given)
    assert given.log_probs is not None and given.token_ids is not None
    log_probs, entropies = given.log_probs.detach(), given.entropy.detach()
    kinds = set()
    for t in range(30):
        if not given.mask[t]:
            assert not gradient[t].any()
            continue
        mine = [float(entropies[i]) for i in range(30) if given.rows[i] == given.rows[t] and given.mask[i]]
        forks = float(entropies[t]) > quantile(mine, 0.6)
        token, advantage = int(given.token_ids[t]), float(given.advantages[t])
        ranked = sorted(range(8), key=lambda i: -float(log_probs[t, i]))
        ratio = math.exp(float(log_probs[t, token] - given.old_logprobs[t]))
        if forks and advantage < 0 and token == ranked[0]:
            advantage *= 1.1
            kinds.add("punished")
        bounded = min(max(ratio, 0.8), 1.2)
        value = -min(ratio * advantage, bounded * advantage)
        slope = value if bounded == ratio or ratio * advantage < bounded * advantage else 0.0
        expected = [0.0] * 8
        if forks and advantage > 0:
            expected[token] += 0.7 * slope
            for k in ranked[:3]:
                expected[k] += 0.1 * slope
            kinds.add("smoothed")
        else:
            expected[token] = slope
        assert float(loss.per_token[t].detach()) == pytest.approx(value, rel=1e-12)
        assert gradient[t].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert kinds == {"punished", "smoothed"}


def test_switched_off_it_is_the_clipped_surrogate() -> None:
    given = micro_batch()
    mine = SimKO(mix_topk_coef=0.0, lambda_top1=1.0).loss(given)
    plain = Clip().loss(given)
    torch.testing.assert_close(mine.per_token[given.mask], plain.per_token[given.mask], rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradient_of(mine.per_token, given), gradient_of(plain.per_token, given), rtol=1e-12, atol=1e-15
    )


def test_how_samples_are_cut_changes_nothing() -> None:
    """Which tokens fork is a matter of their own sample."""
    given = micro_batch()
    together = SimKO().loss(given).per_token
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask", "entropy", "log_probs", "token_ids")
    for row in (2, 0, 1):
        mine = given.rows == row
        columns = {name: getattr(given, name)[mine] for name in names}
        part = SimKO().loss(LossInputs(**columns, rows=torch.zeros(10, dtype=torch.int64), num_rows=1))
        assert torch.equal(part.per_token, together[mine])


@pytest.mark.parametrize("wild", [-200.0, -math.inf, math.nan])
def test_masked_tokens_cannot_poison_the_gradient(wild: float) -> None:
    given = micro_batch()
    given = micro_batch(old_logprobs=torch.where(given.mask, given.old_logprobs, wild))
    gradient = gradient_of(SimKO().loss(given).per_token, given)
    assert gradient.isfinite().all() and not gradient[~given.mask].any()


def test_masked_distributions_cannot_poison_the_gradient() -> None:
    """Where the mask is off the candidates' ln p may be anything, in correct samples too."""
    given = micro_batch()
    assert given.log_probs is not None
    wild = torch.where(given.mask[:, None], given.log_probs.detach(), -math.inf).requires_grad_()
    given = micro_batch(log_probs=wild, entropy=torch.where(given.mask, given.entropy.detach(), math.inf))
    loss = SimKO(mix_topk_coef=0.3).loss(given).per_token
    (gradient,) = torch.autograd.grad(torch.where(given.mask, loss, torch.zeros_like(loss)).sum(), wild)
    assert gradient.isfinite().all() and gradient.any()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="the column log_probs is None"):
        SimKO().loss(micro_batch(log_probs=None))
    with pytest.raises(ValueError, match="num_candidates=9 is more than the vocabulary of 8"):
        SimKO(num_candidates=9).loss(micro_batch())
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        SimKO().loss(micro_batch(token_ids=torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"log_probs must be \[30, V\], not \(2, 8\)"):
        SimKO().loss(micro_batch(log_probs=torch.zeros(2, 8)))
    with pytest.raises(ValueError, match=r"quantile=1.5 is not a quantile"):
        row_quantile(torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1, 1.5)


def test_the_preset_has_the_numbers_of_the_paper() -> None:
    """arXiv:2510.14807: alpha = .01, lambda_top1 = 1.1, K = 3, tau = .8."""
    loss = resolve(*load_config({"algorithm": "simko"})).policy_loss
    assert loss == SimKO(num_candidates=3, mix_topk_coef=0.01, lambda_top1=1.1, forking_quantile=0.8)


def written(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    ratios = token_ratios(tokens, case)
    entropies = [entropy_of(token) for token in tokens]
    place = record.forking_quantile * (len(tokens) - 1)
    low, ordered = math.floor(place), sorted(entropies)
    threshold = ordered[low] + (ordered[min(low + 1, len(tokens) - 1)] - ordered[low]) * (place - low)
    for token, ratio, entropy, weight in zip(tokens, ratios, entropies, up, strict=True):
        forks, advantage = entropy > threshold, token.advantage
        best = sorted(range(len(token.logs)), key=lambda i: -token.logs[i])[: record.num_candidates]
        if forks and advantage < 0 and token.id == best[0]:
            advantage *= record.lambda_top1
        if not is_open(record, ratio, token.advantage):
            continue
        share = record.mix_topk_coef if forks and advantage > 0 else 0.0
        slopes.add(token, -weight * advantage * ratio * (1 - share))
        for entry in best:
            slopes.add(token, -weight * advantage * ratio * share / record.num_candidates, entry)
    return own(tokens, ratios)
