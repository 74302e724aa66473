"""Held groups in the folder of a checkpoint: a file of JSON for each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.data.prompts import PromptRow, shorten
from hybrid_rl.errors import CheckpointError, ConfigError, DataError
from hybrid_rl.rollout.held_json import check, plain, read
from hybrid_rl.rollout.hold_rule import AnyGroup, Group

HELD_FILE = "held-"  # begins the name of a rank's file in a checkpoint


def check_tokens(token_ids: Sequence[int], key: str, *beside: Sequence[float]) -> None:
    """Check the ids of tokens in a checkpoint. beside: their versions and logprobs. Raises CheckpointError."""
    for name, numbers in ((key, token_ids), (f"a version of {key}", beside[0] if beside else ())):
        check(min(numbers, default=0) >= 0, name, min(numbers, default=0), "0 or above")
    for values in beside:
        check(len(values) == len(token_ids), key, token_ids, f"as long as what belongs to it, {shorten(values)}")


def check_row(row: PromptRow) -> None:
    """Check that a row can be held: checkpoints keep it as JSON. Raises DataError for one that JSON would change."""
    if (name := next((name for name, value in row.columns.items() if not _is_plain(value)), None)) is not None:
        raise DataError(
            f"row {row.index}: the column {name!r} has the value {shorten(row.columns[name])}, which a checkpoint "
            "cannot keep with a group that is held: rollout.partial and rollout.async_level need columns of text, "
            "numbers, booleans, None, lists, and dicts with keys of text; convert it, or drop the column"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def held_text(groups: Sequence[Group]) -> str:
    """Return the groups that a rank holds as JSON. Raises CheckpointError for a row of a dataset that it cannot
    hold."""
    try:
        return json.dumps([plain(group) for group in groups])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a held group cannot be saved: {error}; leave columns that are no text, numbers, lists or dicts of these "
            "out of the dataset"
        ) from error


def write_held(folder: Path, rank: int, text: str) -> None:
    """Write what `held_text` has returned for a rank into the folder of a checkpoint."""
    (folder / f"{HELD_FILE}{rank:04d}.json").write_text(text, encoding="utf-8")


def save_held(folder: Path, rank: int, groups: Sequence[Group]) -> None:
    """Write the groups that a rank holds into the folder of a checkpoint. Raises CheckpointError as `held_text`."""
    write_held(folder, rank, held_text(groups))


def load_held(folder: Path, rank: int, num_ranks: int, kind: type[AnyGroup]) -> list[AnyGroup]:
    """Read this rank's share of the groups that were held when a checkpoint was written: its own ones, or if there were
    more or fewer ranks, all groups dealt out in order. kind: of this run's groups. Raises ConfigError for the other
    one, CheckpointError for a file that is damaged, with the place and key of what is, or holds a group twice."""
    of_ranks, known = [], set[int]()
    for path in sorted(folder.glob(f"{HELD_FILE}*.json")):
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; resume from another checkpoint") from error
        _check_kind(written, has_agents=kind.has_agents)
        try:
            groups = read(list[Any], written, "the file")
            of_ranks.append([_read_group(kind, fields, place) for place, fields in enumerate(groups)])
            for group in of_ranks[-1]:
                if group.group in known:
                    raise CheckpointError(f"group {group.group} is there twice, here or in a file before")
                known.add(group.group)
        except (ValueError, OverflowError, CheckpointError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; resume from another checkpoint") from error
    if len(of_ranks) == num_ranks:
        return of_ranks[rank]
    return sorted((group for groups in of_ranks for group in groups), key=lambda group: group.group)[rank::num_ranks]


def _check_kind(groups: Any, *, has_agents: bool) -> None:
    """Raise ConfigError for groups of agents in a run without any, and for others in a run with agents."""
    others = {"params", "seeds"} if has_agents else {"place", "call"}  # keys of the other kind
    if isinstance(groups, list) and any(isinstance(group, dict) and others <= group.keys() for group in groups):
        made, now = ("without", "with") if has_agents else ("with", "without")
        raise ConfigError(
            f"the checkpoint holds groups begun {made} tools=, environment_factory=, rollout_func= or agent=; "
            f"this run is one {now} them: pass the same arguments as then, or start a new run from these weights"
        )


def _read_group(kind: type[AnyGroup], fields: Any, place: int) -> AnyGroup:
    try:
        return kind.of_json(fields)
    except CheckpointError as error:
        raise CheckpointError(f"group {place}: {error}") from error
