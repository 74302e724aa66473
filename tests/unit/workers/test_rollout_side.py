"""Which side binds an engine to its actor."""

from types import SimpleNamespace

import pytest

from hybrid_rl.config.schema import RolloutConfig
from hybrid_rl.errors import ConfigError
from hybrid_rl.workers.rollout_side import rollout_side


def test_an_engine_in_a_process_of_its_own_is_refused():
    class Separate(RolloutConfig):
        placement = "separate"

    setup = SimpleNamespace(config=SimpleNamespace(rollout=Separate(engine="far")))
    with pytest.raises(ConfigError, match=r"rollout.engine=far runs in a separate process .* embedded or colocated"):
        rollout_side(setup, None, None)
