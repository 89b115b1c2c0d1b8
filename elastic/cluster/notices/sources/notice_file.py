"""A file as a source: whoever knows of the node's end writes it: a Kubernetes preStop hook, a trap
on SIGTERM, a batch system.

It holds the seconds that are left when it is written; empty = 30. Removed = withdrawn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from elastic.cluster.notices.sources.metadata_request import Finding

VARIABLE = "ELASTIC_NOTICE_FILE"
USUAL_S = 30.0


class NoticeFile:
    name = "file"
    every_s = 0.5

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def greet(self) -> None:
        return

    def read(self) -> Sequence[Finding]:
        """Its age is counted too: both times are of this node's clock."""
        try:
            written_s = self._path.stat().st_mtime
            text = self._path.read_text().strip()
        except FileNotFoundError:
            return ()
        try:
            seconds = float(text or USUAL_S)
        except ValueError:
            seconds = USUAL_S
        age_s = max(0.0, time.time() - written_s)
        return [Finding(f"file {self._path} ({seconds:.0f} s)", max(0.0, seconds - age_s))]
