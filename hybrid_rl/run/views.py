"""A Trainer as it shows itself: its state, and how to go on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybrid_rl.batch.html import escaped, folded, page_part, pairs_html, sparkline
from hybrid_rl.config.views import changed_html
from hybrid_rl.logging.report import read_jsonl
from hybrid_rl.report import write_report
from hybrid_rl.run.live import Live

BARS = "▁▂▃▄▅▆▇█"
MAX_BARS = 40


class ShownTrainer(Live):
    """The base of Trainer that shows itself in terminals and notebooks."""

    def report(self, target: str | Path | None = None) -> Path:
        """Write one page of HTML about this run so far, and return its path. target: default report.html in the run
        folder."""
        return write_report(self.run_folder, target)

    def __repr__(self) -> str:
        if not self._is_made:
            return f"<{type(self).__name__} whose making failed>"
        facts = self._facts()
        width = max(map(len, facts))
        curve = bars(rewards := self._rewards())
        lines = [f"  {name:{width}}  {value}" for name, value in facts.items()]
        if curve:
            lines.append(f"  {'reward':{width}}  {curve}  {rewards[0]:.3g} to {rewards[-1]:.3g}")
        return "\n".join([f"{type(self).__name__}: {self._title()}", *lines])

    def _repr_html_(self) -> str:
        if not self._is_made:
            return f"<pre>{escaped(repr(self))}</pre>"
        rewards = self._rewards()
        told = f"{rewards[0]:.3g} to {rewards[-1]:.3g}" if rewards else ""
        return page_part(
            f"<b>{escaped(self._title())}</b>",
            f"reward {sparkline(rewards)} {told}" if len(rewards) > 1 else "",
            pairs_html(self._facts()),
            folded("configuration (trainer.config has all of it)", changed_html(self.config)),
        )

    def _title(self) -> str:
        ranks = f", {self.config.num_ranks} ranks" if self.config.num_ranks != 1 else ""
        engine = self.config.rollout.engine
        return f"{self.config.algorithm.name}, step {self.global_step} of {self.max_steps}, engine {engine}{ranks}"

    def _facts(self) -> dict[str, str]:
        run = self._run
        adapters = "" if run.adapters is None else f"; {run.adapters}"
        model = run.choice.path or type(run.skeleton).__name__
        data = run.data.train
        prompts = f"{len(data):,} prompts" if hasattr(data, "__len__") else "a stream of prompts"
        return {
            "model": f"{model}, {run.num_parameters:,} parameters{adapters}",
            "rewards": ", ".join(run.reward_names) or "none",
            "data": f"{prompts}; {self.num_tokens:,} tokens so far",
            "folder": str(self.run_folder),
            "next": "; ".join(self._advice()),
        }

    def _advice(self) -> Iterator[str]:
        left = self.max_steps - self.global_step
        if self._closed:
            yield f"it is closed{self._closed.rstrip(';')}: make a new one"
            saved = self._newest_checkpoint()
            if saved:
                yield f"Trainer(..., resume={saved!r}) goes on from there"
        elif self._lost is not None:
            yield "the ranks have ended: fit() makes them again, and goes on from the last checkpoint"
        elif self._guard.is_torn:
            yield "an update was interrupted: make a new Trainer, with resume="
        elif left > 0:
            yield f"step() trains one step, fit() the {left} that are left"
        else:
            yield "all steps are done: fit(steps=20) trains 20 more, generate([...]) tries the model, save() keeps it"

    def _newest_checkpoint(self) -> str:
        found = [path for path in self.run_folder.glob("checkpoint-*") if path.name[11:].isdigit()]
        return str(max(found, key=lambda path: int(path.name[11:]))) if found else ""

    def _rewards(self) -> list[float]:
        """Read the rewards of all steps from the run folder."""
        try:
            records = read_jsonl(self.run_folder / "metrics.jsonl")
        except (OSError, ValueError):
            return []
        return [record["reward"] for record in records if "reward" in record]


def bars(values: Sequence[float]) -> str:
    """Draw finite numbers as a line of bars of text; "" for fewer than two. Many are averaged."""
    shown = [value for value in values if math.isfinite(value)]
    if len(shown) < 2:
        return ""
    size = -(-len(shown) // MAX_BARS)
    means = [sum(part) / len(part) for part in (shown[at : at + size] for at in range(0, len(shown), size))]
    low, spread = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[min(int((value - low) / spread * len(BARS)), len(BARS) - 1)] for value in means)
