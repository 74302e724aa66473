"""Where a run was made, without secrets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hybrid_rl.logging.provenance import code_state, command, environment


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["python", "x.py", "api_key=sk-1", "seed=1"], ["python", "x.py", "api_key=***", "seed=1"]),
        (["x", "--hf-token", "hf_1", "--steps", "3"], ["x", "--hf-token", "***", "--steps", "3"]),
        (["x", "--password=p", "judge.API_KEY=s"], ["x", "--password=***", "judge.API_KEY=***"]),
        (["x", "max_tokens=5", "tokens_per_micro_batch=8"], ["x", "max_tokens=5", "tokens_per_micro_batch=8"]),
        (["x", "stop_token_ids=[1]", "key="], ["x", "stop_token_ids=[1]", "key="]),
        (["a" * 400], ["a" * 300 + "..."]),
    ],
)
def test_commands_are_kept_without_their_secrets(arguments: list[str], shown: list[str]) -> None:
    assert command(arguments) == shown


def test_variables_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment.cache_clear()
    found = environment()
    environment.cache_clear()
    assert found["variables"]["OMP_NUM_THREADS"] == "3" and "very secret" not in str(found)
    assert found["packages"].keys() >= {"torch", "transformers"} and found["machine"]["memory_bytes"] > 0


def test_code_is_that_of_its_repository(tmp_path: Path) -> None:
    assert code_state(tmp_path / "missing") == code_state(tmp_path) == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    (tmp_path / "reward.py").write_text("1")
    for arguments in (["init", "-q", "-b", "mine"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    found = code_state(tmp_path)
    assert found["branch"] == "mine" and len(found["commit"]) == 40 and found["has_changes"] is False
    (tmp_path / "reward.py").write_text("2")
    assert code_state(tmp_path)["has_changes"] is True
