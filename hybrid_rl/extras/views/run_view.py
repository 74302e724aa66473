"""A run as it shows itself: its state, and how to go on."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_rl.checkpoint.finding import checkpoints_of
from hybrid_rl.extras.views.config_view import changed_html
from hybrid_rl.extras.views.html import escaped, folded, page_part, pairs_html, sparkline
from hybrid_rl.logging.lines import binned
from hybrid_rl.logging.lines import sparkline as bars
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.tenancy import Tenancy

MAX_BARS = 40


class View:
    """A run as it shows itself in terminals and notebooks."""

    def __init__(self, crew: Crew, tenancy: Tenancy) -> None:
        self._crew, self._position, self._tenancy = crew, crew.position, tenancy

    def text(self, name: str) -> str:
        """Return a title, which begins with this name, and a few lines."""
        facts = self._facts()
        width = max(map(len, facts))
        rewards = self._rewards()
        lines = [f"  {fact:{width}}  {value}" for fact, value in facts.items()]
        if len(rewards) > 1:
            curve = bars(binned(rewards, MAX_BARS))
            lines.append(f"  {'reward':{width}}  {curve}  {rewards[0]:.3g} to {rewards[-1]:.3g}")
        return "\n".join([f"{name}: {self._title()}", *lines])

    def html(self) -> str:
        """Return the same as a part of a page, with the configuration."""
        rewards = self._rewards()
        range_text = f"{rewards[0]:.3g} to {rewards[-1]:.3g}" if rewards else ""
        return page_part(
            f"<b>{escaped(self._title())}</b>",
            f"reward {sparkline(rewards)} {range_text}" if len(rewards) > 1 else "",
            pairs_html(self._facts()),
            folded("configuration (trainer.config has all of it)", changed_html(self._crew.config)),
        )

    def _title(self) -> str:
        config, position = self._crew.config, self._position
        ranks = f", {config.num_ranks} ranks" if config.num_ranks != 1 else ""
        at = f"step {position.step} of {position.max_steps}"
        return f"{config.algorithm.name}, {at}, engine {config.rollout.engine}{ranks}"

    def _facts(self) -> dict[str, str]:
        run = self._crew.run
        adapters = "" if run.adapters is None else f"; {run.adapters}"
        model = run.choice.path or type(run.skeleton).__name__
        data = run.data.train
        prompts = f"{len(data):,} prompts" if hasattr(data, "__len__") else "a stream of prompts"
        return {
            "model": f"{model}, {run.num_parameters:,} parameters{adapters}",
            "rewards": ", ".join(run.rewards.entries.names) or "none",
            "data": f"{prompts}; {self._position.num_tokens:,} tokens so far",
            "folder": str(self._crew.folder),
            "next": "; ".join(self._advice()),
        }

    def _advice(self) -> Iterator[str]:
        left = self._position.max_steps - self._position.step
        if self._tenancy.closed:
            yield f"it is closed{self._tenancy.closed.rstrip(';')}: make a new one"
            if saved := checkpoints_of(self._crew.folder):
                yield f"Trainer(..., resume={str(saved[max(saved)])!r}) goes on from there"
        elif self._tenancy.lost is not None:
            yield "the ranks have ended: fit() makes them again, and goes on from the last checkpoint"
        elif self._crew.guard.is_torn:
            yield "an update was interrupted: make a new Trainer, with resume="
        elif left > 0:
            yield f"step() trains one step, fit() the {left} that are left"
        else:
            yield "all steps are done: fit(steps=20) trains 20 more, generate([...]) tries the model, save() keeps it"

    def _rewards(self) -> list[float]:
        """Read the rewards of all steps from the run folder."""
        try:
            records = read_jsonl(self._crew.folder / "metrics.jsonl")
        except (OSError, ValueError):
            return []
        return [record["reward"] for record in records if "reward" in record]
