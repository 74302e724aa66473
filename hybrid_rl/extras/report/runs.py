"""A run as a page shows it, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hybrid_rl.errors import ConfigError, counted
from hybrid_rl.extras.report import sample_choice, step_phases
from hybrid_rl.extras.report.run_files import Line, is_number, mapping, records
from hybrid_rl.extras.report.series import MAX_POINTS, curves, rounded

SETS = {"train": "samples*.jsonl", "eval": "eval-samples*.jsonl"}


class RunData(NamedTuple):
    """A run: `shown` goes into the page as it is; `lines` are the samples that were found, by SETS, to choose from."""

    shown: dict[str, Any]
    lines: dict[str, list[Line]]


def check(folder: Path) -> None:
    """Raise ConfigError if a path is not a run folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give run folders, such as runs/grpo-20250131-120000")
    if not any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
        hint = f"; runs in it: {', '.join(inside[:5])}" if inside else ""
        raise ConfigError(f"{folder} is not a run folder: it has neither config.yaml nor metrics.jsonl{hint}")


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return short names of runs that tell them apart."""
    paths = [folder.resolve() for folder in folders]
    depth = 1
    while depth < 8 and len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(part for part in path.parts[-depth:] if part != "/") for path in paths]


def load(folder: Path, name: str, max_points: int = MAX_POINTS) -> RunData:
    """Read a run. What cannot be read is left out, and said in `notes`. max_points: of a curve."""
    notes: list[str] = []
    metrics, num_broken = records(folder / "metrics.jsonl")
    _note_broken(notes, "metrics.jsonl", num_broken)
    timed, num_broken = records(folder / "timeline.jsonl")
    timeline = {record["step"]: record for record in timed if step_phases.is_timeline(record)}
    _note_broken(notes, "timeline.jsonl", num_broken + len(timed) - len(timeline))
    lines: dict[str, list[Line]] = {}
    for kind, pattern in SETS.items():
        lines[kind], num_broken = sample_choice.find(folder, pattern)
        _note_broken(notes, pattern, num_broken)
    if not metrics:
        notes.append("no training step is recorded yet")
    if len(metrics) > max_points:
        notes.append(f"{len(metrics):,} steps; curves have at most {max_points:,} points, means of neighbouring steps")
    if metrics and not timeline:
        notes.append("no timeline.jsonl: the seconds of phases come from the metrics, which know of fewer phases")
    config, environment = config_keys(folder / "config.yaml"), mapping(folder / "environment.json")
    if config is None:
        notes.append(f"config.yaml {'cannot be read' if (folder / 'config.yaml').exists() else 'is missing'}")
        config = {}
    shown = {
        "name": name,
        "folder": str(folder),
        "curves": curves(metrics, max_points),
        "clock": _clock(metrics, timeline),
        "phases": step_phases.stacked(metrics, timeline),
        "strips": step_phases.strips(timeline),
        "memory": _memory(mapping(folder / "memory.json")),
        "config": config,
        "environment": environment,
        "notes": notes,
    }
    shown["summary"] = summary(metrics, config, environment)
    return RunData(shown, lines)


def _note_broken(notes: list[str], name: str, number: int) -> None:
    if number:
        notes.append(f"{name}: {counted(number, 'line')} left out, because they are cut short or are not records")


def config_keys(path: Path) -> dict[str, Any] | None:
    """Return the keys of a configuration by path; None if it cannot be read."""
    try:
        config = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, ValueError):
        return None
    return flat(config) if isinstance(config, Mapping) else None


def flat(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested mapping by path, as JSON can hold them."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            is_plain = value is None or isinstance(value, str | bool | int) or is_number(value)
            leaves[f"{prefix}{name}"] = sample_choice.cut(value) if is_plain else sample_choice.cut(str(value))
    return leaves


def _clock(metrics: Sequence[Mapping[str, Any]], timeline: Mapping[int, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return hours of training and tokens so far at the end of every step: the axes that curves may have. Hours between
    two sessions of a resumed run do not count, nor does what a notebook did between steps."""
    axes: dict[str, list[float]] = {"steps": [], "hours": [], "tokens": []}
    seconds = 0.0
    for record in metrics:
        step = record["step"]
        spent = timeline[step]["seconds"] if step in timeline else record.get("timing/step", 0.0)
        seconds += spent if is_number(spent) else 0.0
        tokens = record.get("num_tokens", 0.0)
        axes["steps"].append(step)
        axes["hours"].append(rounded(seconds / 3600))
        axes["tokens"].append(float(tokens) if is_number(tokens) else 0.0)
    every = -(-len(metrics) // (2 * MAX_POINTS)) or 1
    kept = sorted({*range(0, len(metrics), every), *range(len(metrics) - 1, len(metrics))}) if metrics else []
    return {name: [values[index] for index in kept] for name, values in axes.items()}


def _memory(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory.json if it is whole, else {}."""
    moments, bytes_of = record.get("moments"), record.get("bytes")
    if not isinstance(moments, list) or not isinstance(bytes_of, dict) or not isinstance(record.get("phases"), list):
        return {}
    is_whole = all(isinstance(row, list) and len(row) == len(moments) for row in bytes_of.values())
    return dict(record) if is_whole and len(moments) <= 20_000 else {}


def summary(
    metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the head of the page says of a run; None for what is not known."""

    def known(name: str) -> list[float]:
        return [float(record[name]) for record in metrics if is_number(record.get(name))]

    model = environment.get("model")
    model = model if isinstance(model, dict) else {}
    size = model.get("num_parameters")
    shown = config.get("model.path") or model.get("class")
    adapter, trained = "", model.get("num_trained_parameters")
    if trained is not None and size and is_number(trained) and is_number(size):
        adapter = f", adapter r={model.get('adapter_rank')}, {100 * trained / size:.2g} % trained"
    steps = [record["step"] for record in metrics if record["step"] > 0]
    sets = sorted({name for record in metrics for name in record if fnmatchcase(name, "eval/*/accuracy")})
    first_and_last = {name: (values[0], values[-1]) for name in (*HEADLINES, *sets) if (values := known(name))}
    best = {name: max(known(name)) for name in first_and_last if name.startswith("eval/")}
    throughput = sorted(known("perf/tokens_per_second"))
    return {
        "algorithm": config.get("algorithm.name"),
        "model": None if shown is None else f"{shown}{f' ({size / 1e6:.3g}M)' if is_number(size) else ''}{adapter}",
        "ranks": config.get("num_ranks"),
        "engine": config.get("rollout.engine"),
        "steps": steps[-1] if steps else 0,
        "max_steps": config.get("max_steps"),
        "seconds": sum(known("timing/step")) + sum(known("timing/evaluate")),
        "tokens_per_second": throughput[len(throughput) // 2] if throughput else None,
        "first_and_last": first_and_last,
        "best": best,
    }


HEADLINES = ("reward", "eval/reward", "eval/accuracy")
