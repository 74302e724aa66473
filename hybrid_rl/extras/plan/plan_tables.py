"""The tables of a run's plan: the cycle, the memory of a rank, choices, the handoff, and shares of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hybrid_rl.extras.plan.handoff_plan import HandoffPlan
from hybrid_rl.extras.plan.step_time import StepTime
from hybrid_rl.memory.cycle import (
    GIVEN_UP,
    NEEDED,
    ON_HOST,
    RESIDENTS,
    STAYS,
    Cycle,
    Phase,
    states_explained,
)
from hybrid_rl.planning.ledger import MemoryPlan, PhaseMemory, Share
from hybrid_rl.planning.remedies import NO_REMEDY
from hybrid_rl.planning.size_text import seconds_text, size_text, unit_of

UNKNOWN = ""
STYLES = {NEEDED: "bold green", STAYS: "yellow", ON_HOST: "cyan", GIVEN_UP: "dim", UNKNOWN: ""}
ANY_WIDTH = 10_000
TIGHT_SHARE = 0.02  # of the device: if less is left, what a plan cannot count may not fit
GPU_LINKS = {"local": "its own GPU", "host": "GPUs of its host (NVLink or PCIe)", "remote": "other hosts (network)"}
HOST_LINKS = {"local": "its own memory", "host": "ranks of its host", "remote": "other hosts (network)"}

Column = TypeVar("Column")


class InParts(Generic[Column]):
    """A table that is continued below where the console is too narrow for all of its columns.

    make: makes the table of some of the columns.
    """

    def __init__(self, make: Callable[[Sequence[Column]], Table], columns: Sequence[Column]) -> None:
        self._make, self._columns = make, columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield tables of as many columns as fit, at least one."""
        left = list(self._columns)
        while left:
            count = len(left)
            while count > 1 and self._width(console, options, left[:count]) > options.max_width:
                count -= 1
            yield self._make(left[:count])
            left = left[count:]

    def _width(self, console: Console, options: ConsoleOptions, columns: Sequence[Column]) -> int:
        return console.measure(self._make(columns), options=options.update_width(ANY_WIDTH)).maximum


def tables(
    title: str,
    cycle: Cycle,
    memory: MemoryPlan,
    remedies: tuple[str, ...],
    handoff: HandoffPlan,
    time: StepTime | None,
    time_missing: str,
    workload: str,
) -> RenderableType:
    """Return all parts of a plan, in the order in which they are read."""
    parts: list[RenderableType] = [Text(title, style="bold"), *map(Text, _given(workload, memory)), *_verdicts(memory)]
    if remedies:
        parts += [*_section("What would make it fit"), *_lines(remedies)]
    elif not memory.fits:
        parts += [Text(NO_REMEDY)]
    parts += [*_section("Cycle: what each phase of a step needs, and where the rest is"), phase_table(cycle, memory)]
    parts += [Text(_legend(cycle, memory), style="dim")]
    parts += [*_section(f"Memory of a rank, {_units(memory)}"), memory_table(memory), *_lines(memory.notes)]
    parts += _peak(memory)
    if memory.generating is not None:
        generating = memory.generating
        title = f"Memory of one of the {generating.num_ranks} ranks that only generate, {_units(generating)}"
        if generating.num_ranks == 1:
            title = f"Memory of the rank that only generates, {_units(generating)}"
        parts += [*_section(title), memory_table(generating), *_lines(generating.notes), *_peak(generating)]
    host = memory.host_peak
    if host.host_bytes:
        parts += [*_section(f"Host memory of a rank at its fullest, {host.name}"), arithmetic(host.host)]
    chosen = list(_chosen(memory))
    if chosen:
        parts += [*_section("Chosen, because no value was given"), *chosen]
    parts += [*_section("Handoff: bytes that the new weights take to one rank"), *_handoff(handoff)]
    parts += _section("Shares of step time: an estimate from assumed rates, not a measurement")
    parts += [Text(time_missing)] if time is None else _time(time)
    return Group(*parts)


def phase_table(cycle: Cycle, memory: MemoryPlan) -> RenderableType:
    """Return the phases of a step with the state of every resident."""

    def part(residents: Sequence[str]) -> Table:
        table = _table("phase", *(name.replace("_", "\n", 1) for name in residents), right=False)
        for phase in cycle:
            if phase.is_taken:
                states = [_state(name, phase, memory) for name in residents]
                table.add_row(phase.name, *(Text(state, style=STYLES[state]) for state in states))
        return table

    return InParts(part, _residents(cycle))


def memory_table(memory: MemoryPlan) -> RenderableType:
    """Return residents by phases, with totals, what is left, and a mark at the peak."""
    unit = unit_of(phase.device_bytes for phase in memory.phases)
    peak, budget = memory.peak, memory.budget.device_bytes
    names = [name for name in sorted(memory.residents, key=_rank) if any(p.bytes_of(name) for p in memory.phases)]

    def part(phases: Sequence[PhaseMemory]) -> Table:
        table = _table("", *map(_heading, phases))
        for name in names:
            table.add_row(name, *(unit.number(phase.bytes_of(name)) for phase in phases))
        table.add_row("total", *(unit.number(phase.device_bytes) for phase in phases), style="bold")
        if budget is not None:
            left = [budget - phase.device_bytes for phase in phases]
            styled = (Text(unit.number(size), style="red" if size < 0 else "green") for size in left)
            table.add_row(f"left of {unit.number(budget)}", *styled)
        if peak in phases:
            table.add_row("", *("^ peak" if phase is peak else "" for phase in phases), style="bold magenta")
        if memory.host_peak.host_bytes:
            table.add_row("on the host", *(unit.number(phase.host_bytes) for phase in phases), style="cyan")
        return table

    return InParts(part, memory.phases)


def arithmetic(shares: tuple[Share, ...]) -> Table:
    """Return the lines of a sum, largest first, each with its formula."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for share in sorted(shares, key=lambda share: -share.num_bytes):
        table.add_row(share.resident, size_text(share.num_bytes), Text(f"= {share.formula}" if share.formula else ""))
    table.add_row("total", size_text(sum(share.num_bytes for share in shares)), "", style="bold")
    return table


def _section(title: str) -> list[RenderableType]:
    return [Text(""), Text(title, style="bold underline")]


def _lines(lines: tuple[str, ...]) -> list[RenderableType]:
    return [Padding(Text(f"- {line}"), (0, 0, 0, 1)) for line in lines]


def _table(*titles: str, right: bool = True) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        justify = "right" if right and number else "left"
        table.add_column(escape(title), justify=justify, no_wrap=number > 0, vertical="bottom")  # type: ignore[arg-type]
    return table


def _heading(phase: PhaseMemory) -> str:
    """Return the name of a phase on lines of their own words, so that columns stay narrow."""
    words = [*phase.phase.split("_"), *phase.moment.split()]
    return "\n".join(words)


def _units(memory: MemoryPlan) -> str:
    unit = unit_of(phase.device_bytes for phase in memory.phases)
    on = "its GPU" if memory.device == "cuda" else "the machine"
    return f"on {on}, in {unit.name} of {unit.num_bytes:,} bytes"


def _residents(cycle: Cycle) -> list[str]:
    """Return the tags that some phase needs."""
    return [name for name in RESIDENTS if any(name in phase.tags for phase in cycle)]


def _state(name: str, phase: Phase, memory: MemoryPlan) -> str:
    """Return where a resident is in a phase; nothing if that phase was not counted."""
    if name in phase.tags:
        return NEEDED
    phases = [planned for planned in memory.phases if planned.phase == phase.name]
    if any(planned.bytes_of(name) for planned in phases):
        return STAYS
    # What sleeps waits in the arena, under that name.
    if name in memory.choices.offload or any(planned.host_bytes_of(name) for planned in phases):
        return ON_HOST
    return GIVEN_UP if phases else UNKNOWN


def _rank(name: str) -> int:
    """Return the place of a resident in a table: those of the cycle first, in its order."""
    return RESIDENTS.index(name) if name in RESIDENTS else len(RESIDENTS)


def _legend(cycle: Cycle, memory: MemoryPlan) -> str:
    residents = _residents(cycle)
    shown = {_state(name, phase, memory) for phase in cycle if phase.is_taken for name in residents}
    return states_explained(shown)


def _given(workload: str, memory: MemoryPlan) -> Iterator[str]:
    """Yield what the plan is for, in a line or two: the work, and the memory that there is."""
    budget, unit = memory.budget, "a GPU" if memory.device == "cuda" else "a rank"
    if workload:
        yield workload
    sizes = ((unit, budget.device_bytes, budget.device), ("a host", budget.host_bytes, budget.host))
    known = [f"{size_text(size)} of {of}" + (f" ({source})" if source else "") for of, size, source in sizes if size]
    if known:
        yield f"memory: {', '.join(known)}"


def _peak(memory: MemoryPlan) -> list[RenderableType]:
    return [*_section(f"The peak, {memory.peak.name}, line by line"), arithmetic(memory.peak.device)]


def _verdicts(memory: MemoryPlan) -> Iterator[Text]:
    """Yield whether the run fits; of ranks that train and ranks that generate, for each."""
    if memory.generating is None:
        yield _verdict(memory)
        return
    for words, plan in (("ranks that train: ", memory), ("ranks that only generate: ", memory.generating)):
        verdict = _verdict(plan)
        yield Text.assemble((words, verdict.style), verdict)


def _verdict(memory: MemoryPlan) -> Text:
    """Say whether the run fits, with the numbers that decide it."""
    peak, budget = memory.peak, memory.budget
    if budget.device_bytes is None:
        peak_text = f"peak {size_text(peak.device_bytes)} per rank, in {peak.name}"
        return Text(f"{peak_text}; the memory of the machine is not known")
    of = f"of {size_text(budget.device_bytes)}"
    over = peak.device_bytes - budget.device_bytes
    if over > 0:
        needs = f"needs {size_text(peak.device_bytes)} {of} in {peak.name}: {size_text(over)} too much"
        return Text(f"does not fit: a rank {needs}", style="bold red")
    ranks, on_host = memory.ranks_of_host, memory.bytes_of_host
    if budget.host_bytes is not None and on_host > budget.host_bytes:
        needs = f"{size_text(on_host)} for its {ranks} rank{'s' if ranks > 1 else ''}, in {memory.host_peak.name}"
        there = size_text(budget.host_bytes)
        return Text(f"does not fit: a host needs {needs}; it has {there}", style="bold red")
    is_tight = -over < TIGHT_SHARE * budget.device_bytes
    fits = "fits barely" if is_tight else "fits"
    text = f"{fits}: peak {size_text(peak.device_bytes)} {of} in {peak.name}, {size_text(-over)} left"
    if on_host:
        there = "" if budget.host_bytes is None else f" of {size_text(budget.host_bytes)}"
        text += f"; {size_text(on_host)}{there} on the host, for {ranks} rank{'s' if ranks > 1 else ''}"
    return Text(text, style="bold yellow" if is_tight else "bold green")


def _chosen(memory: MemoryPlan) -> Iterator[RenderableType]:
    """Yield a line for each value that was `auto`."""
    choices = memory.choices
    cache = choices.kv_cache_memory_bytes
    leaves = {
        "offload": f"[{', '.join(choices.offload)}]",
        "on_host": "[optimizer]",
        "kv_cache_memory_bytes": str(cache) + ("" if cache is None else f" ({size_text(cache)})"),
        "tokens_per_micro_batch": str(choices.tokens_per_micro_batch),
    }
    for path, reason in choices.reasons.items():
        leaf = path.rpartition(".")[2]
        value = f"={leaves[leaf]}" if leaf in leaves else ""
        yield Padding(Text(f"- {path}{value}: {reason}"), (0, 0, 0, 1))


def _handoff(handoff: HandoffPlan) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(handoff.words)]
    if handoff.missing:
        return [*parts, Text(f"bytes by link: not known, because {handoff.missing}")]
    if not handoff.links:
        return parts
    table = _table("from", "read", "written")
    names = GPU_LINKS if handoff.is_on_gpus else HOST_LINKS
    for name, part in handoff.links.items():
        table.add_row(names[name], size_text(part.read_bytes), size_text(part.written_bytes))
    table.add_row("least possible", size_text(handoff.minimum.read_bytes), size_text(handoff.minimum.written_bytes))
    parts.append(table)
    if handoff.gathered_bytes:
        parts.append(Text(f"gathering full tensors would bring {size_text(handoff.gathered_bytes)} from other ranks"))
    if handoff.staging_bytes:
        parts.append(Text(f"extra peak for buckets of messages: {size_text(handoff.staging_bytes)}"))
    return [*parts, Text(handoff.source, style="dim")]


def _time(time: StepTime) -> list[RenderableType]:
    table = _table("part", "share", "seconds")
    for part, seconds in time.seconds.items():
        known = ("", "not known") if seconds is None else (f"{time.share(part):.0%}", f"~{seconds_text(seconds)}")
        table.add_row(part, *known)
    rest = " and what is not known" if None in time.seconds.values() else ""
    table.add_row("step", "", f"~{seconds_text(time.total)}{rest}", style="bold")
    return [table, *_lines(time.assumptions)]
