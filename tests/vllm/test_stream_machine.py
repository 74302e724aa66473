"""The stream of groups over vLLM: the machine of tests/unit/rollout, one engine for all of its runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rollout.engine_runs import Versions
from tests.unit.rollout.stream_machine import FORMS, KINDS, play
from tests.unit.rollout.test_stream_machine import SWEEP
from tests.vllm.rigs import VLLMRig, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started() -> Iterator[VLLMRig]:
    rig = VLLMRig.start()
    yield rig
    rig.engine.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_examples", [1, pytest.param(50, marks=SWEEP)])
def test_nothing_is_lost_used_twice_or_too_old(
    num_examples: int, form: str, kind: str, tmp_path: Path, started: VLLMRig
) -> None:
    def make_rig(slots: int, max_num_waiting: int) -> VLLMRig:
        return started.renewed(max_num_seqs=slots, max_num_waiting=max_num_waiting)

    play(form, kind, tmp_path, make_rig, Versions(tiny()), num_examples, most_ranks=1)
