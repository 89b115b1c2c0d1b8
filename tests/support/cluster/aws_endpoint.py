"""EC2's and the price list's answers on loopback, in their own formats, with the faults that they
can have.

What it is asked stands in `asked`. `fault`: an error code that every call is answered with;
`faults_left`: only so many times.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

STATUS = {"RequestLimitExceeded": 503, "ThrottlingException": 400, "InternalError": 500}


@dataclass
class AwsEndpoint:
    """`spot`: (zone, zone id, price, time) of every instance type; `on_demand`: dollars; `scores`:
    by zone id."""

    spot: list[tuple[str, str, str, str]] = field(default_factory=list)
    on_demand: float | None = None
    scores: dict[str, int] = field(default_factory=dict)
    fault: str = ""
    faults_left: int = 1 << 30
    page: int = 1000  # entries of price history in one answer
    asked: list[str] = field(default_factory=list)
    hang: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> AwsEndpoint:
        handler = type("Handler", (_Handler,), {"outer": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        return self

    def anew(
        self, spot: list[tuple[str, str, str, str]], on_demand: float, scores: dict[str, int]
    ) -> Iterator[None]:
        """For one test: nothing is left of the one before, and no call hangs on after it."""
        self.spot, self.on_demand, self.scores = list(spot), on_demand, dict(scores)
        self.fault, self.faults_left, self.page, self.asked = "", 1 << 30, 1000, []
        self.hang, self.closed = threading.Event(), threading.Event()
        yield
        self.closed.set()

    def __exit__(self, *exc: object) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    outer: AwsEndpoint

    def log_message(self, *arguments: Any) -> None:
        return

    def do_POST(self) -> None:
        outer = self.outer
        body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        target = self.headers.get("X-Amz-Target", "")
        query = (
            {name: values[0] for name, values in parse_qs(body).items()}
            if not target
            else json.loads(body)
        )
        action = target.rpartition(".")[2] or query["Action"]
        outer.asked.append(action)
        if outer.hang.is_set():
            outer.closed.wait(60)
        elif outer.fault and outer.faults_left > 0:
            outer.faults_left -= 1
            self._fail(outer.fault, bool(target))
        else:
            getattr(self, f"_{action}")(query)

    def _DescribeSpotPriceHistory(self, query: dict[str, str]) -> None:
        outer = self.outer
        begin = int(query.get("NextToken", "0") or 0)
        rows = outer.spot[begin : begin + outer.page]
        following = str(begin + outer.page) if begin + outer.page < len(outer.spot) else ""
        kind = query["InstanceType.1"]
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><productDescription>Linux/UNIX</productDescription><spotPrice>{price}"
            f"</spotPrice><timestamp>{at}</timestamp><availabilityZone>{zone}</availabilityZone><availabilityZoneId>{zone_id}"
            "</availabilityZoneId></item>"
            for zone, zone_id, price, at in rows
        )
        self._xml(
            "DescribeSpotPriceHistory",
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{following}</nextToken>",
        )

    def _GetSpotPlacementScores(self, query: dict[str, str]) -> None:
        items = "".join(
            f"<item><region>{query['RegionName.1']}</region><availabilityZoneId>{zone}</availabilityZoneId><score>{score}</score>"
            "</item>"
            for zone, score in self.outer.scores.items()
        )
        self._xml(
            "GetSpotPlacementScores", f"<spotPlacementScoreSet>{items}</spotPlacementScoreSet>"
        )

    def _GetProducts(self, query: dict[str, Any]) -> None:
        wanted = {row["Field"]: row["Value"] for row in query["Filters"]}

        def product(usd: float, market: str) -> str:
            dimension = {
                "unit": "Hrs",
                "pricePerUnit": {"USD": f"{usd:.10f}"},
                "description": "...",
            }
            attributes = {
                "instanceType": wanted["instanceType"],
                "regionCode": wanted["regionCode"],
                "marketoption": market,
            }
            terms = {"OnDemand": {"SKU.T": {"priceDimensions": {"SKU.T.D": dimension}}}}
            return json.dumps(
                {
                    "product": {"sku": "SKU", "attributes": attributes},
                    "serviceCode": "AmazonEC2",
                    "terms": terms,
                }
            )

        usd = self.outer.on_demand
        rows = (
            []
            if usd is None
            else [
                product(0.0, "CapacityBlock"),
                product(usd / 2, "CapacityBlock"),
                product(usd, "OnDemand"),
            ]
        )
        self._answer(
            200,
            json.dumps({"FormatVersion": "aws_v1", "PriceList": rows}),
            "application/x-amz-json-1.1",
        )

    def _xml(self, action: str, inner: str) -> None:
        space = "http://ec2.amazonaws.com/doc/2016-11-15/"
        self._answer(
            200,
            f'<{action}Response xmlns="{space}"><requestId>r</requestId>{inner}</{action}Response>',
            "text/xml",
        )

    def _fail(self, code: str, is_json: bool) -> None:
        status = STATUS.get(code, 400)
        if is_json:
            self._answer(
                status, json.dumps({"__type": code, "message": "no"}), "application/x-amz-json-1.1"
            )
        else:
            error = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
            self._answer(
                status,
                f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>",
                "text/xml",
            )

    def _answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
