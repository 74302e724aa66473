"""Likely causes of rewards that are all alike, from what a run knows of itself and from its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_rl.agents.parsing import MARKERS
from hybrid_rl.rewards.completions import TAIL_TOKENS, opening_of
from hybrid_rl.rewards.marks import unwrap_partial
from hybrid_rl.rewards.shaping import TAGS

if TYPE_CHECKING:
    from hybrid_rl.run.prepare import Run

LIBRARY = __name__.partition(".")[0]
NO_CALLS = (
    "No answer called a tool (tools/call_frequency is 0): say in the prompt what the tools are for, or teach the "
    "policy the form of calls first."
)


@dataclass(frozen=True)
class Scoring:
    """Who scores what in a run.

    own: names of reward functions that are the user's own, and get completions as they are. has_functions: False if
    agents and environments give all rewards. is_chat: whether completions are lists of messages. has_tools: whether the
    policy may call tools. limit: max_completion_length. opening: what the prompt opens of a completion. hidden: tags
    that are special tokens, which the text of completions leaves out.
    """

    own: frozenset[str] = frozenset()
    has_functions: bool = True
    is_chat: bool = False
    has_tools: bool = False
    limit: int = 0
    opening: str = ""
    hidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run) -> Scoring:
        """Find out for a run."""
        entries, tokenizer, first = run.rewards.entries, run.choice.tokenizer, run.data.first
        functions = {entries.names[place]: function.function for place, function in entries.functions.items()}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        # Answers to messages keep those that structure them.
        kept = MARKERS if run.agents is not None else ()
        tail = tokenizer.decode(list(first.prompt_ids[-TAIL_TOKENS:]), skip_special_tokens=True)
        return cls(
            own=frozenset(name for name, function in functions.items() if _is_own(function)),
            has_functions=len(entries.given) < len(entries.names),
            is_chat=run.is_chat,
            has_tools=run.agents is not None and run.agents.has_tools,
            limit=run.config.rollout.max_completion_length,
            opening=opening_of(first.prompt, str(tail)) if run.agents is None else "",
            hidden=tuple(tag for tag in TAGS if tag in special and tag not in kept),
        )

    def advice(self, metrics: Mapping[str, float], names: frozenset[str] | None = None) -> str:
        """Say what to look at if rewards are alike, the likely causes first. names: of the functions that gave them;
        None = all."""
        return " ".join([*self._causes(metrics), self._check(self.own if names is None else self.own & names)])

    def _causes(self, metrics: Mapping[str, float]) -> Iterator[str]:
        if metrics.get("completions/clipped_ratio") == 1.0:
            more = "; of agents also max_tool_calling_iterations and trajectory_timeout_seconds" * self.has_tools
            yield (
                "All completions were cut off by a limit (completions/clipped_ratio is 1), most likely before their "
                f"answer: raise it (max_completion_length={self.limit}{more})."
            )
        if self.has_tools and metrics.get("tools/call_frequency") == 0.0:
            yield NO_CALLS
        if self.hidden and self.has_functions:
            yield (
                f"{' and '.join(self.hidden)} are special tokens of this tokenizer, which the text of a completion "
                "leaves out, so that no function finds them there: look for their ids in completion_ids."
            )

    def _check(self, own: frozenset[str]) -> str:
        if not self.has_functions:
            return (
                "Check the trajectories (samples.jsonl) and what their agent or environment gives as reward "
                "(add_reward(), get_reward())"
            )
        if not own:
            return "Check whether the completions (samples.jsonl) have the form that the reward looks for"
        hints = []
        if self.is_chat:
            hints.append(
                "A function of your own gets chat completions as lists of messages, [{'role': 'assistant', 'content': "
                '...}], and finds nothing in them if it takes them for texts: use completion[-1]["content"]'
            )
        if self.opening:
            hints.append(
                f"The prompt opens the completion with {self.opening!r}, which is not in its text: a function of your "
                "own finds it in completion_openings"
            )
        return ". ".join(["Check the completions (samples.jsonl) and the reward functions", *hints])


def _is_own(function: Any) -> bool:
    inner = unwrap_partial(function)
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return str(module).partition(".")[0] != LIBRARY
