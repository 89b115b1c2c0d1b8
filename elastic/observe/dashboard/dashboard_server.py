"""The server of the page: reads journals, answers GET alone, shows nothing to whom it does not
know."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hmac
import ipaddress
import json
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web

from elastic.errors import SpecError
from elastic.observe.dashboard.run_shelf import LOOK_S, RunShelf, packed
from elastic.observe.dashboard.step_curve import Stretch

STATIC = Path(__file__).with_name("static")
PORT, MOST_PORT = 8270, 65535
LEAST_S = 0.05  # between two looks at journals
LAST_S, QUIET_S = 2.0, 0.5  # for pages to ask how a run has ended; until they have asked
# between two looks while nobody asks, and from when on nobody does: a page that is opened finds a
# journal that is all but read
UNWATCHED_S, WATCHED_S = 10.0, 15.0
LEFT_S, LOOK_LEFT_S = 60.0, 10.0  # the same of pages of which none was opened for so long
BEAT_S = 5.0  # a page that hears nothing for longer says so
MOST_LISTENERS = 64
MOST_BUCKETS = 4000
COOKIE = "elastic-dashboard"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
JSON = "application/json"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asset:
    """A file of the page, as it is sent. Names of built files hold their content's hash."""

    body: bytes  # gzip
    content_type: str
    cache: str


def assets(folder: Path = STATIC) -> dict[str, Asset]:
    """By path; nothing else of the disk is ever sent."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix in TYPES:
            kept = "public, max-age=31536000, immutable" if "/" in name else "no-cache"
            body = gzip.compress(path.read_bytes(), 9)
            found[f"/{name}"] = Asset(body, TYPES[path.suffix], kept)
    if "/index.html" not in found:
        raise SpecError(f"{folder} holds no page: build it with `make dashboard`")
    found["/"] = found["/index.html"]
    return found


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int | None) -> socket.socket:
    """`port`: None = PORT, or any where that is taken. Raises SpecError."""
    if port is not None and port > MOST_PORT:
        raise SpecError(f"--port {port}: must be 0 (any that is free) to {MOST_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (port,) if port is not None else (PORT, 0):
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, wanted or 0))
            made.listen(128)
        except OSError as error:
            made.close()
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            taken = error.errno == errno.EADDRINUSE
            why = "is taken by another process" if taken else error.strerror
            right = (
                "give an address of this machine, as 127.0.0.1 or 0.0.0.0"
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
                else "--port 0 takes a free one"
            )
            raise SpecError(f"--host {host} --port {wanted}: {why}; {right}") from error
        return made
    raise SpecError(f"--host {host}: no port is free")


class DashboardServer:
    """`place`: where it listens, see `listening`. `token`: what a page must bring; "" = whoever
    reaches this machine's loopback may look."""

    def __init__(self, shelf: RunShelf, place: socket.socket, host: str = "127.0.0.1") -> None:
        self.shelf = shelf
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self._socket = place
        self.host, self.port = host, place.getsockname()[1]
        self.name = secrets.token_hex(4)  # of this process: pages load anew after a restart
        self._assets = assets()
        self._changed = asyncio.Condition()
        self._listeners = 0
        self._asked_s = self._opened_s = float("-inf")
        self._asked = asyncio.Event()
        self._ending = False
        self._hosts = {host, "localhost", "127.0.0.1", "::1"}

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        token = f"?token={self.token}" if self.token else ""
        return f"http://{host}:{self.port}/{token}"

    async def serve(self, stop: asyncio.Event, *, last_look: bool = False) -> None:
        """Until `stop` is set. `last_look`: open pages are shown what journals then say."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/api/runs", self._runs),
                web.get("/api/runs/{id}", self._run),
                web.get("/api/runs/{id}/series", self._series),
                web.get("/api/runs/{id}/notes", self._notes),
                web.get("/api/events", self._events),
                web.get("/{path:.*}", self._asset),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        following = asyncio.create_task(self._follow())
        stopping = asyncio.create_task(stop.wait())
        try:
            await web.SockSite(runner, self._socket).start()
            # a server that reads no more must not look as if it did
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            if last_look and self._listeners:
                self._ending = True
                self._asked.set()
                await following
                await self._answered()
        finally:
            for task in (following, stopping):
                task.cancel()
            await asyncio.gather(following, stopping, return_exceptions=True)
            await runner.cleanup()

    async def _answered(self) -> None:
        """Until open pages have asked for what the last look has found."""
        self._asked_s = time.monotonic()
        end_s = self._asked_s + LAST_S
        while time.monotonic() < min(end_s, self._asked_s + QUIET_S):
            await asyncio.sleep(LEAST_S)

    async def _follow(self) -> None:
        while True:
            last = self._ending
            left = time.monotonic() - self._opened_s > LEFT_S
            every_s = LOOK_LEFT_S if left else LOOK_S
            look = self.shelf.last_look if last else partial(self.shelf.look, every_s)
            if await asyncio.to_thread(look):
                async with self._changed:
                    self._changed.notify_all()
            if last:
                return
            if self._ending:
                continue
            now_s = time.monotonic()
            watched = self._listeners or now_s - self._asked_s < WATCHED_S
            wait_s = self.shelf.next_s - now_s if watched else UNWATCHED_S
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), max(LEAST_S, wait_s))

    # --------------------------------------------------------------------------------- who may look

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self._refused(request)
        if refused is not None:
            refused.headers.update(HEADERS)
            return refused
        self._asked_s = time.monotonic()
        self._asked.set()
        try:
            response = await handler(request)
            self._asked.set()  # of a run that nobody has asked for before
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.reason)
        except KeyError:
            response = web.json_response({"error": "there is no such run here"}, status=404)
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    def _refused(self, request: web.Request) -> web.StreamResponse | None:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="this page changes nothing: GET alone\n")
        if not self.token:
            # a page of another site may have its name point here
            name = request.host.rpartition("]")[0].lstrip("[") or request.host.partition(":")[0]
            if name not in self._hosts:
                return web.Response(status=403, text=f"open it as {self.url}\n")
            return None
        given = request.query.get("token", "")
        if given and hmac.compare_digest(given.encode(), self.token.encode()):
            found = web.Response(status=303, headers={"Location": request.path})
            # the address bar and the history do not keep it
            found.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict")
            return found
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        known = request.cookies.get(self._cookie) or bearer
        if hmac.compare_digest(known.encode(), self.token.encode()):
            return None
        text = "token missing or wrong: open the URL that `elastic dashboard` has printed\n"
        return web.Response(status=401, text=text)

    @property
    def _cookie(self) -> str:
        return f"{COOKIE}-{self.port}"  # cookies of one host are shared by its ports

    # -------------------------------------------------------------------------------------- answers

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        found = self._assets.get(f"/{request.match_info['path']}")
        if found is None:
            return web.Response(status=404, text="not found\n")
        self._opened_s = time.monotonic()
        return _packed(request, found.body, found.content_type, cache=found.cache)

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        listed = await asyncio.to_thread(self.shelf.listed)
        return web.json_response({"runs": listed, "server": self.name})

    async def _run(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request)

    async def _series(self, request: web.Request) -> web.StreamResponse:
        by = request.query.get("by", "time")
        if by not in ("time", "step"):
            return _wrong(f"by={by}: must be time or step")
        try:
            low, high = (_number(request.query.get(name)) for name in ("from", "to"))
            buckets = int(request.query.get("buckets", "500"))
        except ValueError:
            return _wrong("from, to and buckets must be numbers")
        asked = Stretch(by, low, high, min(MOST_BUCKETS, max(10, buckets)))
        return await self._answer(request, asked)

    async def _answer(
        self, request: web.Request, asked: Stretch | None = None
    ) -> web.StreamResponse:
        key = request.match_info["id"]
        if self.shelf.is_quick(key, asked):
            return _packed(request, self.shelf.answer(key, asked))
        return _packed(request, await asyncio.to_thread(self.shelf.answer, key, asked))

    async def _notes(self, request: web.Request) -> web.StreamResponse:
        run = self.shelf.followed(request.match_info["id"])
        text = request.query.get("before", "")
        if text and not text.isdecimal():
            return _wrong("before must be a whole number")
        found = await asyncio.to_thread(
            run.notes,
            request.query.get("q", "")[:200],
            request.query.get("kind", ""),
            before=int(text) if text else None,
        )
        return _packed(request, await asyncio.to_thread(packed, found))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: what is new, and a sign of life."""
        if self._listeners >= MOST_LISTENERS:
            return web.Response(status=503, text="too many pages are open\n")
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        self._listeners += 1
        try:
            await response.prepare(request)
            while True:
                news = {"server": self.name, "now_s": time.time(), "runs": self.shelf.versions}
                await response.write(f"data: {json.dumps(news)}\n\n".encode())
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), BEAT_S)
        except (ConnectionResetError, asyncio.CancelledError):
            return response
        finally:
            self._listeners -= 1


def _packed(
    request: web.Request, body: bytes, content_type: str = JSON, *, cache: str = "no-store"
) -> web.Response:
    """`body` is packed by gzip, and goes so to whoever takes it."""
    headers = {"Content-Type": content_type, "Cache-Control": cache, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=body, headers=headers | {"Content-Encoding": "gzip"})
    return web.Response(body=gzip.decompress(body), headers=headers)


def _wrong(text: str) -> web.Response:
    return web.json_response({"error": text}, status=400)


def _number(text: str | None) -> float | None:
    """Raises ValueError."""
    value = None if text in (None, "") else float(text or "")
    if value is not None and not math.isfinite(value):
        raise ValueError(text)
    return value
