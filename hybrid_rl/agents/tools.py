"""Tools: functions that the policy may call, their schemas, and the messages that answer its calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from hybrid_rl.agents.calls import Caller, CallTimeoutError, Outcome
from hybrid_rl.agents.parsing import read_json, types_of
from hybrid_rl.agents.schemas import CALL_KEY, takes_call_key, tool_schema
from hybrid_rl.agents.tool_calling import content_of, message_of
from hybrid_rl.agents.tool_failures import FailureWatch
from hybrid_rl.agents.tool_processes import ToolProcesses
from hybrid_rl.agents.turn_record import NO_STATE, RecordedCall, TrajectoryRecord
from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import AgentError, ConfigError

logger = logging.getLogger("hybrid_rl")

# What CPython's signal.signal raises anywhere but in the main thread begins so.
ONLY_IN_MAIN_THREAD = "signal only works in main thread"
NOT_IN_A_THREAD = (
    "it sets a signal handler (signal.alarm?), which only a main thread can, and it runs in another; leave the limit "
    "to agents.tool_timeout_seconds, or make it a function in tools= that can be sent to a process"
)
PROCESSES_FOR_SIGNALS = 2
JSON_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}

Run = Callable[[dict[str, Any]], Awaitable[Outcome]]


class ActedOn(Protocol):
    """An environment as calls of its tools see it (`Environment`)."""

    def is_past(self, known: RecordedCall) -> bool:
        """Whether this call, whose outcome is recorded, need not be made again: the state after it will be restored."""
        ...

    async def state_after(self, known: RecordedCall, outcome: Outcome) -> Any:
        """Return the state that is to be recorded with a call, or NO_STATE. known: what was recorded, if the call was
        made before."""
        ...


class ToolCallError(Exception):
    """A call of the policy that cannot be made; its message is for the policy."""


@dataclass(frozen=True)
class Tool:
    """One tool. schema: as the chat template gets it. is_async: whether calls of one answer run together. run: calls it
    with checked arguments. takes_key: whether it gets the key of the call as well. acts_on: the environment that it
    belongs to, if any."""

    name: str
    schema: Mapping[str, Any]
    is_async: bool
    run: Run = field(repr=False)
    takes_key: bool = False
    acts_on: ActedOn | None = field(default=None, repr=False)

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as the function gets them. Raises ToolCallError for any that the schema does not allow."""
        parameters = self.schema["function"]["parameters"]
        known, required = parameters.get("properties", {}), parameters.get("required", ())
        wrong = [f"{name!r} is missing" for name in required if name not in arguments]
        wrong += [f"there is no argument {name!r}" for name in arguments if name not in known]
        for name, value in arguments.items():
            if name in known and not fits(value, known[name]):
                wrong.append(f"{name!r} must be {type_text(known[name])}, not {value!r:.100}")
        if wrong:
            takes = ", ".join(f"{name}: {type_text(schema)}" for name, schema in known.items()) or "no arguments"
            raise ToolCallError(f"{self.name}: {'; '.join(wrong)} (it takes {takes})")
        return {name: with_integers(value, known[name]) for name, value in arguments.items()}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a parsed JSON value has the type, and one of the values, that a schema of transformers names. What such a
    schema cannot say is not checked."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    names = schema.get("type")
    if names is None:
        return True
    for name in [names] if isinstance(names, str) else names:
        if name not in JSON_TYPES:
            return True
        is_whole = name == "integer" and isinstance(value, float) and value.is_integer()  # as JSON schema has it
        is_type = name in types_of(value)
        if is_whole or (is_type and (name != "array" or all(fits(item, schema.get("items", {})) for item in value))):
            return True
    return False


def with_integers(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value that fits a schema, with an int for every whole float where the schema takes integers: for JSON
    schema 3.0 is one, for Python it is not."""
    if "anyOf" in schema:
        return with_integers(value, next((option for option in schema["anyOf"] if fits(value, option)), {}))
    names = schema.get("type", ())
    if isinstance(value, float) and "integer" in names and "number" not in names:
        return int(value)
    if isinstance(value, list | tuple):
        return [with_integers(item, schema.get("items", {})) for item in value]
    others = schema.get("additionalProperties")
    if isinstance(value, dict) and isinstance(others, Mapping):
        return {key: with_integers(item, others) if fits(item, others) else item for key, item in value.items()}
    return value


def type_text(schema: Mapping[str, Any]) -> str:
    """Name the type of a schema for a message."""
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    if "anyOf" in schema:
        return " or ".join(type_text(option) for option in schema["anyOf"])
    names = schema.get("type", "anything")
    text = names if isinstance(names, str) else " or ".join(names)
    return f"{text} or null" if schema.get("nullable") else text


def error_text(error: BaseException) -> str:
    """Return the content of the message for a call that failed (TRL's form)."""
    return str({"error": message_of(error)})


class ToolSet:
    """The tools of a trajectory. watch: told how each call went; None = one of its own. Raises ConfigError if two tools
    have one name."""

    def __init__(self, tools: Sequence[Tool] = (), watch: FailureWatch | None = None) -> None:
        self.tools: dict[str, Tool] = {}
        self._watch = watch or FailureWatch()
        for tool in tools:
            if tool.name in self.tools:
                raise ConfigError(f"two tools are named {tool.name!r}; rename one, so that a call says which it means")
            self.tools[tool.name] = tool
        self.schemas = [tool.schema for tool in tools]

    def with_tools(self, tools: Sequence[Tool]) -> ToolSet:
        """Return this set with more tools, which shares what was seen of failures."""
        return ToolSet([*self.tools.values(), *tools], self._watch)

    async def answer(
        self, calls: Sequence[Any], counts: Counter[str], record: TrajectoryRecord | None = None, asked: str = ""
    ) -> Messages:
        """Make the tool calls of one answer and return their messages, in order. Plain tools run one after another,
        then all async ones together (as in TRL). counts: of "tool_calls", "tool_failures", "tool_timeouts". record: of
        the trajectory, which has the outcomes of calls that were made in an earlier life of it; asked: names the
        conversation up to this answer there.

        A call that fails gives a message that says why. Raises AgentError if too many calls hang, and what a call
        raises that says more than that it has failed, when all have ended.
        """
        record = TrajectoryRecord() if record is None else record
        outcome_at: dict[int, Outcome] = {}
        open_calls: dict[int, tuple[Tool, dict[str, Any], RecordedCall]] = {}
        for place, call in enumerate(calls):  # what has ended before is known before anything is made
            try:
                tool, arguments = self._read(call)
            except ToolCallError as error:
                outcome_at[place] = Outcome(None, error)
                continue
            known = record.call(asked, place, tool.name, arguments)
            if known.outcome is not None and (tool.acts_on is None or tool.acts_on.is_past(known)):
                counts["recorded_calls"] += 1
                record.note_past()
                outcome_at[place] = known.outcome
            else:
                open_calls[place] = tool, arguments, known
        together = {place: call for place, call in open_calls.items() if call[0].is_async}
        for place, open_call in open_calls.items():
            if place not in together:
                outcome_at[place] = await self._run(*open_call, record, counts)
        running = (self._run(*open_call, record, counts) for open_call in together.values())
        outcomes = await asyncio.gather(*running, return_exceptions=True)  # none is left behind, to be made twice
        raised = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if raised:
            raise min(raised, key=lambda error: not isinstance(error, AgentError))  # that ends the run
        outcome_at |= {
            place: outcome for place, outcome in zip(together, outcomes, strict=True) if isinstance(outcome, Outcome)
        }
        return [_message(call, outcome_at[place], counts) for place, call in enumerate(calls)]

    async def _run(
        self,
        tool: Tool,
        arguments: dict[str, Any],
        known: RecordedCall,
        record: TrajectoryRecord,
        counts: Counter[str],
    ) -> Outcome:
        """Make a call, and record what it came to. known: what is recorded of it so far."""
        environment = tool.acts_on
        outcome = await tool.run({**arguments, CALL_KEY: known.key} if tool.takes_key else arguments)
        self._watch.look(tool.name, outcome.error)
        state = NO_STATE if environment is None else await environment.state_after(known, outcome)
        if known.outcome is not None:
            counts["repeated_calls"] += 1
        record.note_call(known.key, outcome, state, is_acted=environment is not None)
        return outcome

    def _read(self, call: Any) -> tuple[Tool, dict[str, Any]]:
        """Return what a call asks for. Raises ToolCallError if there is no such tool, or if it does not take such
        arguments."""
        kind = call.get("type", "function") if isinstance(call, Mapping) else type(call).__name__
        function = call.get("function") if isinstance(call, Mapping) else None
        if kind != "function" or not isinstance(function, Mapping):
            raise ToolCallError(f"Unsupported tool call type: {kind}")
        name = function.get("name")
        if not isinstance(name, str) or name not in self.tools:
            raise ToolCallError(f"Tool {name} not found. The tools are: {', '.join(self.tools) or 'none'}")
        tool = self.tools[name]
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # as the OpenAI API writes them
            try:
                arguments = read_json(arguments)
            except ValueError as error:
                raise ToolCallError(f"{tool.name}: the arguments are not valid JSON ({error})") from error
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
            raise ToolCallError(f"{tool.name}: the arguments must be an object of names and values, not {arguments!r}")
        return tool, tool.checked(arguments)


def _message(call: Any, outcome: Outcome, counts: Counter[str]) -> dict[str, Any]:
    counts["tool_calls"] += 1
    counts["tool_failures"] += outcome.error is not None
    counts["tool_timeouts"] += isinstance(outcome.error, CallTimeoutError)
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    content = outcome.value if outcome.error is None else error_text(outcome.error)
    message = {"role": "tool", "name": str(name or "unknown"), "content": content}
    if isinstance(call, Mapping) and isinstance(call.get("id"), str):
        message["tool_call_id"] = call["id"]
    return message


class Functions:
    """Tools that are functions of their own, or methods of an object that all trajectories share.

    They run concurrently, for as many trajectories as call them: plain ones in threads, or with num_processes above 0
    in that many processes, except methods, whose object is only here. A function that sets a signal handler, for a time
    limit by signal.alarm, cannot do so in a thread; its calls go to processes from the first time that it fails for
    this, which is logged: there it has a main thread.

    Raises ConfigError for what cannot be described to the model, two tools of one name, and functions that cannot be
    sent to a process although they are to run there.
    """

    def __init__(self, functions: Sequence[Any], caller: Caller, num_processes: int = 0) -> None:
        self._caller = caller
        self._plain: dict[str, Any] = {}
        self._processes: dict[str, ToolProcesses] = {}  # by tool
        self.tools = ToolSet([self._tool(function) for function in functions])
        if num_processes and self._plain:
            self._processes = dict.fromkeys(self._plain, ToolProcesses(self._plain, num_processes, caller))

    def _tool(self, function: Any) -> Tool:
        schema = tool_schema(function)
        name = str(schema["function"]["name"])
        is_async = inspect.iscoroutinefunction(function)
        if inspect.isfunction(function) and not is_async:
            self._plain[name] = function
        run = partial(self._run, name, function, is_async)
        return Tool(name, schema, is_async, run, takes_call_key(function))

    async def _run(self, name: str, function: Any, is_async: bool, arguments: dict[str, Any]) -> Outcome:
        if is_async:
            return await self._caller.run(lambda: _awaited_content(function, arguments))
        if name not in self._processes:
            outcome = await self._caller.call(lambda: content_of(function(**arguments)))
            if not needs_main_thread(outcome.error) or not self._moved(name):
                return outcome
        return await self._processes[name].call(name, arguments)

    def _moved(self, name: str) -> bool:
        """Have a function's calls go to processes, if it can be sent there."""
        if name in self._processes:  # by another trajectory's call
            return True
        try:
            if name not in self._plain:
                raise ConfigError(f"{name} is a method")
            self._processes[name] = ToolProcesses({name: self._plain[name]}, PROCESSES_FOR_SIGNALS, self._caller)
        except ConfigError as error:
            logger.warning("the tool %s: %s (%s)", name, NOT_IN_A_THREAD, error)
            return False
        logger.warning(
            "the tool %s sets a signal handler, which only a main thread can: its calls go to %d processes of their "
            "own from now on; set agents.tool_processes to choose how many",
            *(name, PROCESSES_FOR_SIGNALS),
        )
        return True

    def close(self) -> None:
        """End the processes."""
        for processes in set(self._processes.values()):
            processes.close()


async def _awaited_content(function: Any, arguments: dict[str, Any]) -> Any:
    return content_of(await function(**arguments))


def needs_main_thread(error: BaseException | None) -> bool:
    """Whether a call failed because it set a signal handler in another thread than the main one."""
    return isinstance(error, ValueError) and str(error).startswith(ONLY_IN_MAIN_THREAD)
