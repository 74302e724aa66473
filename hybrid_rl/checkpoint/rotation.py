"""Deletion of old checkpoints of a run: save_total_limit."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from hybrid_rl.checkpoint.finding import checkpoints_of
from hybrid_rl.checkpoint.manifest import is_whole

logger = logging.getLogger("hybrid_rl")


def delete_oldest(run: Path, limit: int | None, keep: Collection[Path | None]) -> list[Path]:
    """Delete the oldest checkpoints of a run folder, until `limit` are left. Returns what was deleted.

    limit: None = delete nothing. keep: paths that stay, in addition to the newest one; they count, as in transformers.
    What is not named checkpoint-<step>, and what is not whole, is neither touched nor counted: an incomplete copy never
    takes the place of a checkpoint that a run can go on from. A folder that cannot be deleted is a warning.
    """
    if limit is None:
        return []
    checkpoints = {step: path for step, path in checkpoints_of(run).items() if is_whole(path)}
    kept = {path.resolve() for path in keep if path is not None}
    extra = max(0, len(checkpoints) - limit)
    old = [path for _, path in sorted(checkpoints.items())[:-1] if path.resolve() not in kept][:extra]
    deleted = []
    for path in old:
        try:
            shutil.rmtree(path)
            deleted.append(path)
        except OSError as error:
            logger.warning("%s is more than save_total_limit=%d, but cannot be deleted: %s", path, limit, error)
    return deleted
