"""The contract tests of tests/unit/engines, of engines and of samples, with engine and weights on the device."""

import pytest

from tests.gpu.device import move_rigs
from tests.unit.engines.engines import FACTORIES
from tests.unit.engines.test_contract import *  # noqa: F403
from tests.unit.engines.test_contract_samples import *  # noqa: F403


@pytest.fixture(params=FACTORIES)
def make(request, monkeypatch):
    move_rigs(monkeypatch)
    return FACTORIES[request.param]
