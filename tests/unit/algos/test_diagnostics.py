"""Numbers about the gap between engine and trainer: by hand, against loops in plain Python, exact expectations."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos.correction import Corrected
from hybrid_rl.algos.diagnostics import (
    correction_diagnostics,
    effective_sample_share,
    gap_diagnostics,
    mismatch,
    ratios_by_age,
    staleness,
)


def approx(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-14)


@pytest.fixture
def columns() -> dict[str, Tensor]:
    """30 samples of 0 to 9 tokens, a fifth masked, masked logprobs no numbers."""
    random = torch.Generator().manual_seed(5)
    rows = torch.arange(30).repeat_interleave(torch.randint(0, 10, (30,), generator=random))
    engine = -3 * torch.rand(len(rows), generator=random, dtype=torch.float64)
    trainer = engine + 0.4 * torch.randn(len(rows), generator=random, dtype=torch.float64)
    mask = torch.rand(len(rows), generator=random) > 0.2
    trainer[~mask] = math.nan
    ages = torch.randint(0, 6, (len(rows),), generator=random)
    return {"trainer": trainer, "engine": engine, "mask": mask, "rows": rows, "ages": ages}


def test_by_hand() -> None:
    """Engine .5, .5, .25 and a masked token, trainer .5, .25, .5: w = 1, .5, 2; samples 1 * .5 and 2."""
    engine, trainer = torch.tensor([0.5, 0.5, 0.25, 0.1]).double().log(), torch.tensor([0.5, 0.25, 0.5, 0.9]).double()
    mask, rows = torch.tensor([True, True, True, False]), torch.tensor([0, 0, 1, 1])
    found = mismatch(trainer.log(), engine, mask, rows, 2)
    assert found["mismatch/ess_tokens"] == approx(3.5**2 / (3 * 5.25))
    assert found["mismatch/ess_samples"] == approx(2.5**2 / (2 * 4.25))
    assert found["mismatch/ratio_p50"] == approx(1.0)
    assert found["mismatch/ratio_p01"] == approx(0.5 + 0.02 * 0.5)  # a fiftieth of the way to the next
    assert found["mismatch/ratio_p99"] == approx(1 + 0.98 * 1)
    assert found["mismatch/kl_k1"] == approx(0.0)  # (0 + ln 2 - ln 2) / 3
    assert found["mismatch/kl_k3"] == approx((0.5 - 1 + 2 - 1) / 3)
    assert found["mismatch/reverse_kl_k1"] == approx((-0.5 * math.log(2) + 2 * math.log(2)) / 3)
    assert found["mismatch/reverse_kl_k3"] == approx((0.5 * (1 - math.log(2)) + 2 * (math.log(2) - 0.5)) / 3)
    assert found["mismatch/perplexity_trainer"] == approx((0.5 * 0.25 * 0.5) ** (-1 / 3))
    assert found["mismatch/perplexity_engine"] == approx((0.5 * 0.5 * 0.25) ** (-1 / 3))


def test_against_loops(columns: dict[str, Tensor]) -> None:
    found = gap_diagnostics(**columns, num_rows=30)
    places = [at for at in range(len(columns["rows"])) if bool(columns["mask"][at])]
    trainer, engine = ([float(columns[name][at]) for at in places] for name in ("trainer", "engine"))
    gaps = [mine - theirs for mine, theirs in zip(trainer, engine, strict=True)]
    ratios = [math.exp(gap) for gap in gaps]
    rows = [int(columns["rows"][at]) for at in places]
    products = [math.prod(w for w, row in zip(ratios, rows, strict=True) if row == each) for each in sorted(set(rows))]
    for name, weights in (("tokens", ratios), ("samples", products)):
        share = sum(weights) ** 2 / len(weights) / sum(weight**2 for weight in weights)
        assert found[f"mismatch/ess_{name}"] == approx(share)
    cuts = statistics.quantiles(ratios, n=100, method="inclusive")
    assert [found[f"mismatch/ratio_p{percent}"] for percent in ("01", "50", "99")] == approx(
        [cuts[0], cuts[49], cuts[98]]
    )
    mean = statistics.fmean
    assert found["mismatch/kl_k1"] == approx(mean(-gap for gap in gaps))
    assert found["mismatch/kl_k3"] == approx(mean(w - 1 - gap for w, gap in zip(ratios, gaps, strict=True)))
    assert found["mismatch/reverse_kl_k1"] == approx(mean(w * gap for w, gap in zip(ratios, gaps, strict=True)))
    assert found["mismatch/reverse_kl_k3"] == approx(
        mean(w * (1 / w - 1 + gap) for w, gap in zip(ratios, gaps, strict=True))
    )
    assert found["mismatch/perplexity_trainer"] == approx(math.exp(-mean(trainer)))
    assert found["mismatch/perplexity_engine"] == approx(math.exp(-mean(engine)))
    ages = [int(columns["ages"][at]) for at in places]
    assert found["staleness/mean_age"] == approx(mean(ages))
    assert found["staleness/share_age_3_or_more"] == approx(mean(age >= 3 for age in ages))
    for name, its in (("0", [0]), ("2", [2]), ("3_or_more", [3, 4, 5])):
        cuts = statistics.quantiles(
            [w for w, a in zip(ratios, ages, strict=True) if a in its], n=20, method="inclusive"
        )
        quantiles = [found[f"staleness/ratio_{percent}_age_{name}"] for percent in ("p05", "p50", "p95")]
        assert quantiles == approx([cuts[0], cuts[9], cuts[18]])


def test_both_directions_are_those_of_the_distributions() -> None:
    """Tokens drawn from the engine's distribution in exact proportion: the definitions of both KLs."""
    engine = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    trainer = torch.tensor([0.25, 0.25, 0.3, 0.2], dtype=torch.float64)
    tokens = torch.arange(4).repeat_interleave(torch.tensor([1, 2, 3, 4]))
    rows = torch.arange(10)
    found = mismatch(trainer.log()[tokens], engine.log()[tokens], rows >= 0, rows, 10)
    for name, left, right in (("kl", engine, trainer), ("reverse_kl", trainer, engine)):
        expected = float((left * (left / right).log()).sum())
        assert found[f"mismatch/{name}_k1"] == approx(expected)
        assert found[f"mismatch/{name}_k3"] == approx(expected)


def test_order_of_samples_does_not_matter(columns: dict[str, Tensor]) -> None:
    order = torch.randperm(len(columns["rows"]), generator=torch.Generator().manual_seed(2))
    shuffled = {name: column[order] for name, column in columns.items()}
    shuffled["rows"] = 29 - shuffled["rows"]
    whole = gap_diagnostics(**columns, num_rows=30)
    assert gap_diagnostics(**shuffled, num_rows=30) == {name: approx(value) for name, value in whole.items()}


def test_a_product_beyond_floats_counts() -> None:
    """One sample of weight exp(1000) among three of 1: one effective sample in four."""
    rows = torch.tensor([0, 0, 1, 2, 3])
    engine = torch.full((5,), -600.0, dtype=torch.float64)
    trainer = engine + torch.tensor([500.0, 500.0, 0.0, 0.0, 0.0])
    assert mismatch(trainer, engine, rows >= 0, rows, 4)["mismatch/ess_samples"] == approx(0.25)


def test_effective_samples() -> None:
    """Weights 1, 1, 0, 0: half; 1, 2, 3: 36 / 42; the scale does not matter."""
    assert effective_sample_share(torch.tensor([1.0, 1.0, 0.0, 0.0]).double().log()) == approx(0.5)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert effective_sample_share(weights.log()) == approx(36 / 42) == effective_sample_share((7 * weights).log())
    assert effective_sample_share(torch.zeros(2).log()) == 0.0
    with pytest.raises(ValueError, match="n > 0"):
        effective_sample_share(torch.zeros(0))


def test_ages_by_hand() -> None:
    """0, 0, 1, 2, 3, 9 and a masked 5; an age below 0 counts as 0."""
    ages, mask = torch.tensor([0, -1, 1, 2, 3, 9, 5]), torch.tensor([True] * 6 + [False])
    assert staleness(ages, mask) == {
        "staleness/mean_age": approx(15 / 6),
        "staleness/share_age_0": approx(2 / 6),
        "staleness/share_age_1": approx(1 / 6),
        "staleness/share_age_2": approx(1 / 6),
        "staleness/share_age_3_or_more": approx(2 / 6),
    }


def test_ratios_by_age_by_hand() -> None:
    """Ratios 1 and 3 of age 1, and 0.5 of ages above 2; of what nothing is there, nothing is said."""
    trainer = torch.tensor([1.0, 3.0, 0.5, 9.0]).double().log()
    engine, mask = torch.zeros(4, dtype=torch.float64), torch.tensor([True, True, True, False])
    found = ratios_by_age(trainer, engine, mask, torch.tensor([1, 1, 7, 0]))
    assert found == {
        "staleness/ratio_p05_age_1": approx(1.1),
        "staleness/ratio_p50_age_1": approx(2.0),
        "staleness/ratio_p95_age_1": approx(2.9),
        **{f"staleness/ratio_{percent}_age_3_or_more": approx(0.5) for percent in ("p05", "p50", "p95")},
    }
    assert not ratios_by_age(trainer, engine, mask, torch.tensor([0, 0, -1, 4]))  # what is masked does not count


def test_what_a_correction_does() -> None:
    """Five tokens in the mask of two samples, a third without any: the first sample is rejected whole."""
    found = Corrected(
        weights=torch.tensor([0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0]),
        rejected=torch.tensor([True, True, False, False, True, False, False]),
        truncated=torch.tensor([False, False, True, False, False, False, False]),
    )
    mask = torch.tensor([True, True, True, True, True, False, False])
    assert correction_diagnostics(found, mask, torch.tensor([0, 0, 1, 1, 1, 1, 2]), 3) == {
        "mismatch/truncated_tokens": approx(0.2),
        "mismatch/rejected_tokens": approx(0.6),
        "mismatch/rejected_samples": approx(0.5),
        "mismatch/ess_corrected": approx(9 / 25),
    }


def test_without_tokens_there_is_nothing_to_tell() -> None:
    empty, rows = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    assert gap_diagnostics(empty, empty, rows > 0, rows, rows, 1) == {}
    assert mismatch(empty, empty, rows > 0, rows, 1) == staleness(rows, rows > 0) == {}
    assert correction_diagnostics(Corrected(empty, rows > 0, rows > 0), rows > 0, rows, 1) == {}


def test_no_name_is_taken(columns: dict[str, Tensor]) -> None:
    """By the metrics that are added up over ranks."""
    found = gap_diagnostics(**columns, num_rows=30)
    assert not found.keys() & {"mismatch/kl", "mismatch/prob_difference_mean"}
    assert all(name.startswith(("mismatch/", "staleness/")) for name in found)


def test_columns_must_have_one_length(columns: dict[str, Tensor]) -> None:
    for name in columns:
        with pytest.raises(ValueError, match="must all be"):
            gap_diagnostics(**{**columns, name: columns[name][:-1]}, num_rows=30)


def test_a_mask_of_numbers_is_refused_by_hand_too(columns: dict[str, Tensor]) -> None:
    """As an index it would pick tokens 0 and 1 again and again."""
    trainer, engine, mask, rows, ages = (columns[name] for name in ("trainer", "engine", "mask", "rows", "ages"))
    with pytest.raises(ValueError, match="mask must be bool"):
        mismatch(trainer, engine, mask.long(), rows, 30)
    with pytest.raises(ValueError, match="mask must be bool"):
        staleness(ages, mask.long())
