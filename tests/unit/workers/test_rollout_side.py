"""Which side binds an engine to its actor."""

from types import SimpleNamespace

import pytest

from hybrid_rl.config.schema import RolloutConfig
from hybrid_rl.errors import ConfigError
from hybrid_rl.workers.rollout_side import rollout_side
from tests.support.inside.workers import bare_side, sources_of


def test_an_engine_in_a_process_of_its_own_is_refused():
    class Separate(RolloutConfig):
        placement = "separate"

    setup = SimpleNamespace(config=SimpleNamespace(rollout=Separate(engine="far")), generates=True)
    with pytest.raises(ConfigError, match=r"rollout.engine=far runs in a separate process .* embedded or colocated"):
        rollout_side(setup, None, None, None)


@pytest.mark.parametrize("exports_again", [True, False])
def test_what_was_told_about_memory_that_leaves_is_forgotten(exports_again):
    closed = []
    sources = {"auto": SimpleNamespace(close=lambda: closed.append(True))}
    side = bare_side(exports_again=exports_again, sources=sources)
    side.let_go()
    side.let_go()
    assert closed == [True] * exports_again and bool(sources_of(side)) != exports_again
