"""What decoding asks of the device: as a CUDA graph the same numbers, and no waiting beyond one read per step."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from tests.gpu.device import cuda_only, rig_of
from tests.support.inside.engines import graphs_of
from tests.unit.engines.engines import Rig, mixed_requests, request, same_samples
from tests.unit.engines.inplace.test_conversations import FORKED, samples_of

pytestmark = cuda_only


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("max_num_seqs", [3, 16])
def test_a_graph_decodes_what_eager_decodes(family: str, max_num_seqs: int) -> None:
    eager = rig_of(family, cuda_graphs=False, max_num_seqs=max_num_seqs)
    graphed = rig_of(family, cuda_graphs=True, max_num_seqs=max_num_seqs)
    same_samples(graphed.run(mixed_requests()), eager.run(mixed_requests()))


def test_conversations_find_their_blocks_and_get_the_answers_of_who_remembers_nothing() -> None:
    """Blocks are continued and copied beside graphs that replay."""
    graphed, plain = rig_of("qwen2"), rig_of("qwen2", cuda_graphs=False, enable_prefix_caching=False)
    same_samples(samples_of(graphed, FORKED), samples_of(plain, FORKED))
    assert graphed.engine.stats().prefix_hit_share() > 0.5


def test_graphs_decode_with_the_newest_weights_and_outlive_the_nights_of_the_cache() -> None:
    eager, graphed = rig_of("qwen2", cuda_graphs=False), rig_of("qwen2")
    graphed.run(mixed_requests())
    graphs = graphs_of(graphed.engine)
    assert graphs.num_captures == 5
    for version in (2, 3):
        for rig in (eager, graphed):
            rig.engine.sleep({"kv_cache"})
            rig.perturb()
            rig.engine.wake({"weights", "kv_cache"})
            rig.publish(version)
        same_samples(graphed.run(mixed_requests(), version), eager.run(mixed_requests(), version))
    assert graphs.num_captures == 5


def test_weights_that_moved_are_captured_again() -> None:
    eager, graphed = rig_of("qwen2", cuda_graphs=False), rig_of("qwen2")
    graphed.run(mixed_requests())
    old = [parameter.data for parameter in graphed.module.parameters()]  # held, so that no address is used again
    for parameter in graphed.module.parameters():
        parameter.data = parameter.data.clone()
    for rig in (eager, graphed):
        rig.perturb()
        rig.publish(2)
    same_samples(graphed.run(mixed_requests(), 2), eager.run(mixed_requests(), 2))
    assert len(old) and graphs_of(graphed.engine).num_captures == 10


def test_a_capture_leaves_other_threads_their_device() -> None:
    """A reward on the device allocates, launches and waits while graphs are captured."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                float((torch.randn(257, 257, device="cuda") @ torch.randn(257, 3, device="cuda")).sum())
                torch.empty(1 << 20, pin_memory=True)
        except BaseException as error:
            failures.append(error)

    expected = rig_of("qwen2", cuda_graphs=False).run(mixed_requests())
    rig = rig_of("qwen2")
    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = rig.run(mixed_requests())
    finally:
        stop.set()
        thread.join()
    assert not failures
    same_samples(found, expected)


def waits_of(rig: Rig, num_steps: int) -> int:
    """How often the host waited for the device during engine steps."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(num_steps):
                rig.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_decode_step_waits_for_the_device_once(graphs: bool) -> None:
    """Once per step the tokens come to the host; anything else would hold up the queue of kernels."""
    rig = rig_of("qwen2", cuda_graphs=graphs)
    rig.engine.submit([request(i, 4, 30) for i in range(8)], 1)
    for _ in range(6):  # prefill, warm-up, capture
        rig.engine.step()
    assert waits_of(rig, 10) <= 10
