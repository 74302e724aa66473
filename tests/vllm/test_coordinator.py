"""Two real ranks that share one vLLM by tensor parallelism: each gets its own samples, and nobody waits in vain."""

import pytest

from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.sweep]


def share(rank, num_ranks):
    """What this rank saw, for the tests to look at."""
    import time
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from hybrid_rl.controller.ranks import BlockGather
    from hybrid_rl.engines.base import KV_CACHE, TAGS, Beginning
    from hybrid_rl.engines.coordinator import Coordinator
    from hybrid_rl.engines.engine_client import EngineClient
    from hybrid_rl.errors import EngineStateError
    from hybrid_rl.resharding.handoff.tensor import TensorSource
    from tests.support.engines.engine_settings import vllm_settings
    from tests.unit.engines.engines import forward_logprobs, request
    from tests.vllm.rigs import SETTINGS, make_engine, tiny

    module = tiny()
    config = vllm_settings(
        **{**SETTINGS, "tensor_parallel_size": num_ranks, "per_request_seeds": False, "max_num_seqs": 8}
    )
    live = make_engine(module, config, seed=7)
    gather = BlockGather(num_ranks)
    own = {"gather": gather, "gather_numbers": gather.numbers, "fingerprint": lambda: live.fingerprint}
    coordinator = Coordinator(rank=rank, num_ranks=num_ranks, **own)
    client = EngineClient(live, in_thread=True, coordinator=coordinator)
    client.at_rest().wake(TAGS)
    client.at_rest().update_weights(TensorSource.of(module), 1)

    def gap(requests, samples):
        sent = {one.id: one for one in requests}
        gaps = [
            (forward_logprobs(module, sent[s.id], s) - torch.tensor(s.logprobs)).abs().max().item() for s in samples
        ]
        return max(gaps, default=0.0)

    def stream(requests, version):
        torch.rand(rank)  # ranks draw differently; the replica's noise is its own
        return sorted((e for events in client.stream(requests, version) for e in events), key=lambda e: e.id)

    seen = {}
    uneven = [request(i, 3 + i, 6 + i) for i in range(12)] if rank == 0 else []
    samples = stream(uneven, 1)
    seen["uneven"] = [s.id for s in samples], gap(uneven, samples)
    both = [request(i, 4 + rank, 5) for i in range(3 + rank)]  # equal ids, other requests
    samples = stream(both, 1)
    seen["both"] = [(s.id, len(s.completion_ids)) for s in samples], gap(both, samples)
    seen["fingerprint"] = live.fingerprint

    try:
        for _ in client.stream([request(0, 4, 2 if rank == 1 else 40)], 1):
            raise ValueError("the reward failed")
    except (ValueError, EngineStateError) as error:
        seen["ended early"] = type(error).__name__, str(error), live.num_unfinished

    with client.session():
        handle = client.submit([request(5, 4, 6)], 1)
        client.poll(handle)
        client.cancel(handle)
        (broken,) = client.wait(handle)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05)
        client.at_rest().update_weights(TensorSource.of(module), 2)
        client.at_rest().sleep({KV_CACHE})
        client.at_rest().wake({KV_CACHE})
        begun = Beginning(tuple(broken.completion_ids), tuple(broken.logprobs), tuple(broken.versions))
        (sample,) = client.generate([replace(request(5, 4, 6), begun=begun)], 2)
    seen["kept"] = (
        sample.versions,
        abs((forward_logprobs(module, request(5, 4, 6), sample) - torch.tensor(sample.logprobs))[1:].max().item()),
    )
    turns, asked, stats = [], [], client.stats()
    start, cpu = time.monotonic(), time.process_time()
    with client.session():  # rank 0 holds a conversation with a slow tool, rank 1 has nothing to ask
        ids = request(0, 20).prompt_ids
        for number in range(3 if rank == 0 else 0):
            asked.append(replace(request(number, 1, 9), prompt_ids=ids))
            handle = client.submit(asked[-1:], 2)
            while not handle.is_done:
                client.advance()
                turns += handle.take()
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                client.advance()
            ids = (*ids, *turns[-1].completion_ids, 5, 6, 7)
    seen["conversation"] = (
        [len(one.completion_ids) for one in turns],
        gap(asked, turns),
        client.stats().num_prefix_tokens - stats.num_prefix_tokens,
        (time.process_time() - cpu) / (time.monotonic() - start),
    )
    client.close()
    alive = torch.ones(1)
    dist.all_reduce(alive)
    seen["alive"] = alive.item()
    return seen


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(share, 2, preloaded=("tests.vllm.rigs",))


def test_a_rank_without_requests_steps_with_the_other(ranks):
    assert ranks[0]["uneven"][0] == list(range(12))
    assert ranks[0]["uneven"][1] < 1e-5
    assert ranks[1]["uneven"] == ([], 0.0)


def test_each_rank_gets_its_own_samples_under_its_own_ids(ranks):
    for rank in range(2):
        samples, gap = ranks[rank]["both"]
        assert samples == [(i, 5) for i in range(3 + rank)]
        assert gap < 1e-5


def test_both_sampled_the_same_tokens(ranks):
    assert ranks[0]["fingerprint"] == ranks[1]["fingerprint"] != 0


def test_a_rank_that_ends_early_frees_the_other(ranks):
    assert ranks[1]["ended early"] == ("ValueError", "the reward failed", 0)
    name, message, left = ranks[0]["ended early"]
    assert (name, left) == ("PeerAbortedError", 0)
    assert "rank 1 of those that share this engine ended its rollout early" in message


def test_what_was_broken_off_goes_on_after_a_handoff(ranks):
    for seen in ranks:
        versions, gap = seen["kept"]
        assert versions == [1, 2, 2, 2, 2, 2]
        assert gap < 1e-5


def test_a_rank_without_a_conversation_waits_with_the_other_for_its_tools(ranks):
    """Prompts of 20, 32 and 44 tokens; the third finds the first block of 32. Three seconds of tools cost little."""
    (lengths, gap, found, busy), (nothing, _, same, also_busy) = (seen["conversation"] for seen in ranks)
    assert (lengths, nothing) == ([9, 9, 9], [])
    assert gap < 1e-5
    assert found == same == 32
    assert max(busy, also_busy) < 0.5


def test_the_trainers_process_group_outlives_the_engine(ranks):
    assert [seen["alive"] for seen in ranks] == [2.0, 2.0]
