"""All records, by name. What is registered here is a choice of the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hybrid_rl.algos.advantages import ESTIMATORS
from hybrid_rl.algos.correction import CORRECTIONS as CORRECTION_RECORDS
from hybrid_rl.algos.kl_terms import KL_TERMS as KL_RECORDS
from hybrid_rl.algos.policy_losses import OBJECTIVES
from hybrid_rl.algos.records import AdvantageEstimator, PolicyObjective


def name_of(record: type) -> str:
    """The name under which a record is chosen: the default of its first field."""
    return str(dataclasses.fields(record)[0].default)  # type: ignore[arg-type]


_advantages: dict[str, type[AdvantageEstimator]] = {name_of(record): record for record in ESTIMATORS}
_policy_losses: dict[str, type[PolicyObjective]] = {name_of(record): record for record in OBJECTIVES}

ADVANTAGES: Mapping[str, type[AdvantageEstimator]] = MappingProxyType(_advantages)
POLICY_LOSSES: Mapping[str, type[PolicyObjective]] = MappingProxyType(_policy_losses)
CORRECTIONS: Mapping[str, type] = MappingProxyType({name_of(record): record for record in CORRECTION_RECORDS})
KL_TERMS: Mapping[str, type] = MappingProxyType({name_of(record): record for record in KL_RECORDS})


def register(record: type[Any]) -> type[Any]:
    """Make an AdvantageEstimator or PolicyObjective of your own a choice of the configuration; usable as a decorator.

    Raises ValueError for another class, one that is no frozen dataclass, one without a name, and a name that is taken.
    """
    homes: dict[type, tuple[dict[str, Any], str]] = {
        AdvantageEstimator: (_advantages, "estimator"),
        PolicyObjective: (_policy_losses, "objective"),
    }
    base = next((base for base in homes if isinstance(record, type) and issubclass(record, base)), None)
    if base is None:
        raise ValueError(f"{record!r} is neither an AdvantageEstimator nor a PolicyObjective; subclass one of them")
    home, tag = homes[base]
    fields = dataclasses.fields(record)
    if "__dataclass_params__" not in vars(record) or not record.__dataclass_params__.frozen:
        raise ValueError(f"{record.__name__} is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
    if not fields or fields[0].name != tag or not isinstance(fields[0].default, str):
        raise ValueError(f"{record.__name__} must begin with a field {tag!r} whose default is its name")
    bare = [item.name for item in fields if "doc" not in item.metadata]
    if bare:
        raise ValueError(f"{record.__name__}: field {bare[0]!r} has no meaning; declare it with key(default, doc)")
    name = name_of(record)
    if name in home and home[name] is not record:
        raise ValueError(f"{tag} {name!r} is taken by {home[name].__name__}; choose another name")
    home[name] = record
    return record
