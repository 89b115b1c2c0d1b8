"""The page of `elastic dashboard` and its server, with a long run on many nodes: how heavy the page
and its data are, how soon a picture is there, and what memory and processor time it takes.

The run's journal is made (tests/support/observe/long_run.py): no cluster is needed. The page is
opened in a headless Chromium, as often as there are repeats, each time in a new one.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import finish, options
from trial import ROOT, Clock, Failed, cpu_clock

sys.path.insert(0, str(ROOT / "tests"))
from support.observe import devtools, long_run

MOST_S = 600.0
FIRST = "document.querySelector('.headline h1')"
READING = "document.querySelector('.banner.busy')"
DATA = ("", "/series?by=time&buckets=700", "/notes?q=&kind=")


@dataclass(frozen=True)
class Size:
    nodes: int
    steps: int
    changes: int

    @property
    def cells(self) -> str:
        return f"document.querySelectorAll('.nodes .cell').length >= {self.nodes * long_run.GPUS}"


WHOLE, SMOKE = Size(512, 100_000, 60), Size(16, 400, 6)


def got(url: str) -> bytes:
    """As it is sent: packed."""
    asked = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        body: bytes = answer.read()
        return body


def read(url: str, size: Size, clock: Clock) -> str:
    """Waits until the server has read the journal. Returns the run's address."""
    while True:
        clock.look("the journal")
        (one,) = json.loads(got(f"{url}api/runs"))["runs"]
        found = json.loads(gzip.decompress(got(f"{url}api/runs/{one['id']}")))
        if not found["reading"] and found["step"] == size.steps:
            return f"{url}api/runs/{one['id']}"
        time.sleep(0.2)


async def opened(url: str, size: Size) -> dict[str, Any]:
    """One look at it, in a new browser."""
    async with devtools.opened() as page:
        await page.size(1400, 1000)
        began_s = time.monotonic()
        await page.go(url)
        await page.until(FIRST, 60)
        first_s = time.monotonic() - began_s
        await page.until(
            f"{size.cells} && document.querySelectorAll('.plot canvas').length >= 3", 60
        )
        all_s = time.monotonic() - began_s
        heap = await page.value("performance.memory.usedJSHeapSize")
        hosts = {one.split("/")[2] for one in page.requests if not one.startswith("data:")}
        return {
            "first_text_s": first_s, "all_s": all_s, "heap_mb": heap / 1e6,
            "complaints": len(page.complaints), "other_hosts": len(hosts - {url.split("/")[2]}),
        }  # fmt: skip


def peak_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise Failed("the server has ended")


def measure(clock: Clock, repeats: int, size: Size) -> dict[str, Any]:
    if devtools.CHROMIUM is None:
        raise Failed("there is no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as name:
        folder = Path(name) / "long"
        long_run.write(folder, size.nodes, size.steps, size.changes)
        words = [sys.executable, "-m", "elastic", "dashboard", str(folder), "--port", "0", "--json"]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            run = read(url, size, clock)
            read_cpu_s = time.clock_gettime(cpu_clock(server.pid))
            html = gzip.decompress(got(url)).decode()
            parts = [word for word in html.split('"') if word.startswith("./assets/")]
            looks = [asyncio.run(opened(url, size)) for _ in range(repeats)]
            middle = {key: sorted(one[key] for one in looks)[len(looks) // 2] for key in looks[0]}
            return {
                "page_kb": round((len(got(url)) + sum(len(got(url + one[2:])) for one in parts)) / 1e3, 1),
                "data_kb": round(sum(len(got(run + one)) for one in DATA) / 1e3, 1),
                **{key: round(value, 2) for key, value in middle.items()},
                "journal_mb": round(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6, 1),
                "read_cpu_s": round(read_cpu_s, 2),
                "server_peak_mb": round(peak_mb(server.pid), 1),
            }  # fmt: skip
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    given = options(__doc__, MOST_S, repeats=3)
    size = SMOKE if given.smoke else WHOLE
    sys.exit(finish("page", given, lambda clock: measure(clock, given.repeats, size)))
