"""A small OpenAI-compatible chat endpoint on a real socket, whose answers a test writes down."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """text: of the message. status: of HTTP. delay_seconds: before the answer. raw: the body, instead of a message."""

    text: str | None = ""
    status: int = 200
    delay_seconds: float = 0.0
    raw: bytes | None = None


@dataclass
class ChatServer:
    """answer: from the last message's content to a reply. requests: bodies, in order of arrival; keys: of their
    authorisation. most_at_once: requests that were under way together."""

    answer: Callable[[str], Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0

    def __enter__(self) -> ChatServer:
        lock, server = threading.Lock(), self
        self.num_running = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.requests.append(body)
                    server.keys.append(self.headers["Authorization"])
                    server.num_running += 1
                    server.most_at_once = max(server.most_at_once, server.num_running)
                reply = server.answer(body["messages"][-1]["content"])
                time.sleep(reply.delay_seconds)
                with lock:
                    server.num_running -= 1
                data = (
                    reply.raw if reply.raw is not None else json.dumps(_completion(body["model"], reply.text)).encode()
                )
                self.send_response(200 if self.path == "/v1/chat/completions" and reply.status == 200 else reply.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has given up
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"


def _completion(model: str, text: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
