"""Who looks at a run while it trains: Prometheus, a page that is open, a terminal.

`python viewer.py METRICS PAGE RUN`: scrapes METRICS as often as deploy/monitoring says, asks the server
of PAGE what the page asks when it is told that something is new, and has `elastic status RUN` printed.
"" = nobody looks there. Seconds are those in which it is not frozen.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trial import ROOT, Tree

SCRAPE_S, STATUS_S, LIST_S = 15, 60, 15
LOOKS_S = 600.0
PACKED = {"Accept-Encoding": "gzip"}


def main(metrics: str, page: str, run: str) -> None:
    if page:
        threading.Thread(target=_page, args=(page,), daemon=True).start()
    words = [sys.executable, "-m", "elastic", "status", run, "-q"]
    for second in range(1, sys.maxsize):
        time.sleep(1)  # what passes while it is frozen is one second
        if metrics and second % SCRAPE_S == 0:
            _got(metrics)
        if run and second % STATUS_S == 0:
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def _page(url: str) -> None:
    """As elastic/observe/dashboard/page/src does it: one question of a kind at a time, and again
    when there is a newer version."""
    _got(url)
    newest: dict[str, int] = {}
    changed = threading.Condition()
    (one,) = json.loads(_got(f"{url}api/runs"))["runs"]

    def follow(path: str) -> None:
        known, n_notes = -1, -1
        kept = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LOOKS_S)  # as browsers do

        def got(path: str) -> bytes:
            kept.request("GET", f"/api/runs/{one['id']}{path}", headers=PACKED)
            return kept.getresponse().read()

        while True:
            with changed:
                while newest.get(one["id"], 0) == known:
                    changed.wait()
                known = newest.get(one["id"], 0)
            body = got(path)
            if not path and n_notes != (n_notes := json.loads(gzip.decompress(body))["n_notes"]):
                got("/notes?q=&kind=")

    for path in ("", "/series?by=time&buckets=700"):
        threading.Thread(target=follow, args=(path,), daemon=True).start()
    listed_s = time.monotonic()
    with urllib.request.urlopen(f"{url}api/events", timeout=LOOKS_S) as lines:
        for line in lines:
            if line.startswith(b"data: "):
                with changed:
                    newest.update(json.loads(line[6:])["runs"])
                    changed.notify_all()
            if time.monotonic() - listed_s > LIST_S:
                listed_s = time.monotonic()
                _got(f"{url}api/runs")


def _got(url: str) -> bytes:
    asked = urllib.request.Request(url, headers=PACKED)
    with urllib.request.urlopen(asked, timeout=LOOKS_S) as answer:
        body: bytes = answer.read()
        return body


@dataclass
class ViewerTree(Tree):
    """Its own processor time, and that of each `elastic status` that it has started."""

    def cpu_s(self, into: dict[int, tuple[str, float]]) -> dict[str, float]:
        found = super().cpu_s(into)
        fields = Path(f"/proc/{self.root}/stat").read_text().rpartition(")")[2].split()
        ended_s = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
        into[-self.root] = ("status", ended_s)
        return {**found, "status": found.get("status", 0.0) + ended_s}

    def _kind(self, pid: int) -> str:
        return "viewer" if pid == self.root else "status"


def started(
    metrics: str, page: str, run: Path | None
) -> tuple[subprocess.Popen[bytes], ViewerTree]:
    process = subprocess.Popen(
        [sys.executable, __file__, metrics, page, str(run or "")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    return process, ViewerTree(process.pid)


if __name__ == "__main__":
    main(*sys.argv[1:])
