"""A headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WORDS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-features=Translate,OptimizationHints,MediaRouter", "--remote-debugging-port=0",
)  # fmt: skip


class Navigated(AssertionError):
    """The page went to another one while it was asked."""


class Page:
    """What a tab has shown, asked for and complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
                continue
            params = told.get("params", {})
            match told.get("method"):
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(json.dumps(params["exceptionDetails"])[:600])
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    self.complaints.append(json.dumps(params["args"])[:600])
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    self.complaints.append(json.dumps(params["entry"])[:600])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(self._waiting[number], 60)
        if "navigated or closed" in str(told.get("error")):
            raise Navigated(f"{method}: {told['error']}")
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    async def value(self, code: str) -> Any:
        """Of an expression; a promise is awaited."""
        found = await self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, json.dumps(found["exceptionDetails"])[:800]
        return found["result"].get("value")

    async def _holds(self, code: str) -> bool:
        with contextlib.suppress(Navigated):
            return bool(await self.value(f"!!({code})"))
        return False

    async def until(self, code: str, seconds: float = 30.0) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not await self._holds(code):
            assert asyncio.get_running_loop().time() < end, f"never: {code}"
            await asyncio.sleep(0.05)  # sleeps: a browser is asked again

    async def back(self, n: int) -> None:
        """To the page that was shown `n` pages before."""
        known = await self.call("Page.getNavigationHistory")
        entry = known["entries"][known["currentIndex"] - n]
        await self.call("Page.navigateToHistoryEntry", entryId=entry["id"])

    async def size(self, width: int, height: int, *, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    async def colors(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    async def picture(self, path: Path, whole: bool = False) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Page]:
    """A browser with one tab."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *WORDS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            while True:
                line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
                assert line, "the browser ended"
                if "DevTools listening on" in line:
                    break
            quiet = asyncio.create_task(_drain(process.stderr))
            port = line.split("://")[1].split("/")[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{port}/json/list") as answer:
                    tabs = json.loads(await answer.text())
                tab = next(one for one in tabs if one["type"] == "page")
                async with session.ws_connect(
                    tab["webSocketDebuggerUrl"], max_msg_size=0, heartbeat=None
                ) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
            quiet.cancel()
        finally:
            process.kill()
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
