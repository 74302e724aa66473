"""The results of a training step as HTML."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_rl.extras.views.html import cell, code, escaped, folded, page_part, table
from hybrid_rl.logging.meanings import meaning_of
from hybrid_rl.metrics.metric_sums import number
from hybrid_rl.run.step_results import MAIN, Metrics, StepResult


def metrics_html(metrics: Metrics) -> str:
    """Return metrics for a notebook, in tables by the prefix of their names."""
    return page_part(*_tables(metrics))


def step_html(result: StepResult) -> str:
    """Return a step for a notebook: its most important metrics, samples, and all metrics, folded."""
    summary = f"all {len(result.metrics)} metrics"
    return page_part(
        f"<b>{escaped(result.metrics.headline())}</b>",
        result.batch._repr_html_(),
        folded(summary, result.metrics._repr_html_()),
    )


def _tables(metrics: Metrics) -> Iterator[str]:
    for prefix, group in metrics.groups().items():
        rows = (
            cell(code(name))
            + cell(f'<span title="{value!r}">{number(value)}</span>', is_number=True)
            + cell(escaped(meaning_of(name)))
            for name, value in group.items()
        )
        content = table(("metric", "value", "meaning"), rows)
        yield folded(f"{prefix} ({len(group)})", content, is_open=prefix == MAIN)
