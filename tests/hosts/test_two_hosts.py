"""Ranks on two hosts: where they meet, what they train, and what they are refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import without_vllm
from tests.hosts.conftest import ADDRESS, ROOT, TOKEN, Hosts
from tests.hosts.train import trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VLLM = {
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "rollout.engine_args.block_size": 32,
    "kv_cache_memory_bytes": 2**23,
    "engine_args.per_request_seeds": True,
    "handoff.verify_steps": 1,
}
needs_vllm = pytest.mark.skipif(bool(without_vllm()), reason=without_vllm() or "-")


def train(hosts: Hosts, name: str, **keys: Any) -> dict[str, Any]:
    """What a driver on nodea told."""
    command = [sys.executable, "-m", "tests.hosts.train", str(hosts.folder / name), ADDRESS, json.dumps(keys)]
    done = hosts.run("nodea", *command, **TOKEN)
    told = [line.removeprefix("TELLS ") for line in done.stdout.splitlines() if line.startswith("TELLS ")]
    assert done.returncode == 0 and told, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(told[-1])
    return result


def assert_of_both(told: dict[str, Any]) -> None:
    assert [host for host in ("nodea", "nodeb") for log in told["logs"] if f" on {host}, cpu" in log] == [
        "nodea",
        "nodeb",
    ]


def test_in_place_they_train_as_one_process_does(cluster: Hosts) -> None:
    apart, alone = train(cluster, "grpo", num_ranks=2), trained(cluster.folder / "alone", "", {})
    assert_of_both(apart)
    for ours, theirs in zip(apart["metrics"], alone["metrics"], strict=True):
        assert ours["handoff/probe_gap"] < 1e-5
        for name in ("reward", "loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name


def test_partial_rollouts_one_step_off(cluster: Hosts) -> None:
    told = train(cluster, "partial", num_ranks=2, oversample=4, **{"rollout.partial": True, "rollout.async_level": 1})
    assert_of_both(told)
    assert all(metrics["handoff/probe_gap"] < 1e-5 for metrics in told["metrics"])


@needs_vllm
def test_two_replicas_of_vllm(cluster: Hosts) -> None:
    """Each needs what the other host has of the weights."""
    told = train(cluster, "vllm", num_ranks=2, **VLLM)
    assert_of_both(told)
    for metrics in told["metrics"]:
        assert metrics["handoff/probe_gap"] < 1e-5 and metrics["handoff/remote_bytes"] > 0


@needs_vllm
def test_a_replica_on_cpus_does_not_span_hosts(cluster: Hosts) -> None:
    """Its ranks meet in shared memory. It is refused before anything is loaded, and leaves no memory."""
    before = cluster.run("nodea", "ls", "/dev/shm").stdout
    command = [sys.executable, "-m", "tests.hosts.train", str(cluster.folder / "tp"), ADDRESS]
    done = cluster.run("nodea", *command, json.dumps({**VLLM, "num_ranks": 2, "tensor_parallel_size": 2}), **TOKEN)
    assert "ConfigError: " in done.stderr and "ranks 0 to 1 are on nodea, nodeb" in done.stderr, done.stderr
    assert cluster.run("nodea", "ls", "/dev/shm").stdout == before


def test_the_slurm_script_forms_a_cluster_of_both(hosts: Hosts, tmp_path: Path) -> None:
    """With Slurm's commands replaced by those of this folder, in a home in which Ray has left a token."""
    home, folder = tmp_path / "home", tmp_path / "run"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("f" * 64)
    made = hosts.run("nodea", sys.executable, "-m", "tests.hosts.recipe", str(folder))
    assert made.returncode == 0, made.stderr
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "nodea,nodeb", "SLURM_JOB_ID": "7"}
    path = f"{ROOT / 'tests' / 'hosts' / 'bin'}:{os.environ['PATH']}"
    venv = str(Path(sys.executable).parents[1])
    command = ["bash", str(ROOT / "recipes" / "real" / "train.sbatch"), str(folder / "run.yaml"), "reward=exact_match"]
    done = hosts.run("nodea", *command, **job, PATH=path, HOME=str(home), VENV=venv)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = "".join(file.read_text() for file in (folder / "runs" / "run" / "logs").glob("*.log"))
    assert " on nodea, cpu" in logs and " on nodeb, cpu" in logs
    steps = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps][-2:] == [1, 2]
