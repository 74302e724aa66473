"""Algorithm records are choices and keys of the configuration, users may add their own, and the room stands alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import pytest

from hybrid_rl.algos import (
    ADVANTAGES,
    CORRECTIONS,
    GRPO,
    KL_TERMS,
    POLICY_LOSSES,
    AdvantageEstimator,
    AdvantageInputs,
    Clip,
    Needs,
    PolicyObjective,
    interface,
    register,
)
from hybrid_rl.algos.options import key
from tests.support.inside.algorithms import registrations_forgotten

HEAVY = ("transformers", "omegaconf", "datasets", "rich", "matplotlib")
HOMES = {"estimator": ADVANTAGES, "objective": POLICY_LOSSES, "correction_mode": CORRECTIONS, "kl_in": KL_TERMS}
RECORDS = [(tag, record) for tag, home in HOMES.items() for record in home.values()]


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """What a test registers is forgotten."""
    with registrations_forgotten():
        yield


def test_every_record_is_found_by_its_name() -> None:
    assert ADVANTAGES["grpo"] is GRPO and POLICY_LOSSES["clip"] is Clip
    for home in HOMES.values():
        assert [dataclasses.fields(record)[0].default for record in home.values()] == list(home)


@pytest.mark.parametrize(("tag", "record"), RECORDS, ids=lambda item: getattr(item, "__name__", item))
def test_records_are_sections_of_the_configuration(tag: str, record: type) -> None:
    """Frozen; the name first; every option with a default and a meaning."""
    fields = dataclasses.fields(record)
    assert record.__dataclass_params__.frozen and fields[0].name == tag  # type: ignore[attr-defined]
    assert all(item.metadata["doc"] and item.default is not dataclasses.MISSING for item in fields)


def test_options_of_different_sections_have_different_names() -> None:
    """A leaf name alone says which key is meant."""
    leaves = {
        tag: {f.name for record in home.values() for f in dataclasses.fields(record)} for tag, home in HOMES.items()
    }
    for tag, names in leaves.items():
        for other, others in leaves.items():
            assert tag == other or not names & others, f"{tag} and {other} share {names & others}"


def test_estimators_need_columns_that_exist() -> None:
    optional = {f.name for f in dataclasses.fields(AdvantageInputs) if f.default is None}
    assert optional | {Needs.DEMONSTRATIONS} >= interface.OF_ESTIMATORS


def test_a_name_that_is_taken() -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(AdvantageEstimator):
        estimator: Literal["grpo"] = key("grpo", "the advantage estimator")

    with pytest.raises(ValueError, match="estimator 'grpo' is taken by GRPO"):
        register(Other)
    assert ADVANTAGES["grpo"] is GRPO


def test_records_that_cannot_be_registered() -> None:
    @dataclasses.dataclass(frozen=True)
    class Foreign:
        estimator: Literal["foreign"] = key("foreign", "the advantage estimator")

    class Plain(AdvantageEstimator):
        estimator = "plain"

    @dataclasses.dataclass(frozen=True)
    class Nameless(AdvantageEstimator):
        strength: float = key(1.0, "an option")

    @dataclasses.dataclass(frozen=True)
    class Silent(AdvantageEstimator):
        estimator: Literal["silent"] = key("silent", "the advantage estimator")
        strength: float = 1.0

    @dataclasses.dataclass(frozen=True)
    class Typo(AdvantageEstimator):
        estimator: Literal["typo"] = key("typo", "the advantage estimator")
        needs = frozenset({"valeus"})  # type: ignore[assignment]

    @dataclasses.dataclass(frozen=True)
    class OfAnother(PolicyObjective):
        objective: Literal["of_another"] = key("of_another", "the policy loss")
        needs = frozenset({Needs.VALUES})  # of estimators only

    refusals = {
        Foreign: "is not a record of an algorithm",
        Plain: "not a frozen dataclass",
        Nameless: "begin with a field",
        Silent: "'strength'",
        Typo: "Typo: needs 'valeus' is unknown; use baseline_rewards, .*, values",
        OfAnother: "needs 'values' is unknown; use log_probs, old_logprobs, old_top, router_scores",
    }
    for record, message in refusals.items():
        with pytest.raises(ValueError, match=message):
            register(record)
    with pytest.raises(ValueError, match="is not a record"):
        register(GRPO())  # type: ignore[type-var]
    assert not {"foreign", "plain", "silent", "typo"} & set(ADVANTAGES)


def test_importing_algos_loads_torch_and_nothing_heavy() -> None:
    code = f"import sys, hybrid_rl.algos; print('torch' in sys.modules, [m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split(maxsplit=1) == ["True", "[]\n"]
