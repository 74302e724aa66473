"""What vLLM has compiled is found again at the next start: folder and hash are the same in another process."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from hybrid_rl.errors import ConfigError
from hybrid_rl.owners import Owner
from hybrid_rl.rollout.vllm import config_folder as folders
from hybrid_rl.rollout.vllm.config_folder import config_folder
from tests.vllm.rigs import tiny

PROGRAM = """
import sys
import torch
from vllm import EngineArgs
from hybrid_rl.config.schema import VLLMConfig
from hybrid_rl.rollout.vllm.arguments import engine_arguments
from hybrid_rl.rollout.vllm.build import give_cache, variables
from hybrid_rl.rollout.vllm.config_folder import config_folder
from hybrid_rl.rollout.vllm.environment import process_kept
from tests.vllm.rigs import tiny

module = tiny()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with process_kept(variables(torch.device("cpu"), sys.argv[1])):
    folder = config_folder(module)
    settings = {"dtype": torch.float32, "max_length": 64, "seed": 0, "trust_remote_code": False, "can_sleep": False}
    arguments = engine_arguments(VLLMConfig(enforce_eager=False), folder, device=torch.device("cpu"), **settings)
    config = EngineArgs(**arguments | {"load_format": "dummy"}).create_engine_config()
    give_cache(config.cache_config, int(sys.argv[2]))
print(folder, config.compute_hash())
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hybrid_rl" / "vllm"


def test_one_model_has_one_folder_and_another_model_another(cache):
    first, again, other = config_folder(tiny()), config_folder(tiny()), config_folder(tiny(num_hidden_layers=1))
    assert first == again != other and first.parent == other.parent == cache
    assert json.loads((first / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert sorted(path.name for path in cache.iterdir()) == sorted([first.name, other.name])


def test_a_folder_that_was_changed_is_written_again(cache):
    first = config_folder(tiny())
    content = (first / "config.json").read_text()
    (first / "config.json").write_text("{}")
    assert config_folder(tiny()) == first and (first / "config.json").read_text() == content


def test_only_this_user_can_enter(cache):
    cache.mkdir(mode=0o777, parents=True)
    cache.chmod(0o777)
    config_folder(tiny())
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_is_refused(cache, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cache.parent.mkdir()
    cache.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="vllm is no folder of this user's own; remove it, or set XDG_CACHE_HOME"):
        config_folder(tiny())
    cache.unlink()
    cache.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="is no folder of this user's own"):
        config_folder(tiny())


def test_those_used_last_are_kept_and_no_more(cache, monkeypatch):
    monkeypatch.setattr(folders, "MAX_FOLDERS", 2)
    made = [config_folder(tiny(intermediate_size=32 * width)) for width in (1, 2)]
    os.utime(made[0], (1, 1))
    os.utime(made[1], (2, 2))
    assert config_folder(tiny(intermediate_size=32)) == made[0]  # used again
    third = config_folder(tiny(intermediate_size=96))
    assert sorted(cache.iterdir()) == sorted([made[0], third])


def test_what_a_killed_start_left_goes_with_the_next(cache):
    here = Owner.here()
    owners = {"gone": replace(here, started=here.started - 1), "alive": here, "elsewhere": replace(here, kernel="k")}
    left = {kind: cache / f".new-{owner.token}.abc_12" for kind, owner in owners.items()}
    for path in left.values():
        (path / "config").mkdir(parents=True)
    config_folder(tiny())
    assert [kind for kind, path in left.items() if path.exists()] == ["alive", "elsewhere"]


@pytest.mark.slow
def test_two_processes_have_one_hash(cache):
    """Whatever differs from start to start is no part of it: the run's name, and the bytes of the cache."""

    def start(*arguments):
        command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        return done.stdout.split()[-2:]

    first, second = start("one", 2**24), start("two", 2**25)
    assert first == second and first[0].startswith(str(cache))
