"""A page in headless Chromium, spoken to over its own debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_SECONDS = 60.0


def executable() -> str | None:
    """Return the browser of this machine, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. Everything that it logs, every error and every request that it makes is kept.

    Use it as an asynchronous context manager.
    """

    def __init__(self, width: int = 1500, height: int = 1100, *, dark: bool = False) -> None:
        self._size, self._dark = (width, height), dark
        self.problems: list[str] = []  # errors and warnings of scripts, of the network and of the content policy
        self.requests: list[str] = []  # addresses
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    async def __aenter__(self) -> Page:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        browser = executable()
        assert browser is not None
        width, height = self._size
        self._process = subprocess.Popen(
            [
                *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--remote-debugging-port=0", f"--user-data-dir={self._folder.name}", "--hide-scrollbars"),
                *(f"--window-size={width},{height}", "--no-first-run", "--disable-background-networking"),
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        port = await asyncio.wait_for(asyncio.to_thread(self._port), START_SECONDS)
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            pages = [one for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._session.close()
        self._process.terminate()
        await asyncio.to_thread(self._process.communicate)
        self._folder.cleanup()

    def _port(self) -> int:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line):
                return int(found[1])
        raise RuntimeError("Chromium ended before it listened")

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
                continue
            method, values = found["method"], found["params"]
            if method == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(values["exceptionDetails"])[:2000])
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(values["args"])[:2000])
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                self.problems.append(values["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        waiting = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(waiting, 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    async def open(self, path: Path, ready: str, seconds: float = 60.0) -> None:
        """Open a file and wait until an expression is true."""
        await self.call("Page.navigate", url=path.resolve().as_uri())
        await self.until(ready, seconds)

    async def until(self, ready: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true. Raises TimeoutError with what the page has logged."""
        for _ in range(int(seconds / 0.05)):
            if await self.run(ready):
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{ready} was not true after {seconds:g} s; the page says {self.problems}")

    async def picture(self, path: Path, clip: str = "") -> Path:
        """Save what is seen as a PNG; clip: a selector of the only element that is wanted."""
        area: dict[str, Any] = {}
        if clip:
            box = f"(() => {{ const r = document.querySelector({json.dumps(clip)}).getBoundingClientRect(); return "
            box += "{x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height, scale: 1}; })()"
            area = {"clip": await self.run(box), "captureBeyondViewport": True}
        found = await self.call("Page.captureScreenshot", format="png", **area)
        path.write_bytes(base64.b64decode(found["data"]))
        return path
