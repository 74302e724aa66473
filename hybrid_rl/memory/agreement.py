"""Agreement between ranks on what moves in memory, and on how each move ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.errors import MemoryRefusedError, MemoryStateError, PeerFailedError

Facts = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Failure:
    """What is wrong on a rank. is_final: its memory cannot be used any more."""

    text: str
    is_final: bool


class PeerRefusedError(MemoryRefusedError, PeerFailedError):
    """A transition that was undone because another rank could not do its part."""


class PeerBrokenError(MemoryStateError, PeerFailedError):
    """Memory that cannot be used any more because that of another rank cannot."""


class DisagreementError(MemoryRefusedError):
    """Ranks that are not at the same point, or not in the same state."""


class Agreement:
    """Ranks that tell each other. gather: returns the objects of all ranks, in rank order; None = one rank."""

    def __init__(self, gather: Callable[[Any], list[Any]] | None) -> None:
        self._gather = gather

    @property
    def has_peers(self) -> bool:
        """Whether there may be other ranks."""
        return self._gather is not None

    def on(self, facts: Facts, failure: Failure | None) -> dict[int, Failure]:
        """Return the failures by rank (with one rank its own, as rank 0) if the ranks have equal facts.

        A rank with a failure takes part as well, because the others wait for it. Raises DisagreementError, on all
        ranks, if facts differ and no rank has a failure, which would be the cause.
        """
        if self._gather is None:
            return {0: failure} if failure else {}
        answers: list[tuple[Failure | None, Facts]] = self._gather((failure, facts))
        failures = {rank: theirs for rank, (theirs, _) in enumerate(answers) if theirs}
        if not failures:
            for fact in {name: None for _, theirs in answers for name in theirs}:
                values = {
                    rank: str(list(theirs[fact])) if fact in theirs else "nothing yet"
                    for rank, (_, theirs) in enumerate(answers)
                }
                if len(set(values.values())) > 1:
                    raise DisagreementError(f"the ranks differ in what is {fact}: {_by_text(values)}")
        return failures


def told(failures: Mapping[int, Failure]) -> str:
    """Return all failures with their ranks."""
    return _by_text({rank: failure.text for rank, failure in failures.items()})


def _by_text(texts: Mapping[int, str]) -> str:
    return "; ".join(f"{_ranks_with(texts, text)}: {text}" for text in dict.fromkeys(texts.values()))


def _ranks_with(texts: Mapping[int, str], text: str) -> str:
    ranks = [rank for rank, other in texts.items() if other == text]
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
