"""`elastic dashboard`: runs in a browser."""

from __future__ import annotations

import argparse
import json

from elastic import api
from elastic.cli.parser import RUN, natural, verb


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = verb(verbs, "dashboard", _dashboard, about="show runs in a browser, live")
    made.add_argument(
        "runs", metavar="RUN", nargs="*", help=f"{RUN}; several are compared; default: all runs"
    )
    made.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen at (default: this machine alone; another one: its URL has a token)",
    )
    made.add_argument(
        "--port", metavar="N", type=natural, help="port (default: 8270, or a free one; 0 = free)"
    )
    # what `elastic run --dashboard` starts
    made.add_argument("--beside-driver", action="store_true", help=argparse.SUPPRESS)


def _dashboard(given: argparse.Namespace) -> int:
    options = api.DashboardOptions(
        host=given.host, port=given.port, storage=given.storage, beside_driver=given.beside_driver
    )

    def say(url: str) -> None:
        text = f"dashboard: {url}" if given.beside_driver else f"{url}  (Ctrl-C ends it)"
        print(json.dumps({"url": url}) if given.json else text, flush=True)

    api.dashboard(given.runs, options, say)
    return 0
