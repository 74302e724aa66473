"""The records of the KL penalty: what each of them offers can be computed."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch

from hybrid_rl.algos import KL_TERMS, KLTerm
from hybrid_rl.algos.kl import KLInLoss, KLInReward, NoKL, kl_estimate


def choices(record: type, name: str) -> set[str]:
    return set(typing.get_args(typing.get_type_hints(record)[name]))


@pytest.mark.parametrize("record", KL_TERMS.values())
def test_a_record_begins_with_its_name(record: type[KLTerm]) -> None:
    first = dataclasses.fields(record)[0]
    assert first.name == "kl_in" and choices(record, "kl_in") == {first.default}
    assert all("doc" in field.metadata for field in dataclasses.fields(record))


def test_one_place_each() -> None:
    places = {record.__name__: (record.in_loss, record.in_reward) for record in KL_TERMS.values()}
    assert places == {"NoKL": (False, False), "KLInLoss": (True, False), "KLInReward": (False, True)}
    assert NoKL().beta == 0.0


def test_the_loss_offers_no_estimate_without_a_gradient() -> None:
    """k1's is zero in expectation (test_kl)."""
    assert choices(KLInLoss, "kl_estimator") == {"k2", "k3", "abs", "exact"}
    assert choices(KLInReward, "kl_estimator") == {"k1", "k2", "k3", "abs"}


@pytest.mark.parametrize("record", [KLInLoss, KLInReward])
def test_what_is_offered_is_an_estimate(record: type[KLTerm]) -> None:
    for estimator in choices(record, "kl_estimator") - {"exact"}:
        assert kl_estimate(torch.zeros(2), torch.ones(2), estimator).shape == (2,)


def test_defaults_are_the_papers() -> None:
    """k3 with beta .04 in the loss (DeepSeekMath), k1 in the reward (PPO for language models), a fixed weight."""
    assert (KLInLoss().kl_estimator, KLInLoss().beta) == ("k3", 0.04)
    assert (KLInReward().kl_estimator, KLInReward().kl_target, KLInReward().kl_horizon) == ("k1", None, 10000)
