"""Headless Chromium, driven through its DevTools protocol."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 120


class Tab:
    """A tab that keeps what its page did: requests, exceptions and lines of the console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Take the socket of a tab in which nothing is open yet."""
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Read events until the browser ends."""
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
                continue
            method, params = event["method"], event["params"]
            if method == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
                self.errors.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        event: dict[str, Any] = await asyncio.wait_for(answer, _TIMEOUT_S)
        assert "error" not in event, event["error"]
        return event["result"]

    async def open(
        self, address: str, ready: str = "document.documentElement?.dataset.drawn === 'yes'"
    ) -> None:
        """Open an address and wait for a condition: by default, that the report is drawn."""
        for domain in ("Network", "Runtime", "Log", "Page"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=address)
        await self.until(ready)

    async def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, a promise's once it is there."""
        result = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript condition holds."""
        async with asyncio.timeout(_TIMEOUT_S):
            while not await self.run(condition):
                await asyncio.sleep(0.05)


def find_chromium() -> str:
    """The browser's program; without one the test fails in CI, and is skipped elsewhere."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        missing = "no Chromium was found; install it (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return program


@asynccontextmanager
async def chromium_tab(profile: Path) -> AsyncIterator[Tab]:
    """Start Chromium with an empty profile; it ends with the context."""
    program = find_chromium()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--no-first-run", "--disable-background-networking", "--remote-debugging-port=0"]
    with subprocess.Popen(
        [program, *flags, f"--user-data-dir={profile}", "--window-size=1280,900", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            port = await _port(profile / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    targets = await response.json()
                address = next(target for target in targets if target["type"] == "page")
                async with session.ws_connect(
                    address["webSocketDebuggerUrl"], max_msg_size=0
                ) as socket:
                    tab = Tab(socket)
                    listener = asyncio.create_task(tab.listen())
                    yield tab
                    listener.cancel()
        finally:
            process.kill()


async def _port(file: Path) -> int:
    async with asyncio.timeout(_TIMEOUT_S):
        while not (file.exists() and re.match(r"\d+\n", file.read_text())):
            await asyncio.sleep(0.05)
    return int(file.read_text().partition("\n")[0])
