"""What vLLM has compiled is found again at the next start: folder and hash are the same in another process."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_rl.checkpoint.owners import Owner
from hybrid_rl.errors import ConfigError
from hybrid_rl.vllm import config_folder as folders
from hybrid_rl.vllm.config_folder import config_folder
from tests.vllm.fresh import compiled
from tests.vllm.rigs import tiny


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
    with pytest.raises(ConfigError, match="vllm is not a folder of this user's own; remove it, or change"):
        config_folder(tiny())
    cache.unlink()
    cache.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="is not a folder of this user's own"):
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
@pytest.mark.sweep
def test_two_processes_have_one_hash(fresh_process, monkeypatch):
    """Whatever differs from start to start is no part of it: the run's name, and the bytes of the cache."""
    folder, number = fresh_process["compiled"]
    cache = Path(folder).parents[2]
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert compiled("two", 2**25) == (folder, number) and Path(folder).parent == cache / "hybrid_rl" / "vllm"
