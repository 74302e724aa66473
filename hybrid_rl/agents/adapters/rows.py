"""Rollouts of rows, each by itself: one that fails ends its own trajectory only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.floor import RolloutClient
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.errors import HybridRLError

RunRow = Callable[[Mapping[str, Any], Trajectory], Awaitable[None]]


async def run_rows(rows: Sequence[dict[str, Any]], client: RolloutClient, run: RunRow) -> list[Trajectory]:
    """Run all rows at once. A limit ends a trajectory with its reason, an exception with "error"; errors of this
    library, which are mistakes in how it is used, are raised."""

    async def one(row: dict[str, Any]) -> Trajectory:
        trajectory = client.trajectory(row)
        try:
            await run(row, trajectory)
        except TrajectoryEndedError as ended:
            trajectory.end(ended.reason)
        except HybridRLError:
            raise
        except Exception as error:
            trajectory.end("error", f"{type(error).__name__}: {error}")
        return trajectory

    return list(await asyncio.gather(*map(one, rows)))
