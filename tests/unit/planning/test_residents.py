"""Bytes of what waits in memory, by hand: 5472 parameters in 26 tensors."""

import pytest

from hybrid_rl.memory.cycle import (
    ACTOR,
    CRITIC,
    CRITIC_OPTIMIZER,
    ENGINE_WEIGHTS,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    TEACHER,
)
from tests.unit.planning.tiny_run import settings

COUNTERS = 26 * 4
# A rank's half of a float32 model: 45 rows of the embedding become 46.
HALF = (5472 + 16) // 2
# No head: 45 x 16 + 2 x 2368 + 16; the value head adds 16 + 1 in 2 tensors.
VALUES = 5489


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {ACTOR: 5472 * 4, OPTIMIZER: 5472 * 8 + COUNTERS}),
        ({"dtype": "bfloat16"}, {ACTOR: 5472 * 2, OPTIMIZER: 5472 * 12 + COUNTERS}),
        (
            {"num_ranks": 2},
            {ACTOR: HALF * 4, OPTIMIZER: HALF * 8 + COUNTERS, ENGINE_WEIGHTS: 5472 * 4},
        ),
        (
            {"num_ranks": 2, "dtype": "bfloat16"},
            {ACTOR: HALF * 4, OPTIMIZER: HALF * 8 + COUNTERS, ENGINE_WEIGHTS: 5472 * 2},
        ),
        ({"num_ranks": 2, "dp_replicate": 2}, {ACTOR: 5472 * 4, OPTIMIZER: 5472 * 8 + COUNTERS}),
        ({"kl": "loss", "beta": 0.1}, {ACTOR: 5472 * 4, REFERENCE: 5472 * 4}),
        ({"algorithm": "distillation", "teacher_path": "x"}, {TEACHER: 5472 * 4}),
        (
            {"algorithm": "ppo", "num_generations": 1},
            {CRITIC: VALUES * 4, CRITIC_OPTIMIZER: VALUES * 8 + COUNTERS + 2 * 4, REFERENCE: 5472 * 4},
        ),
    ],
)
def test_residents_take_the_bytes_of_their_shapes(step_of, overrides, expected):
    found = step_of(settings(**overrides)).residents(0)
    assert {tag: found[tag].num_bytes for tag in expected} == expected
    assert found.keys() - {KV_CACHE} >= expected.keys()


def test_cache_holds_whole_sequences_in_blocks(step_of):
    # A token: 2 layers x 1 head x (8 of the key + 16 lanes of the value) x 4 B. 32 tokens are 2 blocks of 16.
    cache = step_of(settings()).cache()
    assert (cache.sequence_bytes, cache.wanted_bytes) == (32 * 192, 8 * 32 * 192)


def test_vllm_is_planned_where_it_is_not_installed(step_of):
    step = step_of(settings(engine="vllm", num_ranks=2, tensor_parallel_size=2))
    # 64 rows of the vocabulary; heads of queries and the MLP are cut in two, the one head of keys and values is not.
    layer = (16 * 16 + 16) // 2 + 2 * (16 * 8 + 8) + 16 * 16 // 2 + 3 * 16 * 32 // 2 + 2 * 16
    numel = 64 * 16 // 2 + 2 * layer + 16
    rotary = 64 * 8 * 4
    assert step.residents(0)[ENGINE_WEIGHTS].num_bytes == numel * 4 + rotary
    # No lanes, and a block of 32 tokens for itself: 2 layers x 1 head x 16 x 4 B.
    assert step.cache().wanted_bytes == (8 * 32 + 32) * 128


def test_formulas_are_the_arithmetic_of_their_bytes(step_of):
    shares = step_of(settings(num_ranks=2)).residents(0)
    assert shares[ACTOR].formula == "5,472 parameters x 4 B / 2 shards, 16 elements of padding included"
    assert shares[OPTIMIZER].formula.endswith("of padding included + 104 B of counters")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_on_the_host_has_masters_and_rooms(step_of, dtype):
    config = settings(device="cuda", dtype=dtype, on_host=["optimizer"])
    itemsize = 4 if dtype == "float32" else 2
    step = step_of(config)
    share = step.residents(0)[OPTIMIZER]
    assert share.num_bytes == 5472 * 12 + COUNTERS + 2 * 5472 * (4 + itemsize)  # the model is one slice
    update = step.phases(0)[-2]
    assert (update.bytes_of(OPTIMIZER), update.host_bytes_of(OPTIMIZER)) == (0, share.num_bytes)
