"""verl's rollout correction, of which a threshold means what its mode says, as a correction here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hybrid_rl.extras.names.records import Answer

_SECTION = "algorithm.rollout_correction."
_CAP = 2.0  # verl's rollout_is_threshold, if it is left out
_NATS = "the threshold is in nats per token here, and for k1 a bound of the ratio in verl"


def _corrected(asked: Mapping[str, Any]) -> Answer | None:
    """Return the correction that verl's settings ask for; None if none here is the same."""
    section = {path.rpartition(".")[2]: value for path, value in asked.items() if "rollout_correction." in path}
    weighs, rejects = section.get("rollout_is"), section.get("rollout_rs")
    if not weighs and not rejects:
        return Answer(note="it counts only with rollout_is or rollout_rs (here correction)")
    low, high = _bounds(section.get("rollout_is_threshold") or _CAP)
    if not rejects:
        if weighs not in ("token", "sequence") or high is None:
            return None
        if low is None:
            return Answer({"correction": "tis", "correction_level": weighs, "correction_high": high})
        mode = {"correction": "icepop"} if weighs == "token" else {"correction": "mis", "correction_level": weighs}
        return Answer({**mode, "correction_low": low, "correction_high": high})
    estimator, threshold = _rejection(rejects, section.get("rollout_rs_threshold"))
    if threshold is None or (weighs and (weighs != "token" or low is not None)):
        return None
    settings = {"correction": "kl_rejection", "correction_estimator": estimator, "correction_threshold": threshold}
    return Answer(settings | ({"correction_high": high} if weighs else {}), _NATS)


def _bounds(text: Any) -> tuple[float | None, float | None]:
    """Return the lower and upper bound of a ratio: 2.0, or 0.5_5.0 as text. A number alone bounds from above."""
    try:
        low, _, high = str(text).rpartition("_")
        return float(low) if low else None, float(high)
    except ValueError:
        return None, None


def _rejection(mode: Any, threshold: Any) -> tuple[str, float | None]:
    """Return estimator and threshold in nats; None for a mode that no correction here has, and for bounds of k1 that
    are not each other's reciprocal."""
    low, high = _bounds(threshold)
    estimator = str(mode).removeprefix("seq_mean_")
    if estimator not in ("k1", "k3") or estimator == mode or high is None or high <= 0:
        return "", None
    if estimator == "k3":
        return estimator, high if low is None else None
    nats = math.log(high)
    is_even = low is None or (low > 0 and math.isclose(-math.log(low), nats, rel_tol=0.01))
    return estimator, float(f"{nats:.4g}") if is_even and nats > 0 else None


RULES: Mapping[str, Callable[[Any, Mapping[str, Any]], Answer | None]] = MappingProxyType(
    {
        f"{_SECTION}{name}": lambda _, asked: _corrected(asked)
        for name in ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    }
)
