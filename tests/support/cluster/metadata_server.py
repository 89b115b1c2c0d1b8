"""A metadata server on loopback that follows the documents of AWS (IMDSv2 only), GCP, Azure and of
Kubernetes' pod resource.

What it says is set per node: a node asks under its own prefix (`endpoint("a")`); without one it is
the node "". Where each node has an address of its own (`by_client`), that is its name.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN, TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"


def iso(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


@dataclass
class Said:
    """What one node is told. Paths of AWS are below latest/meta-data, those of GCP below
    computeMetadata/v1."""

    aws: dict[str, Any] = field(default_factory=dict)
    gcp: dict[str, str] = field(
        default_factory=lambda: {"instance/id": "1", "instance/preempted": "FALSE"}
    )
    azure: list[dict[str, Any]] = field(default_factory=list)
    azure_name: str = "vm_0"
    pod: dict[str, Any] | None = None
    aws_only: bool = False  # an EC2 instance: no other cloud answers there


class MetadataServer:
    """`clock_off_s`: of the server's clock from this machine's. `says_date`: it tells its clock.
    `hang`: it takes connections and never answers. `broken`: HTTP status of all answers, 0 = as it
    should be."""

    def __init__(
        self, address: tuple[str, int] = ("127.0.0.1", 0), by_client: bool = False
    ) -> None:
        self.by_client = by_client
        self.nodes: dict[str, Said] = {}
        self.tokens: dict[str, float] = {}
        self.asked: list[str] = []  # method and path
        self.clock_off_s, self.says_date, self.broken = 0.0, True, 0
        self.hang = threading.Event()
        self._closed = threading.Event()
        handler = type("Handler", (_Handler,), {"outer": self})
        self._server = ThreadingHTTPServer(address, handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    def now_s(self) -> float:
        return time.time() + self.clock_off_s

    def node(self, name: str = "") -> Said:
        return self.nodes.setdefault(name, Said())

    def endpoint(self, node: str = "") -> str:
        return f"http://127.0.0.1:{self.port}" + (f"/{node}" if node else "")

    def interrupt(self, node: str = "", in_s: float = 120.0, action: str = "terminate") -> None:
        """What AWS does about two minutes before it takes a spot instance."""
        self.node(node).aws["spot/instance-action"] = {
            "action": action,
            "time": iso(self.now_s() + in_s),
        }

    def plan_maintenance(
        self, node: str = "", in_s: float = 7200.0, status: str = "PENDING"
    ) -> None:
        """What Google does some days before it stops a host with GPUs."""
        window = {
            "window_start_time": iso(self.now_s() + in_s),
            "window_end_time": iso(self.now_s() + in_s + 7200),
        }
        said = {
            "can_reschedule": "true",
            "maintenance_status": status,
            "type": "SCHEDULED",
            **window,
        }
        self.node(node).gcp["instance/upcoming-maintenance"] = json.dumps(said)

    def __enter__(self) -> MetadataServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    outer: MetadataServer
    server_version, sys_version = "EC2ws", ""

    def log_message(self, *arguments: Any) -> None:
        return

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_GET(self) -> None:
        self._serve("GET")

    def _serve(self, method: str) -> None:
        outer = self.outer
        outer.asked.append(f"{method} {self.path}")
        if outer.hang.is_set():
            outer._closed.wait(60)
            return
        path = self.path.partition("?")[0]
        node, cut = "", path.split("/")
        if outer.by_client:
            node = self.client_address[0]
        elif cut[1] in outer.nodes and len(cut) > 2:
            node, path = cut[1], "/" + "/".join(cut[2:])
        said = outer.node(node)
        if outer.broken:
            self._answer(outer.broken)
        elif path == "/latest/api/token":
            self._token(method)
        elif path.startswith("/latest/meta-data/"):
            self._aws(said, path.removeprefix("/latest/meta-data/"))
        elif said.aws_only:
            self._answer(401)
        elif path.startswith("/computeMetadata/v1/"):
            self._gcp(said, path.removeprefix("/computeMetadata/v1/"))
        elif path.startswith("/metadata/"):
            self._azure(said, path.removeprefix("/metadata/"))
        elif path.startswith("/api/v1/namespaces/"):
            self._pod(said)
        else:
            self._answer(404)

    def _token(self, method: str) -> None:
        if method != "PUT" or "X-Forwarded-For" in self.headers:
            self._answer(405 if method != "PUT" else 403)
            return
        ttl = self.headers.get(TTL, "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            self._answer(400)
            return
        token = secrets.token_urlsafe(40)
        self.outer.tokens[token] = time.monotonic() + int(ttl)
        self._answer(200, token, {TTL: ttl})

    def _aws(self, said: Said, path: str) -> None:
        if self.outer.tokens.get(self.headers.get(TOKEN, ""), 0.0) <= time.monotonic():
            self._answer(401)
            return
        value = said.aws.get(path)
        self._answer(404) if value is None else self._answer(
            200, value if isinstance(value, str) else json.dumps(value)
        )

    def _gcp(self, said: Said, path: str) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403)
            return
        usual = {"instance/maintenance-event": "NONE", "instance/upcoming-maintenance": "{ }"}
        value = said.gcp.get(path, usual.get(path))
        if path == "instance/upcoming-maintenance" and "alt=json" not in self.path:
            value = None  # a folder: without alt=json it lists its keys
        flavor = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        self._answer(404, headers=flavor) if value is None else self._answer(200, value, flavor)

    def _azure(self, said: Said, path: str) -> None:
        if self.headers.get("Metadata") != "true" or "api-version=" not in self.path:
            self._answer(400)
        elif path == "instance/compute/name":
            self._answer(200, said.azure_name)
        elif path == "scheduledevents":
            self._answer(
                200, json.dumps({"DocumentIncarnation": len(said.azure), "Events": said.azure})
            )
        else:
            self._answer(404)

    def _pod(self, said: Said) -> None:
        if not self.headers.get("Authorization", "").startswith("Bearer "):
            self._answer(401)
        elif said.pod is None:
            self._answer(403)
        else:
            self._answer(200, json.dumps({"kind": "Pod", "apiVersion": "v1", **said.pod}))

    def _answer(self, status: int, text: str = "", headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response_only(status)
        if self.outer.says_date:
            self.send_header("Date", formatdate(self.outer.now_s(), usegmt=True))
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
