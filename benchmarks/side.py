"""The child of a comparison: a library in a process of its own that does one step per command.

Lines of JSON: the first that arrives is the job, every later one a command; each is answered by one line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.workload import Work


@dataclass(frozen=True)
class Job:
    """The task of a side. folder: of the model; output: a folder for the library's files; micro_batch: TRL's, in
    completions; tokens_per_micro_batch: ours; generation: TRL's, `padded` or `continuous`; num_turns: of an agent;
    beta: of the KL against the reference; lora: arguments of peft's LoraConfig, None = all weights are trained;
    save_steps: steps between checkpoints, of which TRL keeps one, None = none; keys: ours, besides those that both
    sides have."""

    work: Work
    folder: str
    output: str
    num_steps: int
    threads: int
    seed: int
    learning_rate: float
    micro_batch: int | None = None
    tokens_per_micro_batch: int | None = None
    generation: str = "padded"
    num_turns: int = 1
    dtype: str = "float32"
    beta: float = 0.0
    lora: dict[str, Any] | None = None
    save_steps: int | None = None
    keys: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Job:
        """From the parsed line."""
        return cls(**{**values, "work": Work(**values["work"])})


class Driver:
    """The process that gives the commands. What the library prints goes to stderr, so that it cannot disturb."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any]:
        """The next line; ends this process when the driver is gone."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        return json.loads(line)

    def send(self, **values: Any) -> None:
        """Answer."""
        print(json.dumps(values), file=self._out, flush=True)

    def serve(self, model: nn.Module) -> None:
        """Answer commands until the next step is due."""
        while (command := self.receive())["command"] != "step":
            if command["command"] != "save":
                raise ValueError(f"command {command['command']!r} is unknown; use step or save")
            torch.save(model.state_dict(), command["path"])
            self.send()


class StepClock:
    """Wall and CPU seconds of a step; CPU seconds count all threads of this process. system_seconds is the part of
    them spent in the operating system, most of it on handing out memory."""

    def __init__(self) -> None:
        self._start = self._read()

    def stop(self) -> dict[str, float]:
        """Return the seconds that have passed."""
        return {name: value - self._start[name] for name, value in self._read().items()}

    @staticmethod
    def _read() -> dict[str, float]:
        return {
            "wall_seconds": time.perf_counter(),
            "cpu_seconds": time.process_time(),
            "system_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_stime,
        }


def measured(seconds: dict[str, float], name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call, and add its wall seconds to `seconds[name]`."""
    start = time.perf_counter()
    try:
        return call(*arguments)
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far.

    Linux keeps in ru_maxrss what the process was before exec, the parent's memory; VmHWM begins with the program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
