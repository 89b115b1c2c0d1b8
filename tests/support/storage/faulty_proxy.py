"""A real HTTP proxy on loopback that stands in front of an S3 server and does harm when told to.

    with FaultyProxy(server_port) as proxy:
        proxy.faults.append(Fault("reset", method="GET", times=2))
        ...  # clients use proxy.url
        assert proxy.seen[0].fault == "reset"

Kinds of faults, each at the next request that matches:
    error      an answer of the given status and code, without asking the server (`slow_down`,
               `expired`, ... are made of it)
    reset      the server is asked; half of its answer's body (nothing where it has none), then the
               connection is reset
    short      the server is asked; its answer ends in the middle, in order (FIN)
    wrong      the server is asked; one byte of its answer's body is another one
    wrong_sent one byte of the request's body is another one when the server gets it
    hang       no answer, until the client has gone
    lost       the server is asked and does what it is asked; its answer is lost (reset)
"""

from __future__ import annotations

import hashlib
import http.client
import re
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_S = 60.0
HOP_BY_HOP = ("content-length", "transfer-encoding", "connection")
XML = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}, by the '
    "proxy</Message></Error>"
)


@dataclass
class Fault:
    """`match`: a regular expression on method, path and query, as in `PUT
    /bucket/key?partNumber=2`. `skip`: matches let by."""

    kind: str
    match: str = ""
    times: int = 1
    skip: int = 0
    status: int = 503
    code: str = "ServiceUnavailable"
    at: float = 0.5  # where in the body, as a share of it

    def takes(self, line: str) -> bool:
        if self.times <= 0 or not re.search(self.match, line):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


def slow_down(match: str = "", times: int = 1) -> Fault:
    return Fault("error", match, times, status=503, code="SlowDown")


def unavailable(match: str = "", times: int = 1) -> Fault:
    return Fault("error", match, times, status=503, code="ServiceUnavailable")


def expired(match: str = "", times: int = 1) -> Fault:
    return Fault("error", match, times, status=403, code="ExpiredToken")


def denied(match: str = "", times: int = 1) -> Fault:
    return Fault("error", match, times, status=403, code="AccessDenied")


@dataclass(frozen=True)
class Seen:
    """A request, and the fault that it met ('' = none)."""

    line: str
    fault: str


@dataclass
class FaultyProxy:
    """`faults` are tried in order; one whose `times` are used up does nothing more.

    What does not fit the SHA-256 that came with it is refused, as S3 does it (moto does not).
    """

    target_port: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    before: Callable[[str], None] | None = None  # called with each request, before it is passed on
    # a path as the server reads it; headers as the server, or the client, names them
    path: Callable[[str], str] = str
    asks: Callable[[list[tuple[str, str]]], list[tuple[str, str]]] = list
    answers: Callable[[list[tuple[str, str]]], list[tuple[str, str]]] = list
    _server: Any = None

    def __enter__(self) -> FaultyProxy:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def clear(self) -> None:
        self.faults.clear()
        self.seen.clear()

    def reset(self) -> None:
        """As it was when it was made."""
        self.clear()
        self.before = None

    def count(self, match: str) -> int:
        """Requests so far that match."""
        return sum(1 for seen in self.seen if re.search(match, seen.line))

    def pick(self, line: str) -> Fault | None:
        with self._server.lock:
            return next((fault for fault in self.faults if fault.takes(line)), None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultyProxy

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is nothing to speak of."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def handle_expect_100(self) -> bool:
        """The client waits for it before it sends the body."""
        self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.wfile.flush()
        return True

    def _any(self) -> None:
        proxy = self.server.proxy
        self.path = proxy.path(self.path)
        line = f"{self.command} {self.path}"
        body = bytearray(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if proxy.before is not None:
            proxy.before(line)
        fault = proxy.pick(line)
        proxy.seen.append(Seen(line, fault.kind if fault else ""))
        self._carry_out(fault, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

    def _carry_out(self, fault: Fault | None, body: bytearray) -> None:
        kind = fault.kind if fault else ""
        if fault and kind == "error":
            return self._refuse(fault.status, fault.code)
        if kind == "hang":
            return self._hang()
        if fault and kind == "wrong_sent" and body:
            body[int((len(body) - 1) * fault.at)] ^= 0xFF
        if not self._as_sent(body):
            return self._refuse(400, "XAmzContentSHA256Mismatch")
        answer, data = self._ask(body)
        if kind == "lost" or (kind == "reset" and not data):
            return self._reset()
        if fault and kind == "wrong" and data:
            data[int((len(data) - 1) * fault.at)] ^= 0xFF
        whole = len(data)
        if fault and kind in ("short", "reset"):
            del data[int(whole * fault.at) :]
        headers = self.server.proxy.answers(answer.getheaders())
        self._answer(answer.status, headers, bytes(data), whole)
        if kind == "reset":
            self._reset()
        elif kind == "short":
            self.close_connection = True
        return None

    def _as_sent(self, body: bytearray) -> bool:
        wanted = self.headers.get("x-amz-content-sha256")
        return wanted is None or wanted == hashlib.sha256(body).hexdigest()

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, [("Content-Type", "application/xml")], XML.format(code=code).encode())

    def _ask(self, body: bytearray) -> tuple[http.client.HTTPResponse, bytearray]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.server.proxy.target_port, timeout=HANG_S
        )
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.server.proxy.asks(self.headers.items()):
            if name.lower() not in ("expect", "connection"):
                connection.putheader(name, value)
        connection.putheader("Connection", "close")
        connection.endheaders(bytes(body) or None)
        answer = connection.getresponse()
        data = bytearray(answer.read())
        connection.close()
        return answer, data

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, whole: int | None = None
    ) -> None:
        """`whole`: the length that is announced, where it is not that of `data`."""
        length = len(data) if whole is None else whole
        self.send_response_only(status)
        dropped = ("transfer-encoding", "connection") if self.command == "HEAD" else HOP_BY_HOP
        for name, value in headers:
            if name.lower() not in dropped:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def _hang(self) -> None:
        select.select([self.connection], [], [], HANG_S)  # readable: the client has closed
        self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
