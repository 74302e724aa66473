"""Keys and values of other libraries, with what stands for each here: data for errors and for the tables of the
documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hybrid_rl.config.habits.others import OTHERS
from hybrid_rl.config.habits.records import Habit, Kind
from hybrid_rl.config.habits.trl import TRANSFORMERS, TRL
from hybrid_rl.config.habits.values import OFF_ANYWAY, VALUE_HABITS
from hybrid_rl.config.habits.verl import VERL

__all__ = ["HABITS", "NAMES", "OFF_ANYWAY", "RECORDS", "SECTIONS", "VALUE_HABITS", "Habit", "Kind", "habit_of"]

RECORDS: tuple[Habit, ...] = (*TRL, *TRANSFORMERS, *VERL, *OTHERS)
NAMES = frozenset(habit.name for habit in RECORDS)


# Last words of many keys, which alone say nothing.
_PLAIN = """backend betas bias device dtype enable format horizon len lora_alpha loss_type lr_scheduler_type metric
mode name path optimizer quantization reshard_after_forward seed shuffle strategy target_modules temperature tokenizer
trust_remote_code type weight_decay"""
PLAIN_WORDS = frozenset(_PLAIN.split())


def _by_end(found: Iterable[Habit]) -> dict[str, Habit]:
    """Return records by their names and by every end of these, in which people also know them: `rollout.n`, `n`."""
    index: dict[str, Habit] = {}
    for habit in found:
        parts = habit.name.split(".")
        for start in range(len(parts)):
            if start < len(parts) - 1 or not start or parts[start] not in PLAIN_WORDS:
                index.setdefault(".".join(parts[start:]), habit)
    return index


# By name or end of a name; and the sections all of whose keys are answered alike.
HABITS: Mapping[str, Habit] = MappingProxyType(_by_end(h for h in RECORDS if h.kind != "same" and h.name[-1] != "*"))
SAME: Mapping[str, Habit] = MappingProxyType({h.name: h for h in RECORDS if h.kind == "same" and "." in h.name})
SECTIONS: Mapping[str, Habit] = MappingProxyType({h.name.removesuffix(".*"): h for h in RECORDS if h.name[-1] == "*"})


def habit_of(path: str) -> Habit | None:
    """Return the record that answers a key, given by name or path: that of the longest end of the path that is known
    elsewhere, by itself or as part of a section. None if nobody else has such a key."""
    parts = path.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if end in SAME or end in HABITS:
            return SAME.get(end) or HABITS[end]
        around = [section for section in SECTIONS if end.startswith(f"{section}.")]
        if around:
            return SECTIONS[max(around, key=len)]
    return None
