"""Headless Chromium: what it makes of a page in a file."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BINARY = shutil.which("chromium") or shutil.which("google-chrome") or ""
MISSING = "" if BINARY else "not on this machine: chromium (apt-get install chromium)"
LIGHT, DARK = 1, 0  # of Blink's preferredColorScheme
# a page in a frame as wide as a phone says how wide its content is, and whether anything failed
ASKED = """<script>
addEventListener("load", () => parent.postMessage(
  [document.documentElement.scrollWidth, innerWidth].join(" of "), "*"));
</script></body>"""
FRAME = """<!doctype html><title>waiting</title><body style="margin:0">
<script>addEventListener("message", e => {{ document.title = e.data; }});</script>
<iframe src="{page}" width="{width}" height="{height}" style="border:0"></iframe>"""


@dataclass(frozen=True)
class Browser:
    """`folder`: its profile and what it writes."""

    folder: Path

    def run(self, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
        words = [
            BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--enable-logging=stderr", f"--user-data-dir={self.folder / 'profile'}", *options,
            page.as_uri(),
        ]  # fmt: skip
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)

    def picture(self, page: Path, name: str, *, scheme: int, size: tuple[int, int]) -> Path:
        target = self.folder / f"{name}.png"
        said = self.run(
            page, f"--screenshot={target}", f"--window-size={size[0]},{size[1]}",
            f"--blink-settings=preferredColorScheme={scheme}",
        ).stderr  # fmt: skip
        assert "CONSOLE" not in said, said
        return target

    def frame(self, page: Path, width: int, height: int = 4000) -> Path:
        """A file that shows the page as wide as a phone."""
        inside = self.folder / f"inside-{width}.html"
        text = re.sub(r"<meta http-equiv=.Content-Security-Policy.*?>", "", page.read_text())
        inside.write_text(text.replace("</body>", ASKED))
        outside = self.folder / f"frame-{width}.html"
        outside.write_text(FRAME.format(page=inside.as_uri(), width=width, height=height))
        return outside

    def widths(self, page: Path, width: int) -> str:
        """`390 of 390`: what its content takes, and what there is."""
        dom = self.run(self.frame(page, width), "--dump-dom", "--virtual-time-budget=3000").stdout
        found = re.search(r"<title>(.*?)</title>", dom)
        return found[1] if found else ""
