"""One run of `soak.py`: `python -m benchmarks.soak_run FOLDER`, with the options in FOLDER/options.json.

It goes on from the newest checkpoint if it was started before. Every step leaves a line in `record.jsonl`: metrics, and
what the run and all processes below it hold.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import soak_faults
from hybrid_rl import Callback, Trainer
from tests.support.agents.callers import build_policy

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}  # the smallest of vLLM's on CPUs
CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 20, "b": 3})]
KEYS: dict[str, Any] = {
    "run_name": "run",
    "resume": "auto",
    "log_level": "quiet",
    "save_steps": 5,
    "save_total_limit": 2,
    "max_restarts": 100,
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_prompt_length": 60,
    "max_completion_length": 32,
    "max_tool_calling_iterations": soak_faults.CALLS_IN_A_TRAJECTORY,
    "learning_rate": 1e-3,
    "reward_processes": 1,
    "reward_timeout_seconds": 2.0,
    "max_reward_failure_share": 0.5,
    "tool_processes": 1,
    "tool_timeout_seconds": 2.0,
}
ENGINES: dict[str, dict[str, Any]] = {
    "inplace": {"engine": "inplace"},
    "vllm": {
        "engine": "vllm",
        "engine_args.enforce_eager": True,
        "rollout.engine_args.block_size": 32,
        "kv_cache_memory_bytes": 2**23,
        "engine_args.per_request_seeds": True,
        "handoff.verify_steps": 10,
    },
}
RECORDED = (
    *("reward", "restarts", "rewards/num_failed", "rewards/num_retried", "tools/failure_frequency"),
    *("agents/tool_calls_mean", "agents/tool_timeouts", "step_time", "handoff/probe_gap"),
)
# Between engine and trainer, of every token.
GAP = "sampling/sampling_logp_difference/max"


class Record(Callback):
    """Writes the line of each step, fills and frees the disk, and kills the driver when that is due."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._disk = folder / "disk"

    def on_fit_start(self, trainer: Any) -> None:
        self._tell_step(trainer.global_step + 1)

    def on_step_end(self, trainer: Any, step: int, batch: Any, metrics: Mapping[str, float]) -> None:
        line: dict[str, Any] = {"step": step, "at": time.time(), "driver": os.getpid()}
        line |= {name: metrics[name] for name in (*RECORDED, GAP) if name in metrics}
        if step % self._every == 0:
            line |= held_by_run(self._folder)
        with (self._folder / "record.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._tell_step(step + 1)
        self._fill(step)
        if soak_faults.claim("driver killed", step):
            soak_faults.note("driver killed", step)
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell_step(self, step: int) -> None:
        made = self._folder / "step.new"
        made.write_text(str(step))
        made.rename(self._folder / "step")

    def _fill(self, step: int) -> None:
        """Leave no room on the disk of the run in some steps."""
        filler = self._disk / soak_faults.FILLER
        starts = [at for at, kind in soak_faults.schedule().items() if kind == "disk full"]
        begun = next((at for at in starts if at <= step < at + soak_faults.DISK_FULL_STEPS), None)
        if begun is None:
            filler.unlink(missing_ok=True)
            return
        if soak_faults.claim("disk full", begun):
            soak_faults.note("disk full", begun)
        with filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass  # full


def held_by_run(folder: Path) -> dict[str, float]:
    """What this process and all below it hold: anonymous pages, threads, open files; files of the run and temporary
    ones; and what is available on the machine, bytes."""
    own = psutil.Process()
    totals = dict.fromkeys(("process_bytes", "num_threads", "num_descriptors", "num_processes"), 0.0)
    for process in [own, *own.children(recursive=True)]:
        root = Path("/proc") / str(process.pid)
        try:
            status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
            num_descriptors = len(os.listdir(root / "fd"))
        except OSError:  # it has ended
            continue
        if "RssAnon" not in status:  # a zombie
            continue
        totals["process_bytes"] += int(status["RssAnon"].split()[0]) * 1024
        totals["num_threads"] += int(status["Threads"])
        totals["num_descriptors"] += num_descriptors
        totals["num_processes"] += 1
    places = [folder / "disk", Path(os.environ["TMPDIR"])]
    totals["num_files"] = float(sum(len(files) for place in places for _, _, files in os.walk(place)))
    return totals | {"available_bytes": float(psutil.virtual_memory().available)}


class Warnings(logging.Handler):
    """Writes the first line of each warning of the run."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record.getMessage().splitlines()[0]) + "\n")


def main(folder: Path) -> None:
    """Train to the last step."""
    options = json.loads((folder / "options.json").read_text())
    torch.set_num_threads(1)
    os.environ[soak_faults.FOLDER] = str(folder)
    if options["ranks"] == 1:
        soak_faults.fail_handoffs()
    logging.getLogger("hybrid_rl").addHandler(Warnings(folder / "warnings.jsonl"))
    model, tokenizer = build_policy(CALLS, favour={"k": 3.0}, seed=options["seed"], **SHAPE)
    start = folder / "model"
    if not start.exists():
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
    rows = [{"prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(200)]
    keys = {**KEYS, **ENGINES[options["engine"]], "seed": options["seed"]}
    keys |= {"max_steps": options["steps"], "output_dir": str(folder / "disk" / "runs")}
    if options["ranks"] > 1:
        names = (soak_faults.FOLDER, "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS")
        keys |= {"num_ranks": options["ranks"], "ray.env_vars": {name: os.environ[name] for name in names}}
        if options["engine"] == "vllm":
            keys["tensor_parallel_size"] = options["ranks"]
    record = Record(folder, options["every"])
    rewards, tools = [soak_faults.right_calls], [soak_faults.add]
    with Trainer(str(start), rewards, rows, tools=tools, tokenizer=tokenizer, callbacks=[record], **keys) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
