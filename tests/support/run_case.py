"""A run folder as the library writes it, made without a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>document.title='broken in'</script>"
    "<img src=x onerror=\"document.title='broken in'\"> \u2028 & \ud83d"
)


def write_run(folder: Path, num_steps: int = 12, samples_per_step: int = 8, *, learns: float = 0.08) -> Path:
    """Write a run of so many steps: groups of four samples, the second of which has values of each token."""
    folder.mkdir(parents=True)
    config = {"algorithm": {"name": "grpo", "num_generations": 4}, "optimizer": {"learning_rate": 0.0003 * learns}}
    config |= {"model": {"dtype": "float32"}, "max_steps": num_steps}  # type: ignore[dict-item]
    (folder / "config.yaml").write_text(json.dumps(config))  # YAML is a superset of JSON
    model = {"path": None, "class": "Qwen2ForCausalLM", "num_parameters": 447872}
    about = {"given": ["optimizer.learning_rate"], "model": model, "python": "3.11.7", "command": ["python", "x.py"]}
    (folder / "environment.json").write_text(json.dumps(about))
    write_lines(folder / "metrics.jsonl", [metrics(step, learns) for step in range(num_steps + 1)])
    write_lines(folder / "timeline.jsonl", [timeline(step) for step in range(1, num_steps + 1)])
    write_lines(
        folder / "samples.jsonl",
        [sample(step, number) for step in range(1, num_steps + 1) for number in range(samples_per_step)],
    )
    memory = {"step": 2, "moments": [0.0, 0.5, 1.0], "bytes": {"actor": [4e6, 4e6, 4e6], "kv_cache": [1e7, 0, 0]}}
    memory |= {"phases": [["generate", 0.0, 0.5], ["update", 0.5, 1.0]], "lines": {}}  # type: ignore[dict-item]
    (folder / "memory.json").write_text(json.dumps(memory))
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def metrics(step: int, learns: float = 0.08) -> dict[str, Any]:
    reward = 1 - math.exp(-learns * step)
    found = {"step": step, "handoff/probe_gap": 1e-7}
    if step % 4 == 0:
        found |= {"eval/reward": reward, "eval/accuracy": reward, "timing/evaluate": 0.25}
        found |= {"eval/accuracy_low": reward - 0.05, "eval/accuracy_high": reward + 0.05}
    if step:
        found |= {"reward": reward, "reward_std": 0.1, "entropy": 2 - reward, "kl": 0.001 * step, "ratio/mean": 1.0}
        found |= {"completions/mean_length": 5.0 + step % 3, "mismatch/prob_difference_mean": 1e-7, "grad_norm": 1.0}
        found |= {"timing/step": 1.0, "timing/rollout": 0.5, "timing/reward": 0.1, "timing/update": 0.2}
        found |= {"num_tokens": 100.0 * step, "perf/tokens_per_second": 100.0, "staleness/mean_age": 0.0}
        found |= {"memory/actor_bytes": 4e6, "memory/kv_cache_bytes": 1e7, "handoff/bytes": 0.0}
    return found


def timeline(step: int) -> dict[str, Any]:
    driver = [["rollout", 0.0, 0.7], ["logprobs", 0.7, 0.05], ["update", 0.75, 0.2], ["handoff", 0.95, 0.05]]
    ranks = [[["generate", 0.0, 0.6], ["update", 0.75, 0.2], ["publish", 0.95, 0.01]] for _ in range(2)]
    if step % 4 == 0:
        driver.append(["evaluation", 1.0, 0.25])
    if step % 4 == 1 and step > 1:
        ranks[0].insert(0, ["generate", -0.4, 0.25])  # of the evaluation after the step before
    return {
        "step": step,
        "start": 1000.0 + 1.5 * step,
        "seconds": 1.1 + 0.25 * (step % 4 == 0),
        "phases": driver,
        "ranks": ranks,
    }


def sample(step: int, number: int) -> dict[str, Any]:
    is_right = (number * 7 + step) % 3 == 0
    record: dict[str, Any] = {"step": step, "group": number // 4, "trajectory": number, "turn": 0}
    record |= {
        "prompt": f"{step}+{number}=",
        "completion": str(step + number + (not is_right)),
        "reward": float(is_right),
    }
    record |= {"rewards": {"exact": float(is_right)}, "finish_reason": "stop", "row": {"answer": str(step + number)}}
    record["advantage"] = 1.5 if is_right else -0.5
    if number % 4 == 1:
        text = [*record["completion"], "<end>"]
        record["token_values"] = {
            "text": text,
            "logprob": [-0.5] * len(text),
            "trainer_logprob": [-0.5 - 0.01 * place for place in range(len(text))],
            "entropy": [0.7] * len(text),
            "advantage": [record["advantage"]] * len(text),
        }
    return record
