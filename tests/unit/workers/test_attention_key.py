"""model.attention reaches the actor and the reference, and is checked before anything is computed."""

import pytest

from hybrid_rl.errors import ConfigError
from tests.support.inside.workers import actor_of, reference_of


def test_actor_and_reference_run_on_what_was_asked_for(make_bench):
    bench = make_bench(attention="sdpa", beta=0.1)
    assert actor_of(bench.worker).model.attention.name == "sdpa"
    assert reference_of(bench.worker).attention.name == "sdpa"


@pytest.mark.parametrize("name", ["varlen", "flash_attn", "flash_attn_3"])
def test_what_cannot_run_here_stops_the_worker_at_its_start(make_bench, name):
    with pytest.raises(ConfigError, match=f"model.attention={name} cannot run here"):
        make_bench(attention=name)
