"""Conversations of many turns: a turn computes what is new to it, and no answer depends on what was in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.engines.base import FinishedSample, RolloutRequest
from hybrid_rl.engines.engine_client import EngineClient, Handle
from hybrid_rl.engines.inplace import runner
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.models import CausalLM
from tests.support.engines.engine_settings import inplace_settings
from tests.support.float64 import KeepFloat64
from tests.unit.engines.engines import TOKEN_BYTES, Rig, forward_logprobs, prompt, request, same_samples
from tests.unit.engines.inplace.graph_stand_in import Graph, force_device_path
from tests.unit.models.families import build

TURNS = 8


@dataclass(frozen=True)
class Conversation:
    """answers: most tokens of each turn; told: tokens that the environment says before each turn, of which the first is
    the prompt; waits: steps of the engine before each turn. start: conversations of equal `start` begin alike.
    fork: a turn from which a second conversation goes on beside the first, in other words."""

    start: int
    answers: tuple[int, ...]
    told: tuple[int, ...]
    waits: tuple[int, ...]
    fork: int | None = None


def made(dtype: torch.dtype = torch.float32, **settings: Any) -> Rig:
    """An engine that takes sequences of a thousand tokens."""
    module = build("qwen2", dtype=dtype, max_position_embeddings=1024)
    config = inplace_settings(**{"max_num_seqs": 16, **settings})
    return Rig(InPlaceEngine(CausalLM(module), config, max_length=64), module).ready()


def words(conversation: Conversation, turn: int, branch: int) -> tuple[int, ...]:
    """What the environment says before a turn. The fork is told other things from its turn on."""
    own = branch if conversation.fork is not None and turn >= conversation.fork else 0
    return prompt(conversation.told[turn], 2 + 13 * turn + 5 * own + 31 * conversation.start)


def follow(
    client: EngineClient, talks: tuple[Conversation, ...]
) -> Iterator[tuple[RolloutRequest, FinishedSample, int]]:
    """Hold all conversations at once: each turn's request and answer, and how many tokens of its prompt had been in no
    pass before."""
    number = {talk: place for place, talk in enumerate(talks)}
    waiting: list[tuple[int, Conversation, int, int, tuple[int, ...], int]] = [
        (0, talk, 0, 0, words(talk, 0, 0), talk.told[0]) for talk in talks
    ]
    asked: list[tuple[Handle, RolloutRequest, Conversation, int, int, int]] = []
    step = 0
    while waiting or asked:
        for item in [item for item in waiting if item[0] <= step]:
            waiting.remove(item)
            _, talk, turn, branch, ids, num_new = item
            identity = 100 * number[talk] + 10 * branch + turn
            sent = request(identity, 1, talk.answers[turn], seed=identity)
            sent = replace(sent, prompt_ids=ids, priority=number[talk])
            asked.append((client.submit([sent], client.engine.policy_version), sent, talk, turn, branch, num_new))
        client.advance(idle_seconds=0)
        step += 1
        for item in [item for item in asked if item[0].is_done or not item[0].num_unfinished]:
            asked.remove(item)
            handle, sent, talk, turn, branch, num_new = item
            (sample,) = handle.take()
            yield sent, sample, num_new
            if turn + 1 < len(talk.answers):
                for next_branch in {branch, int(talk.fork == turn + 1) or branch}:
                    new = words(talk, turn + 1, next_branch)
                    ids = (*sent.prompt_ids, *sample.completion_ids, *new)
                    after = step + talk.waits[turn + 1] * (1 + next_branch)
                    waiting.append((after, talk, turn + 1, next_branch, ids, 1 + len(new)))


def samples_of(rig: Rig, talks: tuple[Conversation, ...]) -> list[FinishedSample]:
    client = EngineClient(rig.engine)
    with client.session():
        return sorted((sample for _, sample, _ in follow(client, talks)), key=lambda sample: sample.id)


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs", [2, 16])
def test_a_turn_computes_its_new_tokens_and_the_last_one_of_the_answer_before_it(max_num_seqs):
    """To the token: answers and tool results of 8 to 40 tokens, blocks of 16 as they are by default; also if only two
    conversations of six may run at a time, and the others' blocks wait."""
    talks = tuple(
        Conversation(
            start,
            tuple(8 + (7 * start + 11 * turn) % 33 for turn in range(TURNS)),
            tuple(8 + (5 * start + 17 * turn) % 33 for turn in range(TURNS)),
            tuple((3 * start + turn) % 5 for turn in range(TURNS)),
            fork=4 if start == 3 else None,
        )
        for start in range(6)
    )
    rig = made(max_num_seqs=max_num_seqs, block_size=16, kv_cache_memory_bytes=8 * 640 * TOKEN_BYTES)
    client = EngineClient(rig.engine)
    with client.session():
        turns = list(follow(client, talks))
    stats = rig.engine.stats()
    minimum = sum(num_new for _, _, num_new in turns)
    total = sum(len(sent.prompt_ids) for sent, _, _ in turns)
    assert len(turns) == 6 * TURNS + 4
    assert (stats.num_prompt_tokens, stats.num_prefix_tokens) == (minimum, total - minimum)
    assert stats.prefix_hit_share() == (total - minimum) / total > 0.8
    for sent, sample, _ in turns[-8:]:
        expected = forward_logprobs(rig.module, sent, sample)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=1e-5, atol=1e-5)
    with client.session():  # another rollout, of which nothing is known
        list(follow(client, talks[:1]))
    first = sum(1 + told for told in talks[0].told) - 1
    assert rig.engine.stats().num_prompt_tokens == minimum + first
    assert rig.engine.stats().prefix_hit_share(stats) < stats.prefix_hit_share()


TALKS = st.lists(
    st.builds(
        lambda start, shape, fork: Conversation(start, *map(tuple, zip(*shape, strict=True)), fork=fork),
        st.integers(0, 1),
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=4),
        st.sampled_from([None, 1, 2]),
    ),
    min_size=1,
    max_size=4,
    unique=True,
).map(tuple)

any_engine = given(
    talks=TALKS,
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_tokens=st.integers(48, 160),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([1, 5, 8192]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@any_engine
def test_answers_do_not_depend_on_what_is_in_the_cache(**engine: Any) -> None:
    check_answers(**engine)


@pytest.mark.sweep
@settings(max_examples=300, deadline=None)
@any_engine
def test_answers_do_not_depend_on_what_is_in_many_more_caches(**engine: Any) -> None:
    check_answers(**engine)


def check_answers(
    talks: tuple[Conversation, ...],
    block_size: int,
    num_tokens: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    dtype: torch.dtype,
) -> None:
    """Against an engine with room for everything that remembers nothing."""
    with in_float64() if dtype is torch.float64 else nullcontext():
        expected = samples_of(made(dtype, enable_prefix_caching=False), talks)
        rig = made(
            dtype,
            block_size=block_size,
            kv_cache_memory_bytes=-(-num_tokens // block_size) * block_size * TOKEN_BYTES * dtype.itemsize // 4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        found = samples_of(rig, talks)
    stats = rig.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_used_share) == (0, 0, 0.0)
    same_samples(found, expected)
    if dtype is torch.float64:
        for mine, theirs in zip(found, expected, strict=True):
            logprobs = (torch.tensor(one.logprobs, dtype=torch.float64) for one in (mine, theirs))
            torch.testing.assert_close(*logprobs, rtol=1e-12, atol=1e-12)


@contextmanager
def in_float64() -> Iterator[None]:
    """Everything in float64, logprobs on their way to the host too."""
    with pytest.MonkeyPatch.context() as patch, KeepFloat64():
        patch.setattr(runner, "in_one", lambda tokens, logprobs: torch.stack((tokens.double(), logprobs), 1))
        patch.setattr(runner, "chosen_on_host", lambda both: (both[:, 0].long().numpy(), both[:, 1].tolist()))
        yield


FORKED = (
    Conversation(0, (5, 3, 6, 2), (7, 4, 3, 5), (0, 1, 0, 2), fork=1),
    Conversation(0, (4, 6, 1), (7, 2, 6), (0, 0, 3), fork=2),
    Conversation(1, (1, 5, 5), (3, 1, 2), (0, 2, 0)),
)


@pytest.mark.slow
def test_conversations_beside_decode_graphs_get_the_answers_of_plain_passes(monkeypatch):
    """A replay writes before the chunks of its pass run; blocks are copied before either."""
    expected = samples_of(made(enable_prefix_caching=False), FORKED)
    force_device_path(monkeypatch)
    rig = made(block_size=4, max_num_seqs=4, max_num_batched_tokens=6)
    same_samples(samples_of(rig, FORKED), expected)
    assert Graph.log.count("replay") > 10
    assert rig.engine.stats().prefix_hit_share() > 0.5
