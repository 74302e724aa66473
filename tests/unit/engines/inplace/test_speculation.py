"""Completions with drafts are those without, whatever they end with and however they are sampled."""

import numpy as np
import pytest
import torch

from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.hardware import Hardware
from hybrid_rl.engines.base import Beginning, RolloutRequest, SamplingParams
from hybrid_rl.engines.inplace.speculation import PassSeconds
from hybrid_rl.errors import ConfigError
from tests.unit.engines.engines import decode, inplace, prompt, request, same_samples


def pair(**settings):
    """The same engine and weights, without drafts and with them."""
    return inplace(**settings).ready(), inplace(speculation="on", **settings).ready()


def both(rigs, requests, version=1):
    """What the two sides answer; the samples are equal."""
    plain, drafting = (rig.run(requests, version) for rig in rigs)
    same_samples(drafting, plain)
    return plain


def accepted(rigs):
    stats = rigs[1].engine.stats()
    assert rigs[0].engine.stats().num_draft_tokens == 0
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
    return stats.num_accepted_tokens


def resolved(**keys):
    config, given = load_config({"max_steps": 4} | {f"rollout.{name}": value for name, value in keys.items()})
    return resolve(config, given, hardware=Hardware())


def groups(epoch=0, **params):
    """Four groups of three, of prompts over the edges of blocks. Temperature 0.2: some of their tokens recur."""
    sampling = {"temperature": 0.2, **params}
    return [
        request(
            3 * number + member, length, 20, group=number, **{"seed": 1000 * epoch + 10 * number + member} | sampling
        )
        for number, length in enumerate((3, 4, 7, 17))
        for member in range(3)
    ]


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.float32, 4), (torch.float32, 16), (torch.float64, 4), (torch.float64, 16), (torch.bfloat16, 16)],
    ids=str,
)
def test_samples_are_those_without_drafts_in_every_epoch(dtype, block_size):
    rigs = pair(dtype=dtype, block_size=block_size)
    for epoch in range(3):
        both(rigs, groups(epoch))
    assert accepted(rigs) > 50
    assert rigs[1].engine.stats().num_steps < rigs[0].engine.stats().num_steps


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": 3, "temperature": 0.7},
        {"top_p": 0.6, "temperature": 0.7},
        {"min_p": 0.1, "temperature": 0.7},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_every_way_of_sampling_keeps_its_samples(params):
    rigs = pair()
    for epoch in range(2):
        both(rigs, [*groups(epoch, **params), request(50, 5, 20, temperature=0.3)])
    assert accepted(rigs) > 0


def test_tokens_and_strings_that_end_a_completion_end_it_within_drafts():
    rigs = pair()
    undisturbed = rigs[0].run(groups())
    stop_ids = {sample.completion_ids[9] for sample in undisturbed[:6]}
    strings = tuple({decode(sample.completion_ids[7:9]) for sample in undisturbed[6:]})
    for _epoch in range(2):  # the second time all drafts are right: the completions of the first are there
        ended = both(rigs, groups(stop_token_ids=tuple(stop_ids), stop_strings=strings))
        assert {sample.finish_reason for sample in ended} >= {"stop"}
        for sample in ended:
            assert not stop_ids & set(sample.completion_ids[:-1])
            assert not any(string in decode(sample.completion_ids[:-1]) for string in strings)
    assert accepted(rigs) > 0


def test_a_completion_that_was_broken_off_goes_on_as_if_it_was_not():
    rigs = pair()
    whole = both(rigs, groups())
    begun = [
        RolloutRequest(
            sent.id,
            sent.prompt_ids,
            sent.params,
            sent.group,
            begun=Beginning(
                tuple(sample.completion_ids[:count]), tuple(sample.logprobs[:count]), tuple(sample.versions[:count])
            ),
        )
        for count, (sent, sample) in enumerate(zip(groups(), whole, strict=True), 3)
    ]
    same_samples(both(rigs, begun), whole)


def test_new_weights_leave_drafts_of_earlier_epochs_which_need_not_be_right():
    rigs = pair()
    both(rigs, groups())
    for rig in rigs:
        with torch.no_grad():
            for parameter in rig.module.parameters():
                parameter.mul_(1.001)
        rig.publish(2)
    before = accepted(rigs)
    both(rigs, groups(1), version=2)
    assert accepted(rigs) > before


def test_turns_of_conversations_keep_their_samples():
    rigs = pair()
    first = both(rigs, groups())
    turns = [
        RolloutRequest(sent.id, (*sent.prompt_ids, *sample.completion_ids[:4], 7, 8), sent.params)
        for sent, sample in zip(groups(), first, strict=True)
    ]
    both(rigs, turns)


def test_drafts_take_no_blocks_from_anybody():
    """A cache for two and a half of the sequences: they make room for each other, not for drafts."""
    bytes_of_blocks = 24 * 4 * 2 * 2 * (8 + 16) * 4
    rigs = pair(kv_cache_memory_bytes=bytes_of_blocks)
    for epoch in range(2):
        both(rigs, groups(epoch))
    counts = [rig.engine.stats().num_preemptions for rig in rigs]
    assert counts[0] > 0
    assert counts[1] <= counts[0]
    assert accepted(rigs) > 0
    assert rigs[1].engine.stats().kv_cache_used_share == 0


def test_a_pass_with_drafts_that_fails_is_repeated_as_if_it_had_not(monkeypatch):
    rigs = pair()
    both(rigs, groups())
    expected = rigs[0].run(groups(1))
    rigs[1].engine.submit(groups(1), 1)
    rigs[1].engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_rl.engines.inplace.runner.check_finite", lambda logprobs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rigs[1].engine.step()
    events = []
    while rigs[1].engine.num_unfinished:
        events += rigs[1].engine.step()
    same_samples(sorted(events, key=lambda event: event.id), expected)


def test_auto_drafts_nothing_before_passes_of_two_sizes_were_seen_and_keeps_samples():
    rigs = inplace().ready(), inplace(speculation="auto").ready()
    both(rigs, [request(number, 4, 8) for number in range(4)])
    assert rigs[1].engine.stats().num_draft_tokens == 0
    for epoch in range(4):
        both(rigs, groups(epoch))


def test_seconds_of_passes_are_interpolated_and_never_fall():
    seconds = PassSeconds()
    for num_rows, duration in ((1, 1.0), (4, 4.0), (8, 3.0), (11, 6.0), (12, 6.0)):
        seconds.add(num_rows, duration)
    np.testing.assert_allclose(seconds.of(np.array([1, 2, 4, 8, 10, 12, 99])), [1, 2, 4, 4, 5, 6, 6])
    assert seconds.most_rows == 12
    seconds.add(1, 0.0)  # nearer to the shortest: 0.3 of the way down, 0.05 of it up
    seconds.add(1, 1.7)
    np.testing.assert_allclose(seconds.of(np.array([1])), [0.7 + 0.05])


def test_partial_rollouts_and_other_engines_refuse_it():
    for mode in ("on", "auto"):
        with pytest.raises(ConfigError, match=f"speculation={mode} with partial=true"):
            resolved(speculation=mode, partial=True)
    for engine in ("hf", "vllm"):
        with pytest.raises(ConfigError, match="speculation"):
            resolved(speculation="on", engine=engine)
    assert resolved().rollout.speculation == "off"


def test_the_prompt_itself_gives_drafts():
    rigs = pair()
    repeated = SamplingParams(12, temperature=0.0)
    sample = rigs[0].run([RolloutRequest(0, prompt(4), repeated)])[0]
    both(rigs, [RolloutRequest(0, (*prompt(4), *sample.completion_ids, *prompt(4)), repeated)])
    assert rigs[1].engine.stats().num_draft_tokens > 0
