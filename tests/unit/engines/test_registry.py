"""Engines by name: every one that a configuration can choose, and nothing else."""

import sys
from dataclasses import replace

import pytest
import torch

from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.schema import InPlaceRolloutConfig
from hybrid_rl.engines import registry
from hybrid_rl.engines.hf.hf_engine import HFEngine
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.engines.registry import MODULES, EngineSetup, make_engine
from hybrid_rl.errors import ConfigError
from hybrid_rl.models import CausalLM
from tests.support.engines.engine_settings import hf_settings, inplace_settings
from tests.unit.models.families import build


def setup(config):
    return EngineSetup(CausalLM(build("qwen2")), config, max_length=32, device=torch.device("cpu"))


def test_every_engine_of_the_configuration_is_registered():
    assert set(MODULES) == set(CHOICES["rollout"].members)


def test_an_engine_is_made_with_its_own_section():
    inplace = make_engine(setup(inplace_settings(block_size=4, kv_cache_memory_bytes=10**6)))
    assert isinstance(inplace, InPlaceEngine)
    # Two layers of two key heads with 8 dims, for keys and values padded to 16, in fp32: 384 bytes a token.
    assert inplace.kv_cache_tokens == 10**6 // (4 * 384) * 4
    hf = make_engine(setup(hf_settings(max_num_waiting=7)))
    assert isinstance(hf, HFEngine) and hf.num_queueable == 7


def test_an_engine_is_imported_when_it_is_made(monkeypatch, tmp_path):
    (tmp_path / "late_engine.py").write_text("def make_engine(setup):\n    return setup.max_length\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.MODULES, "late", "late_engine")
    late = replace(InPlaceRolloutConfig(), engine="late")
    assert "late_engine" not in sys.modules
    assert make_engine(setup(late)) == 32
    monkeypatch.delitem(sys.modules, "late_engine")


def test_an_unknown_engine_is_refused():
    unknown = replace(InPlaceRolloutConfig(), engine="sglang")
    with pytest.raises(
        ConfigError, match=r"rollout.engine=sglang is not in engines/registry.py; use inplace, hf, vllm"
    ):
        make_engine(setup(unknown))
