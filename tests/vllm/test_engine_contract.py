"""The tests of tests/unit/engines/test_contract*.py on vLLM, one engine for all of them.

vLLM decides about blocks and passes itself, so what a test says of them (`block_size`, `max_num_batched_tokens`) is not
followed; and it refuses to start with a cache that cannot hold the longest sequence, so no test gets a smaller one.
"""

import pytest
import torch

from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.unit.engines.engines import forward_logprobs, request
from tests.unit.engines.test_contract import *  # noqa: F403
from tests.unit.engines.test_contract_samples import *  # noqa: F403
from tests.vllm.rigs import VLLMRig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started():
    rig = VLLMRig.start()
    yield rig
    rig.engine.close()


@pytest.fixture
def make(started):
    def renew(*, block_size=None, max_num_batched_tokens=None, kv_cache_memory_bytes=None, **settings):
        if kv_cache_memory_bytes is not None:
            pytest.skip("vLLM refuses to start with a cache that is smaller than the longest sequence")
        return started.renewed(**settings)

    return renew


@pytest.fixture
def rig(make):
    return make().ready()


@pytest.fixture(scope="module")
def alone(started):
    rig = started.renewed(max_num_seqs=1).ready()
    return [rig.run([one])[0] for one in mixed_requests()]  # noqa: F405


def test_prompts_that_begin_alike_share_blocks(rig):
    """A full block of 32 tokens is found by the second of two equal prompts, within a rollout and not beyond."""
    equal = [request(i, 40, 2) for i in range(2)]
    first = rig.run(equal)
    assert rig.engine.stats().num_prefix_tokens == 32
    same_samples(rig.run(equal), first)  # noqa: F405
    assert rig.engine.stats().num_prefix_tokens == 64


def test_a_conversation_finds_the_blocks_of_its_turns_until_the_rollout_ends(rig):
    """Its first turn ends in the second block of 32 tokens, so that the next one finds the first, which holds answers
    too; in another rollout, and with other weights, it finds none."""
    client = EngineClient(rig.engine)
    first = request(0, 20, 14)
    with client.session():
        (answer,) = client.generate([first], 1)
        second = replace(request(1, 1, 6), prompt_ids=(*first.prompt_ids, *answer.completion_ids, 5, 6, 7))  # noqa: F405
        before = rig.engine.stats()
        client.generate([second], 1)
        stats = rig.engine.stats()
        assert (stats.num_prompt_tokens, stats.num_prefix_tokens) == (20 + 37 - 32, 32)
        assert stats.prefix_hit_share(before) == 32 / 37
        rig.perturb()
        client.at_rest().update_weights(TensorSource.of(rig.module), 2)
        client.generate([second], 2)
        assert rig.engine.stats().num_prefix_tokens == 32
        (answer,) = client.generate([replace(second, id=3)], 2)  # noqa: F405
        assert rig.engine.stats().num_prefix_tokens == 64
    assert abs(forward_logprobs(rig.module, second, answer) - torch.tensor(answer.logprobs)).max() < 1e-5
    with client.session():
        client.generate([second], 2)
    assert rig.engine.stats().num_prefix_tokens == 64
