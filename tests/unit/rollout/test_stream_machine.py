"""The stream of groups over the in-place engine: whatever happens, nothing is lost, used twice or too old, and the run
is the one that nothing happens to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.rollout.engine_runs import Versions, inplace_rig, policy
from tests.unit.rollout.stream_machine import FORMS, KINDS, play

SWEEP = [pytest.mark.sweep, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_examples", [2, pytest.param(300, marks=SWEEP)])
def test_nothing_is_lost_used_twice_or_too_old(num_examples: int, form: str, kind: str, tmp_path: Path) -> None:
    play(form, kind, tmp_path, inplace_rig, Versions(policy()), num_examples)
