"""The parts of training steps: how long each took, and when each was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.extras.report.run_files import is_number
from hybrid_rl.extras.report.series import mean, rounded, stretches

MAX_BARS = 240  # steps in the stacked picture
MAX_STRIPS = 60  # steps whose parts are shown over time
# The parts that a step's time is divided into, in the order of a step.
PARTS = (
    *("generation", "rewards", "collecting", "logprobs", "advantages", "update", "handoff"),
    *("evaluation", "samples written", "checkpoint", "pictures", "other"),
)


def parts_of(metrics: Mapping[str, Any], timeline: Mapping[str, Any] | None) -> dict[str, float]:
    """Divide the seconds of a step into PARTS; what nothing accounts for is "other".

    timeline: the record of the driver's waiting. Without it (a run of an earlier version) the metrics alone tell, which
    know of fewer parts. The wait for rollouts is divided as metrics tell of the slowest rank: generation, then what
    rewards took longer, then what it takes to collect the samples.
    """

    def seconds(name: str) -> float:
        value = metrics.get(f"timing/{name}", 0.0)
        return float(value) if is_number(value) else 0.0

    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {"generation": seconds("rollout"), "rewards": seconds("reward") + seconds("judge")}
    if timeline is None:
        parts |= {"logprobs": seconds("logprobs"), "update": seconds("update"), "evaluation": seconds("evaluate")}
        parts["handoff"] = seconds("handoff") + seconds("probe")
        total = seconds("step") + seconds("evaluate")
    else:
        waited: dict[str, float] = {}
        for name, _, length in timeline["phases"]:
            waited[name] = waited.get(name, 0.0) + length
        waiting = waited.pop("rollout", 0.0)
        known = parts["generation"] + parts["rewards"]
        if known > waiting > 0:  # the slowest rank of each part is not the same, so that their sum is too large
            for name in ("generation", "rewards"):
                parts[name] *= waiting / known
            known = waiting
        parts["collecting"] = waiting - known
        for name, length in waited.items():
            parts[name if name in parts else "other"] += length
        total = float(timeline["seconds"])
    parts["other"] += max(total - sum(parts.values()), 0.0)
    return parts


def is_timeline(record: Mapping[str, Any]) -> bool:
    """Whether a record of timeline.jsonl has what the pictures need."""

    def are_spans(spans: Any) -> bool:
        return isinstance(spans, list) and all(
            isinstance(span, list) and len(span) == 3 and is_number(span[1]) and is_number(span[2]) for span in spans
        )

    ranks = record.get("ranks")
    return (
        is_number(record.get("start"))
        and is_number(record.get("seconds"))
        and are_spans(record.get("phases"))
        and isinstance(ranks, list)
        and all(map(are_spans, ranks))
    )


def stacked(metrics: Sequence[Mapping[str, Any]], timeline: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean seconds of each part over stretches of steps: `steps`, the last of each, and `parts` by name."""
    trained = [record for record in metrics if record["step"] > 0 and is_number(record.get("timing/step"))]
    bounds = stretches(len(trained), MAX_BARS)
    all_parts = [parts_of(record, timeline.get(record["step"])) for record in trained]
    means = {name: [mean([parts[name] for parts in all_parts[a:b]]) for a, b in bounds] for name in PARTS}
    return {
        "steps": [trained[end - 1]["step"] for _, end in bounds],
        "parts": {name: list(map(rounded, values)) for name, values in means.items() if any(values)},
    }


def strips(timeline: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of some steps over time, evenly spread, the first two and the last among them: `driver` and
    `ranks`, [name, seconds after the start of the step, seconds]."""
    steps = sorted(timeline)
    if not steps:
        return []
    spread = [steps[start] for start, _ in stretches(len(steps), MAX_STRIPS - 3)]
    return [_strip(timeline, step) for step in sorted({*spread, *steps[:2], steps[-1]})]


def _strip(timeline: Mapping[int, Mapping[str, Any]], step: int) -> dict[str, Any]:
    """Return one step. Phases of ranks that ended late in it were written with the next step."""
    own = timeline[step]
    after = timeline.get(step + 1)
    ranks: list[list[list[Any]]] = []
    for rank, spans in enumerate(own["ranks"]):
        mine = [list(span) for span in spans]
        if after is not None and rank < len(after["ranks"]):
            later = after["start"] - own["start"]
            mine += [[name, start + later, length] for name, start, length in after["ranks"][rank]]
        ranks.append([[n, rounded(start), rounded(length)] for n, start, length in mine if 0 <= start < own["seconds"]])
    return {"step": step, "seconds": own["seconds"], "driver": own["phases"], "ranks": ranks}
