"""The plan of a run as one object: what is where in which phase, what moves, and where the time goes."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType

from hybrid_rl.extras.plan import plan_tables
from hybrid_rl.extras.plan.handoff_plan import HandoffPlan
from hybrid_rl.extras.plan.step_time import StepTime
from hybrid_rl.memory.cycle import Cycle
from hybrid_rl.planning.ledger import MemoryPlan

TEXT_WIDTH = 120
HTML = "<pre style='white-space:pre;font-family:monospace;line-height:1.25'>{code}</pre>"


@dataclass(frozen=True, repr=False)
class RunPlan:
    """The plan of a run, made from its config and the model's shapes.

    title: model, algorithm, engine and ranks in a line. workload: the samples of a step in a line. remedies: if it does
    not fit, keys that would help. time: an estimate; None if `time_missing` says why.

    It shows itself as tables: in a console of rich, as text (`print(plan)`), in a notebook; `to_json` has all numbers.
    """

    title: str
    cycle: Cycle
    memory: MemoryPlan
    remedies: tuple[str, ...]
    handoff: HandoffPlan
    time: StepTime | None = None
    time_missing: str = ""
    workload: str = ""

    @property
    def fits(self) -> bool:
        """Whether every phase fits on the device and on the host."""
        return self.memory.fits

    def __rich__(self) -> RenderableType:
        """Return the plan as tables."""
        return plan_tables.tables(**{item.name: getattr(self, item.name) for item in dataclasses.fields(self)})

    def __repr__(self) -> str:
        """Return the plan as text."""
        return self.text()

    def text(self, width: int = TEXT_WIDTH) -> str:
        """Return the plan as plain text of this width."""
        file = io.StringIO()
        # Named, so that no setting of the terminal puts escape codes into text that is kept.
        plain: Any = {"no_color": True, "force_terminal": False, "force_jupyter": False, "legacy_windows": False}
        console = Console(file=file, width=width, **plain)
        console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """Return the plan for a notebook."""
        console = Console(file=io.StringIO(), record=True, width=TEXT_WIDTH, force_jupyter=False)
        console.print(self.__rich__())
        return console.export_html(inline_styles=True, code_format=HTML)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain containers, in bytes and seconds."""
        memory = dataclasses.asdict(self.memory)
        sides = [(memory, self.memory)]
        if self.memory.generating is not None:
            sides.append((memory["generating"], self.memory.generating))
        for side, plan in sides:
            for phase, phase_memory in zip(side["phases"], plan.phases, strict=True):
                phase |= {"device_bytes": phase_memory.device_bytes, "host_bytes": phase_memory.host_bytes}
        memory |= {"peak": self.memory.peak.name, "free_bytes": self.memory.free_bytes, "fits": self.fits}
        return {
            "title": self.title,
            "workload": self.workload,
            "fits": self.fits,
            "cycle": {phase.name: sorted(phase.tags) for phase in self.cycle if phase.is_taken},
            "memory": memory,
            "remedies": list(self.remedies),
            "handoff": {**dataclasses.asdict(self.handoff), "bytes_by_link": self.handoff.bytes_by_link},
            "time": None if self.time is None else {**dataclasses.asdict(self.time), "total": self.time.total},
            "time_missing": self.time_missing,
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=list)
