"""The results of training steps and evaluations, as they show themselves in a notebook or a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from hybrid_rl.algos import Needs
from hybrid_rl.batch import AnyBatch
from hybrid_rl.logging.meanings import meaning_of
from hybrid_rl.metrics.metric_sums import number
from hybrid_rl.process.hooks import extra
from hybrid_rl.rollout.demonstrations import DEMONSTRATION
from hybrid_rl.run.prepare import Run

# What is told of many metrics if there is room for a line.
HEADLINES = {
    "reward": "reward",
    "eval/reward": "eval reward",
    "eval/accuracy": "eval accuracy",
    "completions/mean_length": "length",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "step_time": "seconds",
}
MAIN = "main"  # metrics without a prefix


class Metrics(dict[str, float]):
    """Metrics by name. It is a dict that shows itself in a line, as a table in a notebook, and in full as `text()`."""

    def __repr__(self) -> str:
        if not self:
            return "Metrics()"
        return f"Metrics({self.headline()}; {len(self)} in all: text() or dict(...) shows them)"

    @property
    def metrics(self) -> Metrics:
        """Themselves: what transformers' `train()` returns has its metrics there."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        advice = extra("foreign_table")("trainer")["results"].get(name)
        raise AttributeError(f"Metrics has no attribute {name!r}" + (f": {advice}" if advice else ""))

    def headline(self) -> str:
        """Return the most important ones in a line."""
        parts = [f"{title} {number(self[name])}" for name, title in HEADLINES.items() if name in self]
        return ", ".join(parts or [f"{name} {number(value)}" for name, value in list(self.items())[:4]])

    def groups(self) -> dict[str, dict[str, float]]:
        """Return the metrics by the prefix of their names; those without one first, as `main`."""
        groups: dict[str, dict[str, float]] = {MAIN: {}}
        for name, value in sorted(self.items()):
            prefix, slash, _ = name.partition("/")
            groups.setdefault(prefix if slash else MAIN, {})[name] = value
        return {prefix: metrics for prefix, metrics in groups.items() if metrics}

    def text(self) -> str:
        """Return all metrics as lines of text, grouped by prefix, with what they mean."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        width = max(map(len, self), default=0)
        for prefix, metrics in self.groups().items():
            yield f"{prefix}"
            for name, value in metrics.items():
                yield f"  {name:{width}}  {number(value):>9}  {meaning_of(name)}".rstrip()

    def _repr_html_(self) -> str:
        return extra("metrics_html")(self)


class StepResult(NamedTuple):
    """The result of one training step: its batch (a `BatchRef` with several ranks; `samples()`, `to_pandas()` and
    `load()` work on both) and its metrics."""

    batch: AnyBatch
    metrics: Metrics

    def __getitem__(self, place: Any) -> Any:
        """Index as in any tuple; the error for a name says where to find it."""
        if isinstance(place, str):
            raise TypeError(f"a step returns a batch and metrics: {place!r} is in .metrics[...] or in .batch[...]")
        return tuple.__getitem__(self, place)

    def __repr__(self) -> str:
        lines = (self.metrics.headline(), f".batch    {self.batch._described()}", f".metrics  {len(self.metrics)}")
        return "StepResult\n  " + "\n  ".join(lines)

    def _repr_html_(self) -> str:
        return extra("step_html")(self)


def readable(batch: AnyBatch, run: Run) -> AnyBatch:
    """Return the samples with what people need to read them: tokenizer and names of reward functions."""
    imitates = Needs.DEMONSTRATIONS in run.config.advantage.needs
    return batch.with_reader(run.choice.tokenizer, [DEMONSTRATION] if imitates else run.rewards.entries.names)
