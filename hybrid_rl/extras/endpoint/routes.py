"""The endpoint: a server on the loopback, with the routes of OpenAI's protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
from contextlib import suppress
from typing import Any
from urllib.request import getproxies, proxy_bypass

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

from hybrid_rl.agents.client import AgentClient
from hybrid_rl.extras.endpoint import answers as wire
from hybrid_rl.extras.endpoint.answers import Answer
from hybrid_rl.extras.endpoint.refusals import (
    Refusal,
    bad_request,
    failed,
    nested_too_deep,
    no_rollout,
    session_ended,
    wrong_key,
)
from hybrid_rl.extras.endpoint.requests import MODEL, AnswerRequest, read_request
from hybrid_rl.extras.endpoint.sessions import Session
from hybrid_rl.process.threads import LoopThread

logger = logging.getLogger("hybrid_rl")

HOST = "127.0.0.1"
BACKLOG = 4096  # connections that all trajectories open at once
LARGEST_BODY_BYTES = 256 * 2**20
# A stream that has nothing to say yet says so after this time, and again and again, so that no client takes the
# connection for dead. Until then errors have an HTTP status of their own.
KEEP_ALIVE_SECONDS = 15.0
STOP_SECONDS = 5.0
MAX_ENDED = 10_000  # sessions that are remembered after their end


class AgentServer:
    """The server of a process, on a free port, in a thread of its own: it answers between rollouts too, and while
    agents block the event loop that runs them. temperature: of the run."""

    def __init__(self, *, temperature: float) -> None:
        self.temperature = temperature
        self._open: dict[str, Session] = {}  # by path and by key
        self._ended: dict[str, Session | str] = {}  # the other name of the session
        self._numbers = itertools.count()
        self._thread = LoopThread("agent endpoint", lambda: None)
        self._runner = web.AppRunner(
            self._app(), handle_signals=False, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        self.port: int = self._thread.start(self._listen()).result()
        _pass_by_proxies()

    def base_url(self, session: Session) -> str:
        """Return the URL that a client of this session gets."""
        return f"http://{HOST}:{self.port}/t/{session.path}/v1"

    def open(self, client: AgentClient) -> Session:
        """Open the session of a trajectory. Must be called on the event loop that runs its episode."""
        session = Session(client)
        self._open[session.path] = self._open[session.key] = session
        return session

    async def end(self, session: Session) -> None:
        """End a session, with what is under way in it."""
        for name, other in ((session.path, session.key), (session.key, session.path)):
            self._open.pop(name, None)
            self._ended[name] = other
        while len(self._ended) > 2 * MAX_ENDED:
            self._ended.pop(next(iter(self._ended)), None)
        await session.close()

    def close(self) -> None:
        """Stop listening, and drop what is connected. Idempotent."""
        if self._thread.thread.is_alive():
            with suppress(TimeoutError):
                self._thread.start(self._runner.cleanup()).result(STOP_SECONDS)
            self._thread.stop()
            self._thread.thread.join(STOP_SECONDS)

    # ------------------------------------------------------------------------------------------- in the thread

    async def _listen(self) -> int:
        await self._runner.setup()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((HOST, 0))
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()
        return int(listener.getsockname()[1])

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_BODY_BYTES, middlewares=[_in_openai_form])
        for start in ("/t/{path}/v1", "/v1"):
            app.router.add_post(f"{start}/chat/completions", lambda http: self._answer(http, is_chat=True))
            app.router.add_post(f"{start}/completions", lambda http: self._answer(http, is_chat=False))
            app.router.add_get(f"{start}/models", self._models)
            app.router.add_get(f"{start}/models/{{model:.+}}", self._models)
        return app

    def _session(self, http: web.Request) -> Session:
        """Return the open session that path or key, or both, name. Raises Refusal."""
        scheme, _, key = http.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        names = [name for name in (http.match_info.get("path"), key) if name]
        if not names:
            raise wrong_key()
        first, last = names[0], names[-1]
        if session := self._open.get(first):
            if last not in (session.path, session.key):
                raise wrong_key()
            return session
        if first not in self._ended or last not in (first, self._ended[first]):
            raise wrong_key()
        raise session_ended() if self._open else no_rollout()

    async def _models(self, http: web.Request) -> web.Response:
        self._session(http)
        name = http.match_info.get("model")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "hybrid_rl"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _answer(self, http: web.Request, *, is_chat: bool) -> web.StreamResponse:
        session = self._session(http)
        try:
            body = await http.json()
        except ValueError as error:
            raise bad_request(f"the body is not JSON: {error}") from None
        request = read_request(body, is_chat=is_chat, temperature=self.temperature)
        identity = f"{session.path[:8]}-{next(self._numbers)}"
        asking = asyncio.ensure_future(_ask(session, request))
        try:
            if request.streams:
                return await _stream(http, identity, request, asking)
            return web.json_response(wire.whole(identity, request, await asking))
        finally:
            asking.cancel()  # the client has gone, if there is no answer yet


def _pass_by_proxies() -> None:
    """Make HTTP clients of this process, and of those it starts, reach the loopback where the environment names a
    proxy for everything."""
    if not getproxies() or proxy_bypass(HOST):
        return
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), HOST)))
    logger.info("added %s to no_proxy: agents reach the policy there, and no proxy does", HOST)


@web.middleware
async def _in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the form that clients of OpenAI read."""
    try:
        return await handler(request)
    except Refusal as error:
        refusal = error
    except web.HTTPException as error:
        refusal = Refusal(error.status, f"{request.method} {request.path}: {error.reason}", code="unknown_url")
        if error.status == 404:
            refusal.message += "; there are /v1/chat/completions, /v1/completions and /v1/models"
        if request.path.endswith("/responses"):
            refusal.message += ": set the agent's framework to chat completions instead of the Responses API"
    except RecursionError:
        refusal = nested_too_deep()
    except Exception as error:
        logger.exception("the endpoint of agents failed to answer %s", request.path)
        refusal = failed(error)
    return web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers)


async def _ask(session: Session, request: AnswerRequest) -> list[Answer]:
    """Ask a session, on the event loop of its episode. Cancelled with this task; Refusal if the session ends first."""
    asking = session.ask(request)
    try:
        future = asyncio.run_coroutine_threadsafe(asking, session.loop)
    except RuntimeError:  # the event loop is closed
        asking.close()
        raise session_ended() from None
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise session_ended() from None


async def _stream(
    http: web.Request, identity: str, request: AnswerRequest, asking: asyncio.Future[list[Answer]]
) -> web.StreamResponse:
    await asyncio.wait([asking], timeout=KEEP_ALIVE_SECONDS)
    if asking.done():
        asking.result()  # a refusal has its status
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    with suppress(ClientConnectionResetError):
        await response.prepare(http)
        while not asking.done():
            await response.write(b": the policy is writing\n\n")
            await asyncio.wait([asking], timeout=KEEP_ALIVE_SECONDS)
        try:
            events: list[Any] = wire.chunks(identity, request, asking.result())
        except Refusal as error:
            events = [error.body()]
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response
