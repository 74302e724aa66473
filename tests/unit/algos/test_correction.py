"""Corrections of engine to trainer: by hand, against loops in plain Python, and what must not change them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rl.algos import CORRECTIONS
from hybrid_rl.algos.correction import (
    Corrected,
    Correction,
    CorrectionInputs,
    IcePop,
    KLRejection,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
    importance_ratio,
    mean_divergence,
    vetoed,
)
from tests.unit.algos.variants import records
from tests.unit.training.written_losses import correction as written_correction

RECORDS = list(records(CORRECTIONS).values())
ACTIVE = [record for record in RECORDS if record.is_active]
TIS, MIS = TruncatedImportanceSampling, MaskedImportanceSampling


def inputs(*samples: Sequence[float | None], ages: Sequence[int] | None = None, **changes: Any) -> CorrectionInputs:
    """Samples by the ratios trainer / engine of their tokens; None = masked, with logprobs that are no numbers."""
    flat = [ratio for sample in samples for ratio in sample]
    engine = torch.tensor([-1.0 - 0.1 * place for place in range(len(flat))], dtype=torch.float64)
    trainer = engine + torch.tensor([math.nan if ratio is None else math.log(ratio) for ratio in flat]).double()
    gap = torch.tensor([0.0 if ratio is None else math.log(ratio) for ratio in flat], dtype=torch.float64)
    mask = torch.tensor([ratio is not None for ratio in flat])
    rows = torch.tensor([row for row, sample in enumerate(samples) for _ in sample])
    found = CorrectionInputs(
        logprobs=torch.where(mask, engine + gap, trainer),
        rollout_logprobs=engine,
        mask=mask,
        rows=rows,
        num_rows=len(samples),
        ages=torch.zeros_like(rows) if ages is None else torch.tensor(ages),
    )
    return dataclasses.replace(found, **changes)


def weights(correction: Correction, given: CorrectionInputs) -> Any:
    """To compare with."""
    return pytest.approx(correction.weigh(given).weights.tolist(), rel=1e-12, abs=1e-15)


def flags(tensor: torch.Tensor) -> str:
    return "".join("x" if flag else "." for flag in tensor.tolist())


def test_truncation_zeroes_nothing() -> None:
    """min(ratio, 2): a ratio of .01 stays, 7 becomes 2. A two-sided mask would make both 0."""
    given = inputs([0.01, 1.0, 7.0], [2.0, None, 0.5])
    assert weights(TIS(), given) == [0.01, 1.0, 2.0, 2.0, 0.0, 0.5]
    found = TIS().weigh(given)
    assert (flags(found.truncated), flags(found.rejected)) == ("..x...", "......")


def test_a_floor_lifts_what_is_below_it() -> None:
    """TRL's clip_min of the modes that truncate; nothing is lifted where the policy made no token, or is no number."""
    given = inputs([0.01, 1.0, 7.0], [0.3, None, 0.5])
    found = TIS(correction_low=0.4).weigh(given)
    assert found.weights.tolist() == pytest.approx([0.4, 1.0, 2.0, 0.4, 0.0, 0.5], rel=1e-12)
    assert (flags(found.truncated), flags(found.rejected)) == ("x.xx..", "......")
    unknown = dataclasses.replace(given, logprobs=torch.full_like(given.logprobs, math.nan))
    assert not TIS(correction_low=0.4).weigh(unknown).weights.any()


def test_truncation_of_completions() -> None:
    """Products 1.5 * 1.2 = 1.8 and 2 * 2 = 4; geometric means sqrt(1.8) and 2, both of two tokens."""
    given = inputs([1.5, 1.2, None], [2.0, None, 2.0])
    assert weights(TIS(correction_level="sequence", correction_high=2.5), given) == [1.8, 1.8, 0, 2.5, 0, 2.5]
    mean = math.sqrt(1.8)
    assert weights(TIS(correction_level="geometric", correction_high=1.5), given) == [mean, mean, 0, 1.5, 0, 1.5]
    found = TIS(correction_level="sequence", correction_high=2.5).weigh(given)
    assert flags(found.truncated) == "...x.x"


def test_masking_of_tokens_keeps_the_ratio_inside() -> None:
    """Neither clamped nor 1; the bounds belong to the inside."""
    correction = MIS(correction_level="token", correction_low=0.5, correction_high=2.0)
    given = inputs([0.4, 0.6, 1.9, 2.1], [None, 1.0])
    assert weights(correction, given) == [0.0, 0.6, 1.9, 0.0, 0.0, 1.0]
    found = correction.weigh(given)
    assert (flags(found.rejected), flags(found.truncated)) == ("x..x..", "......")
    at_one = MIS(correction_level="token", correction_low=1.0, correction_high=1.0)
    assert weights(at_one, inputs([1.0, 1.01])) == [1.0, 0.0]


def test_masking_of_completions() -> None:
    """Products .9 * .4 = .36 (out), 3 * .5 = 1.5 (in, though 3 is not), 1.5 * 1.5 = 2.25 (out)."""
    given = inputs([0.9, 0.4], [3.0, 0.5, None], [1.5, 1.5])
    assert weights(MIS(), given) == [0, 0, 1.5, 1.5, 0, 0, 0]
    assert flags(MIS().weigh(given).rejected) == "xx...xx"
    assert weights(MIS(correction_low=0.0), given) == [0.36, 0.36, 1.5, 1.5, 0, 0, 0]  # as in the paper and in TRL
    means = [math.sqrt(0.36)] * 2 + [math.sqrt(1.5)] * 2 + [0] + [1.5] * 2
    assert weights(MIS(correction_level="geometric"), given) == means


def test_icepop() -> None:
    """Within [.5, 5] the ratio, else 0; the next token is kept."""
    given = inputs([0.49, 0.51, 4.9, 5.1], [1.0])
    assert weights(IcePop(), given) == [0, 0.51, 4.9, 0, 1.0]
    assert flags(IcePop().weigh(given).rejected) == "x..x."


def test_rejection_by_kl() -> None:
    """Of ratios 1.1 and 1/1.1: k3 = (.1 - .0953102 + .0953102 - .0909091) / 2 = .0045455, |mean ln| = 0, mean |ln| =
    .0953102. Of 1.05 twice: .0012098, .0487902, .0487902."""
    given = inputs([1.1, 1 / 1.1, None], [1.05, 1.05])
    expected = {"k3": (0.0045454545, 0.0012098358), "k1": (0, 0.0487901642), "abs": (0.0953101798, 0.0487901642)}
    for estimator, values in expected.items():
        found = mean_divergence(given, estimator=estimator)
        assert found.tolist() == pytest.approx(values, abs=1e-10)
    assert weights(KLRejection(), given) == [1, 1, 0, 1, 1]
    assert weights(KLRejection(correction_threshold=0.002), given) == [0, 0, 0, 1, 1]
    assert weights(KLRejection(correction_estimator="k1", correction_threshold=0.04), given) == [1, 1, 0, 0, 0]
    assert weights(KLRejection(correction_estimator="abs", correction_threshold=0.05), given) == [0, 0, 0, 1, 1]
    assert flags(KLRejection(correction_threshold=0.002).weigh(given).rejected) == "xx..."


def test_k3_is_that_of_the_engine_to_the_trainer() -> None:
    """The engine sampled: r = trainer / engine = 2 gives 2 - 1 - ln 2 = .306853; the other way round, .193147."""
    given = inputs([2.0])
    found = mean_divergence(given, estimator="k3")
    assert float(found) == pytest.approx(0.306853, abs=5e-7)


def test_a_completion_without_tokens_has_no_divergence() -> None:
    found = mean_divergence(inputs([None, None], [2.0], num_rows=3), estimator="k1")
    assert found.tolist() == pytest.approx([0, math.log(2), 0], rel=1e-12)


def test_rejection_with_a_cap_weighs_what_is_kept() -> None:
    """Ratios 1.05 and 1.2 of a kept completion, the second bounded by 1.1; all of the other is left out."""
    correction = KLRejection(correction_threshold=0.02, correction_high=1.1)
    given = inputs([1.05, 1.2], [3.0, 1.0])
    assert weights(correction, given) == [1.05, 1.1, 0, 0]
    found = correction.weigh(given)
    assert (flags(found.truncated), flags(found.rejected)) == (".x..", "..xx")


@pytest.mark.parametrize(
    "correction",
    [
        MIS(correction_level="token", correction_low=0.0, correction_high=1e9, correction_veto=1e-4),
        KLRejection(correction_threshold=1e9, correction_veto=1e-4),
    ],
)
def test_one_token_may_veto_its_completion(correction: Correction) -> None:
    """5e-5 is below 1e-4, 2e-4 is not; a masked token has no veto."""
    found = correction.weigh(inputs([1.0, 5e-5, 1.0], [1.0, 2e-4], [1.0, None]))
    assert flags(found.rejected) == "xxx...."
    assert not vetoed(inputs([1e-9, 1.0], mask=torch.tensor([False, True])), veto=1e-4).any()
    assert found.weights[:3].tolist() == [0, 0, 0] and bool((found.weights[[3, 4, 5]] > 0).all())


def test_older_tokens_weigh_less() -> None:
    """.9 per version: ages 0, 1, 3 and none below 0; also where the ratio is bounded."""
    given = inputs([1.0, 1.5, 4.0], [0.8], ages=[0, 1, 3, -2])
    decayed = [1.0, 1.5 * 0.9, 2 * 0.9**3, 0.8]
    assert decayed == weights(TIS(staleness_decay=0.9), given)
    for record in ACTIVE:
        plain, old = record().weigh(given), record(staleness_decay=0.9).weigh(given)  # type: ignore[call-arg]
        expected = [w * 0.9**age for w, age in zip(plain.weights.tolist(), (0, 1, 3, 0), strict=True)]
        assert old.weights.tolist() == pytest.approx(expected, rel=1e-12)
        assert flags(old.rejected) == flags(plain.rejected)


def random_inputs(seed: int = 0) -> CorrectionInputs:
    """40 samples of 0 to 12 tokens, a fifth of them masked, ratios from 1/5 to 5 where they stray."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 13, (40,), generator=random)
    rows = torch.arange(40).repeat_interleave(lengths)
    engine = -3 * torch.rand(len(rows), generator=random, dtype=torch.float64)
    spread = torch.rand(40, generator=random, dtype=torch.float64)[rows]
    return CorrectionInputs(
        logprobs=engine + spread * torch.randn(len(rows), generator=random, dtype=torch.float64),
        rollout_logprobs=engine,
        mask=torch.rand(len(rows), generator=random) > 0.2,
        rows=rows,
        num_rows=40,
        ages=torch.randint(0, 4, (len(rows),), generator=random),
    )


CASES = [
    TIS(),
    TIS(correction_level="sequence", correction_high=3.0),
    TIS(correction_level="geometric", correction_high=1.1),
    TIS(correction_low=0.8, correction_high=1.2),
    TIS(correction_low=0.9, correction_level="sequence"),
    MIS(),
    MIS(correction_level="token", correction_high=3.0),
    MIS(correction_level="geometric", correction_low=0.9, correction_high=1.1),
    IcePop(),
    KLRejection(correction_threshold=0.1),
    KLRejection(correction_estimator="k1", correction_threshold=0.1),
    KLRejection(correction_estimator="abs", correction_threshold=0.3),
]


def by_loops(correction: Correction, given: CorrectionInputs) -> list[float]:
    """Weights sample by sample, as the gradients of whole training steps are written out with."""
    case: Any = SimpleNamespace(config=SimpleNamespace(algorithm=SimpleNamespace(old_logprobs="recompute")), version=0)
    found = [0.0] * len(given.rows)
    for row in range(given.num_rows):
        places = torch.nonzero((given.rows == row) & given.mask)[:, 0].tolist()
        columns = given.logprobs.tolist(), given.rollout_logprobs.tolist()
        tokens: Any = [SimpleNamespace(old=columns[0][at], rollout=columns[1][at], version=-1) for at in places]
        for at, weight in zip(places, written_correction(correction, tokens, case) if tokens else [], strict=True):
            found[at] = weight
    return found


@pytest.mark.parametrize("correction", CASES)
def test_against_loops(correction: Correction) -> None:
    given = random_inputs()
    expected = by_loops(correction, given)
    found = correction.weigh(given)
    assert found.weights.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    left_out = [weight == 0 and bool(on) for weight, on in zip(expected, given.mask, strict=True)]
    assert found.rejected.tolist() == left_out
    assert any(left_out) != isinstance(correction, TIS)  # every rule has something to do here
    assert bool(found.truncated.any()) == isinstance(correction, TIS)


def pick(given: CorrectionInputs, samples: torch.Tensor) -> CorrectionInputs:
    """These whole samples, in this order."""
    places = torch.cat([torch.nonzero(given.rows == sample)[:, 0] for sample in samples.tolist()])
    lengths = torch.stack([(given.rows == sample).sum() for sample in samples.tolist()])
    return CorrectionInputs(
        logprobs=given.logprobs[places],
        rollout_logprobs=given.rollout_logprobs[places],
        mask=given.mask[places],
        rows=torch.arange(len(samples)).repeat_interleave(lengths),
        num_rows=len(samples),
        ages=given.ages[places],
    )


@pytest.mark.parametrize("correction", CASES)
def test_micro_batches_and_order_do_not_matter(correction: Correction) -> None:
    given = random_inputs(1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    whole = correction.weigh(given)
    places = torch.cat([torch.nonzero(given.rows == sample)[:, 0] for sample in order.tolist()])
    parts: list[Corrected] = [correction.weigh(pick(given, part)) for part in order.split([1, 7, 20, 12])]
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights[places], rtol=0, atol=0)
    assert torch.cat([part.rejected for part in parts]).equal(whole.rejected[places])


@pytest.mark.parametrize("record", ACTIVE)
def test_equal_policies_are_left_alone(record: type[Correction]) -> None:
    given = random_inputs()
    found = record().weigh(dataclasses.replace(given, logprobs=given.rollout_logprobs))
    assert found.weights.equal(given.mask.double()) and not found.rejected.any() and not found.truncated.any()


@pytest.mark.parametrize("record", ACTIVE)
def test_weights_are_constants_in_the_dtype_of_the_logprobs(record: type[Correction]) -> None:
    given = random_inputs()
    given = dataclasses.replace(given, logprobs=given.logprobs.float().requires_grad_())
    found = record().weigh(given)
    assert found.weights.dtype == torch.float32 and not found.weights.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_beyond_floats(level: str) -> None:
    """exp(800) is inf: truncated to the cap, masked to 0; exp(-800) is 0. No NaN."""
    given = inputs([1.0], [1.0])
    given = dataclasses.replace(given, logprobs=given.rollout_logprobs + torch.tensor([800.0, -800.0]))
    assert TIS(correction_level=level).weigh(given).weights.tolist() == [2.0, 0.0]  # type: ignore[arg-type]
    assert MIS(correction_level=level).weigh(given).weights.tolist() == [0.0, 0.0]  # type: ignore[arg-type]
    assert KLRejection().weigh(given).weights.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["logprobs", "rollout_logprobs", "mask", "rows", "ages"])
def test_columns_must_have_one_length(name: str) -> None:
    given = inputs([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match=rf"'{name}': \(1,\)"):
        dataclasses.replace(given, **{name: getattr(given, name)[:1]})


def test_unknown_level() -> None:
    with pytest.raises(ValueError, match="'batch' is unknown; use token, sequence or geometric"):
        importance_ratio(inputs([1.0]), level="batch")
