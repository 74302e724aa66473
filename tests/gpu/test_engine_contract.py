"""The tests of tests/unit/rollout/test_contract.py, with engine and weights on the device."""

import pytest

from tests.gpu.device import move_rigs
from tests.unit.rollout.engines import FACTORIES
from tests.unit.rollout.test_contract import *  # noqa: F403


@pytest.fixture(params=FACTORIES)
def make(request, monkeypatch):
    move_rigs(monkeypatch)
    return FACTORIES[request.param]
