"""Records made by hand are held to the types and ranges of their options, as those of a configuration are; what is
missing or of another shape is named."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

import pytest
import torch

from hybrid_rl.algos import (
    ADVANTAGES,
    CORRECTIONS,
    KL_TERMS,
    POLICY_LOSSES,
    AdvantageEstimator,
    AdvantageInputs,
    token_weights,
)
from hybrid_rl.algos.advantages import GAE, Distillation, OptimalTokenBaseline, ReMax, VTrace
from hybrid_rl.algos.correction import MaskedImportanceSampling
from hybrid_rl.algos.options import key
from hybrid_rl.algos.policy_losses import DPPO, Clip
from hybrid_rl.errors import ConfigError

RECORDS = {
    name: record
    for home in (ADVANTAGES, POLICY_LOSSES, CORRECTIONS, KL_TERMS)
    for name, record in home.items()
    if record.__module__.startswith("hybrid_rl.")  # other tests register theirs
}
OPTIONS = [(name, item.name) for name, record in RECORDS.items() for item in dataclasses.fields(record)]


def outside(item: Any, hint: Any) -> list[Any]:
    """Values that an option cannot have."""
    found: list[Any] = []
    limits = {bound: item.metadata[bound] for bound in ("minimum", "maximum", "above", "below")}
    for bound, limit in limits.items():
        if limit is not None:
            found.append(limit + (1 if bound in ("maximum", "below") else -1))
            found += [limit] if bound in ("above", "below") else []
    options = typing.get_args(hint) or (hint,)
    if float in options:
        found += [math.nan, math.inf, "0.5", True]
    if int in options:
        found += [1.5, True]
    if hint is bool:
        found += [1, "yes"]
    if typing.get_origin(hint) is Literal:
        found += ["no such choice", None]
    return found


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_out_of_range_or_of_another_type_is_refused_by_hand(name: str, option: str) -> None:
    record = RECORDS[name]
    item = next(item for item in dataclasses.fields(record) if item.name == option)
    record(**{option: item.default})
    for value in outside(item, typing.get_type_hints(record)[option]):
        with pytest.raises(ConfigError, match=f"{record.__name__}: {option}=.* must be "):
            record(**{option: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip(epsilon=-1), "Clip: epsilon=-1 must be above 0"),
        (lambda: Clip(epsilon=math.nan), "Clip: epsilon=nan must be a finite number"),
        (lambda: GAE(gamma=1.5), "GAE: gamma=1.5 must be at most 1"),
        (
            lambda: MaskedImportanceSampling(correction_low=3, correction_high=2),
            "correction_low=3 must be at most 1",
        ),
        (
            lambda: DPPO(divergence_type="tv"),  # type: ignore[arg-type]
            "divergence_type='tv' must be one of binary_tv, binary_kl, topk_tv, topk_kl",
        ),
    ],
)
def test_some_by_hand(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_record_of_ones_own_is_checked_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(AdvantageEstimator):
        estimator: Literal["own"] = key("own", "the advantage estimator")
        share: float = key(0.5, "a share", minimum=0, maximum=1)

    assert Own(share=1).share == 1
    with pytest.raises(ConfigError, match="Own: share=2 must be at most 1"):
        Own(share=2)


# ------------------------------------------------------------------------------------------------------ direct calls


def advantage_inputs(**changes: Any) -> AdvantageInputs:
    columns: dict[str, Any] = {
        "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "groups": torch.tensor([0, 0]),
        "rows": torch.tensor([0, 0, 1]),
        "mask": torch.tensor([True, True, True]),
        "token_rewards": torch.zeros(3, dtype=torch.float64),
    }
    return AdvantageInputs(**{**columns, **changes})


@pytest.mark.parametrize("estimator", [GAE(), VTrace(), ReMax(), OptimalTokenBaseline(), Distillation()], ids=repr)
def test_the_column_that_is_missing_is_named(estimator: Any) -> None:
    given = {name: torch.zeros(2 if name == "baseline_rewards" else 3).double() for name in estimator.needs}
    for name in sorted(given):
        with pytest.raises(ValueError, match=f"the column {name} is None, but this algorithm cannot do without it"):
            estimator.compute(advantage_inputs(**{**given, name: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.ones(4, dtype=torch.bool)}, r"must all be \[T\], one number per token, not .*'mask': \(4,\)"),
        ({"mask": torch.ones(3)}, "mask must be bool, not torch.float32"),
        ({"mask": torch.ones(3, dtype=torch.int64)}, "mask must be bool, not torch.int64"),
        ({"rows": torch.tensor([0, 0, 2])}, r"rows must ascend within 0\.\.1"),
        ({"rows": torch.tensor([0, 0, -1])}, "rows must be numbers of samples, from 0, but one is -1"),
        ({"rows": torch.tensor([0, 1, 0])}, "sort the tokens by sample"),
        ({"rows": torch.zeros(3)}, "rows must be int64"),
        ({"groups": torch.tensor([0, 0, 1])}, r"groups must be \[2\] as rewards, not \(3,\)"),
        ({"rewards": torch.zeros(2, 1)}, r"rewards must be \[N\]"),
        ({"rewards": torch.tensor([1.0, math.inf])}, "rewards has inf at sample 1"),
        ({"baseline_rewards": torch.zeros(3)}, r"rewards, baseline_rewards must be \[N\]"),
        ({"values": torch.zeros(2)}, r"must all be \[T\].*'values': \(2,\)"),
    ],
)
def test_columns_of_an_estimator_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantage_inputs(**changes)


@pytest.mark.parametrize(
    ("loss_type", "counts", "message"),
    [
        ("dr_grpo", {"max_completion_length": 0}, "max_completion_length=0 is what dr_grpo divides by"),
        ("dapo", {"num_tokens": -1}, "num_tokens=-1 and num_trajectories=1 are counts"),
        ("grpo", {"num_trajectories": -2}, "num_tokens=1 and num_trajectories=-2 are counts"),
    ],
)
def test_counts_of_token_weights(loss_type: str, counts: dict[str, int], message: str) -> None:
    given = {"num_tokens": 1, "num_trajectories": 1, "max_completion_length": 1, **counts}
    with pytest.raises(ValueError, match=message):
        token_weights(torch.ones(1).bool(), torch.zeros(1).long(), 1, loss_type, **given)
