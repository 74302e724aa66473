"""Environments: objects that trajectories act on, made once and reset often. The convention is TRL's."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.error import URLError

from hybrid_rl.agents.calls import Caller, CallTimeoutError, Outcome, offered
from hybrid_rl.agents.schemas import takes_call_key, tool_schema
from hybrid_rl.agents.tool_calling import content_of, message_of
from hybrid_rl.agents.tools import NOT_IN_A_THREAD, Tool, needs_main_thread
from hybrid_rl.agents.turn_record import NO_STATE, RecordedCall, TrajectoryRecord
from hybrid_rl.controller import enter_device
from hybrid_rl.data.prompts import Messages, is_text_block, shorten
from hybrid_rl.errors import AgentError, ConfigError, HybridRLError
from hybrid_rl.process.threads import CallThread

logger = logging.getLogger("hybrid_rl")

Made = TypeVar("Made")

# Public methods that are not tools.
RESET, GET_REWARD, CLOSE = "reset", "get_reward", "close"
RESERVED_METHODS = (RESET, GET_REWARD, CLOSE)
STATE, RESTORE = "state", "restore"  # no tools either, if there are both
ENVIRONMENT_COLUMN = "environment"
END_SECONDS = 10.0  # for the close() of all environments together
RESETS = 2  # tries, each on an instance of its own


class EnvironmentFailedError(HybridRLError, RuntimeError):
    """An environment cannot be made or reset; its trajectory ends."""


class EnvironmentLostError(Exception):
    """An environment is gone in the middle of a trajectory: the process or server behind it has ended. Raise it in a
    method of an environment, or in an agent, to have the trajectory made again on another environment, from what it has
    finished. Methods of an environment that can be put into the place of another one, because it has a `state()` or is
    `repeatable`, say the same by ConnectionError, EOFError, and what libraries raise for these."""


# Errors of clients (requests 2.34, httpx 0.28, aiohttp 3.14, websockets 17.4) that are no ConnectionError of Python,
# though nobody answers any more: the package, and the name of a class.
_CONNECTION_ERRORS = frozenset(
    {
        ("http", "IncompleteRead"),
        ("requests", "ConnectionError"),
        ("requests", "ChunkedEncodingError"),
        ("httpx", "NetworkError"),
        ("httpx", "RemoteProtocolError"),
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("websockets", "ConnectionClosed"),
    }
)
_REPEATABLE = "_hybrid_rl_is_repeatable"


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an error says that nobody is at the other end any more."""
    if isinstance(error, ConnectionError | EOFError):
        return True
    if isinstance(error, URLError):
        return isinstance(error.reason, ConnectionError)
    return any((kind.__module__.split(".")[0], kind.__name__) in _CONNECTION_ERRORS for kind in type(error).__mro__)


def repeatable(made: Made) -> Made:
    """Mark a method of an environment, or a class with all of its methods: on a fresh environment that was reset for
    the same row the same calls return the same, and what they do stays in the environment. So they may be made again
    if an environment was lost that has no `state()`."""
    setattr(made, _REPEATABLE, True)
    return made


@dataclass
class EnvironmentKind:
    """What one factory makes. name: in the column `environment`, None if there is only one kind. schemas: of its tools,
    by method. class_name: of what it makes. has_reward: whether that has get_reward. has_state: whether it has `state`
    and `restore`; is_repeatable: whether all of its tools are marked so."""

    name: str | None
    factory: Callable[[], Any]
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    class_name: str = ""
    has_reward: bool = False
    has_state: bool = False
    is_repeatable: bool = False

    @property
    def label(self) -> str:
        """The kind in messages. Before anything was made, what makes it gives the name."""
        made = self.class_name or getattr(self.factory, "__name__", "") or repr(self.factory)
        return made if self.name is None else f"{made} ({ENVIRONMENT_COLUMN}={self.name!r})"

    def says_lost(self, error: BaseException | None) -> bool:
        """Whether an error of a method says that what is behind an environment is gone."""
        can_go_on = self.has_state or self.is_repeatable
        return isinstance(error, EnvironmentLostError) or (can_go_on and is_connection_error(error))

    def look_at(self, instance: Any) -> None:
        """Note what an instance can do. Raises ConfigError if it has no reset, or a tool without a description."""
        self.class_name = type(instance).__name__
        methods = public_methods(instance)
        if RESET not in methods:
            raise ConfigError(
                f"environment_factory makes a {self.label} without a method reset(); write `def reset(self, **row) -> "
                "str | None`"
            )
        self.has_reward = GET_REWARD in methods
        self.has_state = STATE in methods and RESTORE in methods
        reserved = (*RESERVED_METHODS, STATE, RESTORE) if self.has_state else RESERVED_METHODS
        tools = {name: method for name, method in methods.items() if name not in reserved}
        self.is_repeatable = hasattr(type(instance), _REPEATABLE) or all(
            hasattr(method, _REPEATABLE) for method in tools.values()
        )
        self.schemas = {}
        for name, method in tools.items():
            try:
                self.schemas[name] = tool_schema(method)
            except ConfigError as error:
                raise ConfigError(
                    f"environment {self.label}: {error}\nPublic methods are tools; one that is none needs a name that "
                    "begins with an underscore"
                ) from error


def public_methods(instance: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of an object, static ones too, whose names do not begin with an underscore. Class methods make
    objects, and only RESERVED_METHODS may be such. Properties are not read."""
    methods: dict[str, Callable[..., Any]] = {}
    for name in dir(instance):
        static = inspect.getattr_static(instance, name, None)
        is_left_out = isinstance(static, property) or (isinstance(static, classmethod) and name not in RESERVED_METHODS)
        if not name.startswith("_") and not is_left_out:
            member = getattr(instance, name, None)
            if inspect.ismethod(member) or (isinstance(static, staticmethod) and inspect.isfunction(member)):
                methods[name] = member
    return methods


class Environment:
    """One instance with a thread of its own, in which it is made and all its plain methods run, one at a time. Such
    objects may be bound to a thread (a connection of sqlite3 is), and none expects two calls at once. Its coroutines
    run on the caller's event loop. A plain tool fails at once while a method past its time limit still runs.

    is_lost: whether what is behind it is gone; then it serves no other trajectory."""

    def __init__(self, kind: EnvironmentKind, caller: Caller) -> None:
        self.kind = kind
        self.instance: Any = None
        self._caller = caller
        self._thread = CallThread("environment", enter_device)
        self._is_overdue = False  # whether a plain method was past its limit
        self.is_lost = False
        self._due: tuple[int, Any] | None = None  # the state that it is to be in before its next call, and its order
        self._restoring = asyncio.Lock()
        self._has_differed = False

    async def make(self) -> Outcome:
        """Make the instance."""
        outcome = await self._caller.call(self.kind.factory, self._thread)
        self.instance = outcome.value
        return outcome

    async def call(self, name: str, arguments: Mapping[str, Any], then: Callable[[Any], Any] = lambda v: v) -> Outcome:
        """Call a method. then: what is done with the value that it returns."""
        method = getattr(self.instance, name, None)
        if method is None:  # a factory may make objects of several classes
            return Outcome(None, AttributeError(f"{type(self.instance).__name__} has no {name}()"))
        if inspect.iscoroutinefunction(method):

            async def awaited() -> Any:
                return then(await method(**arguments))

            return await self._caller.run(awaited)
        outcome = await self._caller.call(lambda: then(method(**arguments)), self._thread)
        self._is_overdue = isinstance(outcome.error, CallTimeoutError)
        return outcome

    def tools(self) -> list[Tool]:
        """Return the instance's methods as tools."""
        made = []
        for name, schema in self.kind.schemas.items():
            method = getattr(self.instance, name)
            run = partial(self._content, name)
            is_async = inspect.iscoroutinefunction(method)
            made.append(Tool(name, schema, is_async, run, takes_call_key(method), self))
        return made

    async def _content(self, name: str, arguments: dict[str, Any]) -> Outcome:
        if (
            self._is_overdue
            and not self.is_idle
            and not inspect.iscoroutinefunction(getattr(self.instance, name, None))
        ):
            return Outcome(None, CallTimeoutError("not called: an earlier call, past its time limit, still runs"))
        await self.catch_up()
        outcome = self._checked(await self.call(name, arguments, content_of), name)
        if needs_main_thread(outcome.error):
            logger.warning("%s of the environment %s: %s", name, self.kind.label, NOT_IN_A_THREAD)
        return outcome

    async def begin(self, observation: Any, record: TrajectoryRecord) -> Any:
        """Go on after a reset that returned this observation. Returns what the trajectory is shown: if the environment
        has a state, what is recorded of its first reset, whose state it will have again."""
        self._due, self._has_differed, self._restoring = None, False, asyncio.Lock()
        if not self.kind.has_state:
            return observation
        if record.beginning is None:
            record.note_beginning(observation, await self._state())
            return observation
        observation, state = copy.deepcopy(record.beginning)
        record.note_past()
        self._due = (-1, state)
        return observation

    def is_past(self, known: RecordedCall) -> bool:
        """Whether this call, whose outcome is recorded, need not be made again: the state after it will be restored."""
        is_later = self._due is None or known.order > self._due[0]  # calls of one answer end in any order
        if known.has_state and is_later:
            self._due = (known.order, known.state)
        return self.kind.has_state

    async def state_after(self, known: RecordedCall, outcome: Outcome) -> Any:
        """Return the state that is to be recorded with a call, or NO_STATE. known: what was recorded, if the call was
        made before."""
        if self.kind.has_state:  # while a call past its limit still runs, it has none
            is_overdue = isinstance(outcome.error, CallTimeoutError) or (self._is_overdue and not self.is_idle)
            return NO_STATE if is_overdue else await self._state()
        before = known.outcome
        if before is not None and self.kind.is_repeatable and not self._has_differed:
            was, now = (out.value if out.error is None else message_of(out.error) for out in (before, outcome))
            if was != now:
                self._has_differed = True
                logger.warning(
                    "a call of the environment %s was made again and returned %.100r instead of %.100r, although it is "
                    "marked repeatable: the trajectory goes on from what it returned now",
                    *(self.kind.label, now, was),
                )
        return NO_STATE

    async def catch_up(self) -> None:
        """Restore the state after the last call that was not made again, if there was such. Raises EnvironmentLostError
        and EnvironmentFailedError."""
        async with self._restoring:
            if self._due is not None:
                self._require(await self.call(RESTORE, {STATE: copy.deepcopy(self._due[1])}), RESTORE)
                self._due = None

    async def _state(self) -> Any:
        """Ask for the state. Raises AgentError for one that JSON cannot hold."""
        state = self._require(await self.call(STATE, {}), STATE).value
        try:
            return json.loads(json.dumps(state))  # what acts on the environment may change what it returned
        except (TypeError, ValueError) as error:
            raise AgentError(
                f"state() of the environment {self.kind.label} returned {state!r:.200}, which JSON cannot hold "
                f"({error}); return text, numbers, booleans, None, and lists and dicts of them"
            ) from error

    def _require(self, outcome: Outcome, name: str) -> Outcome:
        if self._checked(outcome, name).error is not None:
            raise EnvironmentFailedError(
                f"{name}() of the environment {self.kind.label} failed: {type(outcome.error).__name__}: {outcome.error}"
            ) from outcome.error
        return outcome

    def _checked(self, outcome: Outcome, name: str) -> Outcome:
        """Return an outcome, unless it says that the environment is lost. Raises EnvironmentLostError for that."""
        if self.kind.says_lost(outcome.error):
            self.is_lost = True
            raise EnvironmentLostError(
                f"{name}() of the environment {self.kind.label} raised {type(outcome.error).__name__}: {outcome.error}"
            ) from outcome.error
        return outcome

    @property
    def is_idle(self) -> bool:
        """Whether no plain method runs; one may, past its time limit."""
        return self._thread.is_idle

    def end(self) -> Future[Any] | None:
        """Close the instance, if it has a method for that, and let its thread end. Returns the call that closes it."""
        method = None if self.instance is None else public_methods(self.instance).get(CLOSE)
        future: Future[Any] | None = None
        if method is not None and inspect.iscoroutinefunction(method):
            future = self._caller.loop.start(method())
        elif method is not None:
            future = self._thread.start(method)
        self._caller.leave(self._thread)
        return future


class EnvironmentPool:
    """The environments of a rank: each is reset for one trajectory after another, and a new one is made if none is
    free.

    kinds: what they may be. free: some that are there already. limit: their number at once, None = no limit; whoever
    takes one sees to it that fewer are taken.
    """

    def __init__(
        self,
        kinds: Sequence[EnvironmentKind],
        caller: Caller,
        free: Sequence[Environment] = (),
        limit: int | None = None,
    ) -> None:
        self._limit, self._num_making = limit, 0
        self._kinds = {kind.name: kind for kind in kinds}
        self._caller = caller
        self._free: dict[str | None, list[Environment]] = {name: [] for name in self._kinds}
        self._used: set[Environment] = set()
        self._closing: list[Future[Any]] = []  # close() of those that were given up
        self._lock = threading.Lock()
        for environment in free:
            self._free[environment.kind.name].append(environment)

    async def take(self, name: str | None, row: Mapping[str, Any]) -> tuple[Environment, Any]:
        """Reset an environment for a row and return it with its observation. If that fails, another instance is made
        and tried. Raises EnvironmentFailedError if that fails too, or if there is no such kind."""
        if name not in self._kinds:
            known = ", ".join(map(repr, self._kinds))
            raise EnvironmentFailedError(
                f"{ENVIRONMENT_COLUMN}={name!r} is not in environment_factory (it has {known})"
            )
        for attempt in range(RESETS):
            environment = await self._one_of(self._kinds[name], is_new=attempt > 0)
            try:
                outcome = await environment.call(RESET, copy.deepcopy(offered(environment.instance.reset, row)))
            except BaseException:  # a cancellation
                self._drop(environment)
                raise
            if outcome.error is None:
                return environment, outcome.value
            self._drop(environment)
        error, kind = outcome.error, self._kinds[name]
        raise (EnvironmentLostError if kind.says_lost(error) else EnvironmentFailedError)(
            f"reset() of the environment {kind.label} failed {RESETS} times, each on an instance of its own: "
            f"{type(error).__name__}: {error}"
        ) from error

    async def _one_of(self, kind: EnvironmentKind, *, is_new: bool) -> Environment:
        with self._lock:
            environment = None if is_new or not self._free[kind.name] else self._free[kind.name].pop()
            if environment is not None:
                self._used.add(environment)
                return environment
        environment = Environment(kind, self._caller)
        try:
            await self._make_room()
            outcome = await environment.make()
        except BaseException:
            environment.end()
            raise
        finally:
            with self._lock:
                self._num_making -= 1
        if outcome.error is not None:
            environment.end()
            raise (EnvironmentLostError if kind.says_lost(outcome.error) else EnvironmentFailedError)(
                f"the environment {kind.label} cannot be made: {type(outcome.error).__name__}: {outcome.error}"
            ) from outcome.error
        with self._lock:
            self._used.add(environment)
        return environment

    async def _make_room(self) -> None:
        """Close free environments if there may be no more, and wait until those that were given up are closed."""
        with self._lock:
            self._num_making += 1
            if self._limit is None:
                return
            free = [environment for kind in self._free.values() for environment in kind]
            spare = free[: max(0, len(self._used) + len(free) + self._num_making - self._limit)]
            for kind in self._free.values():
                kind[:] = [environment for environment in kind if environment not in spare]
        for environment in spare:
            self._drop(environment)
        closing = [asyncio.wrap_future(future) for future in self._closing]
        if closing:
            await asyncio.wait(closing, timeout=self._caller.timeout_seconds)

    def give_back(self, environment: Environment) -> None:
        """Let the next trajectory have an environment; one that is lost, or in which a call still runs, is given up
        instead."""
        if environment.is_lost or not environment.is_idle:
            self._drop(environment)
            return
        with self._lock:
            if environment in self._used:
                self._used.remove(environment)
                self._free[environment.kind.name].append(environment)

    def _drop(self, environment: Environment) -> None:
        with self._lock:
            self._used.discard(environment)
        hangs = not environment.is_idle  # its close() may never start
        closing = environment.end()
        if closing is not None and not hangs:
            with self._lock:
                self._closing = [*(future for future in self._closing if not future.done()), closing]

    def close(self) -> None:
        """Close all environments, and wait until these and those given up before have ended, but not for what hangs."""
        with self._lock:
            closing, self._closing = self._closing, []
            every = [*self._used, *(environment for free in self._free.values() for environment in free)]
            self._used.clear()
            for free in self._free.values():
                free.clear()
        closing += [future for environment in every if (future := environment.end()) is not None]
        wait(closing, END_SECONDS)


def with_observation(prompt: Messages, observation: Any) -> Messages:
    """Return chat messages with what reset() returned added to the last message of the user. Text follows text without
    a separator (as in TRL). Raises EnvironmentFailedError for anything but text, text blocks and None."""
    if observation is None:
        return prompt
    is_blocks = isinstance(observation, list)
    if not isinstance(observation, str) and not (is_blocks and all(map(is_text_block, observation))):
        raise EnvironmentFailedError(
            f"reset() returned {shorten(observation)}; it returns text, a list of text blocks, or None"
        )
    places = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    if not places:
        return [*prompt, {"role": "user", "content": observation}]
    content: Any = prompt[places[-1]]["content"]
    if is_blocks and isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if not is_blocks and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    messages = list(prompt)
    messages[places[-1]] = {**messages[places[-1]], "content": content + observation}
    return messages
