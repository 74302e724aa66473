"""The order is a function of seed and epoch alone: no batch size and no interruption changes it."""

import json
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest

from hybrid_rl.data.prompts import PromptEncoder, PromptRow
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.data.source import SizedSource, StreamSource, load_source
from hybrid_rl.errors import DataError

ROWS = [{"prompt": str(i)} for i in range(10)]


# Of seed 0, epochs 0 and 1. A change of this order would silently break every resume.
RECORDED_ORDER = [[3, 2, 1, 8, 6, 0, 7, 4, 5, 9], [7, 4, 5, 1, 9, 8, 6, 2, 0, 3]]


@pytest.fixture
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, max_prompt_length=None)


@pytest.fixture
def source(encoder: PromptEncoder) -> SizedSource | StreamSource:
    return load_source(ROWS, encoder)


@pytest.fixture
def stream(encoder: PromptEncoder) -> SizedSource | StreamSource:
    return load_source(lambda: iter(ROWS), encoder)


def indices(rows: list[PromptRow]) -> list[int]:
    return [row.index for row in rows]


@pytest.mark.parametrize("seed", [0, 3])
def test_each_epoch_is_a_permutation_in_the_order_of_sorted_pcg64_bits(source: SizedSource, seed: int) -> None:
    sampler = PromptSampler(source, seed=seed)
    expected = []
    for epoch in (0, 1):
        bits = np.random.PCG64([seed, epoch]).random_raw(10)
        expected.append(sorted(range(10), key=lambda index, bits=bits: int(bits[index])))
    assert [indices(sampler.take(10)) for _ in range(2)] == expected
    assert (expected == RECORDED_ORDER) == (seed == 0)


@pytest.mark.parametrize("sizes", [[1] * 25, [3] * 8 + [1], [7, 11, 7], [25]])
def test_batch_sizes_do_not_change_the_order(source: SizedSource, sizes: list[int]) -> None:
    reference = indices(PromptSampler(source, seed=1).take(25))
    sampler = PromptSampler(source, seed=1)
    assert [index for size in sizes for index in indices(sampler.take(size))] == reference
    assert sampler.epoch == 2.5


def test_without_shuffle_the_order_is_that_of_the_data(source: SizedSource) -> None:
    assert indices(PromptSampler(source, shuffle=False).take(12)) == [*range(10), 0, 1]


def resumed(source: Any, state: dict[str, Any], **options: Any) -> PromptSampler:
    sampler = PromptSampler(source, **options)
    sampler.load_state_dict(json.loads(json.dumps(state)))
    return sampler


@pytest.mark.parametrize("taken", [1, 9, 10, 11, 19, 20, 21])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resume_is_exact_around_epoch_boundaries(source: SizedSource, taken: int, shuffle: bool) -> None:
    options = {"seed": 5, "shuffle": shuffle}
    whole = indices(PromptSampler(source, **options).take(30))
    sampler = PromptSampler(source, **options)
    sampler.take(taken)
    state = sampler.state_dict()
    after = resumed(source, state, **options)
    assert after.epoch == taken / 10
    assert after.state_dict() == state
    assert indices(after.take(30 - taken)) == whole[taken:]


def test_loading_a_state_forgets_the_own_position(source: SizedSource, stream: StreamSource) -> None:
    for data in (source, stream):
        sampler = PromptSampler(data)
        state = sampler.state_dict()
        first = indices(sampler.take(4))
        sampler.load_state_dict(state)
        assert indices(sampler.take(4)) == first


def test_foreign_states_are_refused(source: SizedSource, stream: StreamSource, encoder: PromptEncoder) -> None:
    state = PromptSampler(source, seed=1).state_dict()
    shorter = load_source(ROWS[:9], encoder)
    other = load_source([*ROWS[:9], {"prompt": "x"}], encoder)
    for data, options, key in [
        (shorter, {"seed": 1}, "num_prompts: saved 10, now 9"),
        (other, {"seed": 1}, "fingerprint: saved"),
        (source, {"seed": 2}, "seed: saved 1, now 2"),
        (source, {"seed": 1, "shuffle": False}, "shuffle: saved True, now False"),
        (stream, {"seed": 1}, "num_prompts: saved 10, now None"),
    ]:
        with pytest.raises(DataError, match=f"belongs to other data or settings .*{key}"):
            resumed(data, state, **options)


def test_damaged_states_are_refused(source: SizedSource) -> None:
    state = PromptSampler(source).state_dict()
    for broken in ({}, {**state, "version": 99}, {key: state[key] for key in state if key != "epoch"}):
        with pytest.raises(DataError, match="cannot be read"):
            resumed(source, broken)
    for broken in ({**state, "position": 10}, {**state, "position": -1}, {**state, "epoch": "1"}):
        with pytest.raises(DataError, match="is impossible"):
            resumed(source, broken)


def test_streams_keep_their_order(stream: StreamSource) -> None:
    sampler = PromptSampler(stream)
    assert [indices(sampler.take(8)) for _ in range(2)] == [[*range(8)], [8, 9, *range(6)]]
    assert indices(sampler.take(9)) == [*range(6, 10), *range(5)]
    assert sampler.epoch == 2.0


@pytest.mark.parametrize("taken", [1, 9, 10, 11, 19, 20])
def test_streams_resume_around_epoch_boundaries(stream: StreamSource, taken: int) -> None:
    whole = indices(PromptSampler(stream).take(25))
    sampler = PromptSampler(stream)
    sampler.take(taken)
    assert indices(resumed(stream, sampler.state_dict()).take(25 - taken)) == whole[taken:]


def test_streams_resume_past_dropped_rows(tokenizer: Any) -> None:
    rows = [{"prompt": text} for text in ("1", "222", "3", "444", "5", "666")]
    encoder = PromptEncoder(tokenizer, max_prompt_length=2, overlong_prompts="drop")
    data = load_source(lambda: rows, encoder)
    whole = indices(PromptSampler(data).take(9))
    assert whole == [0, 2, 4] * 3
    for taken in range(1, 7):
        sampler = PromptSampler(data)
        sampler.take(taken)
        assert indices(resumed(data, sampler.state_dict()).take(9 - taken)) == whole[taken:]


def test_shuffled_hub_streams_resume_in_a_later_pass(encoder: PromptEncoder) -> None:
    def data() -> SizedSource | StreamSource:
        hub = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
        return load_source(hub.shuffle(seed=1, buffer_size=5), encoder)

    whole = [row.prompt for row in PromptSampler(data()).take(30)]
    assert whole[:10] != whole[10:20]
    sampler = PromptSampler(data())
    sampler.take(13)
    assert [row.prompt for row in resumed(data(), sampler.state_dict()).take(17)] == whole[13:]


def test_an_interrupted_take_loses_nothing(encoder: PromptEncoder) -> None:
    interrupts = iter([False, True])

    def rows() -> Iterator[dict[str, str]]:
        for row in ROWS:
            if row["prompt"] == "3" and next(interrupts, False):
                raise KeyboardInterrupt
            yield row

    sampler = PromptSampler(load_source(rows, encoder))
    assert indices(sampler.take(2)) == [0, 1]
    next(interrupts)
    state = sampler.state_dict()
    with pytest.raises(KeyboardInterrupt):
        sampler.take(4)
    assert sampler.state_dict() == state
    assert indices(sampler.take(4)) == [2, 3, 4, 5]


def test_a_stream_is_not_shuffled(stream: StreamSource) -> None:
    with pytest.raises(DataError, match="shuffle=True, but a stream .*buffer_size"):
        PromptSampler(stream, shuffle=True)
