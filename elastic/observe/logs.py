"""What the workers of a run have printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.errors import SpecError
from elastic.ledger.run_folder import RunFolder
from elastic.text import size

END_BYTES = 256 << 10  # of each file, when only its end is asked for
TRACEBACK, TRACEBACK_MOST = "Traceback (most recent call last):", 40  # lines that are shown of one


@dataclass(frozen=True)
class Log:
    """The output of one worker process, or its end."""

    file: Path
    n_bytes: int
    lines: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        return {"file": str(self.file), "bytes": self.n_bytes, "lines": list(self.lines)}


def logs(run: RunFolder, last: int = 0, worker: str = "") -> list[Log]:
    """In the order in which they were last written to. `last` > 0: only that many lines of each.
    `worker`: only files whose name begins with it. Raises SpecError where there is none."""
    found = sorted(run.logs.glob("*.log*"), key=lambda file: file.stat().st_mtime)
    if not found:
        where = (
            f"; each node has those of its own workers: {run.logs_of_workers(False)}"
            if run.storage.remote
            else ""
        )
        raise SpecError(f"run '{run.name}': no worker's output in {run.logs}{where}")
    chosen = [file for file in found if file.name.startswith(worker.replace("/", "-"))]
    if not chosen:
        raise SpecError(
            f"run '{run.name}': no log begins with '{worker}'; there are "
            f"{', '.join(file.name for file in found[-8:])}"
        )
    return [_read(file, last) for file in chosen]


def shown(found: Sequence[Log]) -> list[str]:
    """As `tail` shows several files."""
    lines: list[str] = []
    for log in found:
        lines += ["", f"==> {log.file} ({size(log.n_bytes)}) <==", *log.lines]
    return lines[1:]


def traceback_of(run: RunFolder, worker: str) -> Log | None:
    """The last traceback that a worker has printed, and the file that has it; None where its log is
    not here, or has none."""
    files = sorted(
        run.logs.glob(f"{worker.replace('/', '-')}-*.log"), key=lambda file: file.stat().st_mtime
    )
    if not files:
        return None
    log = _read(files[-1], 1 << 20)
    lines = list(log.lines)
    begins = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not begins:
        return None
    after = range(begins[-1] + 1, len(lines))
    # the line of the error itself
    end = next((i for i in after if not lines[i].startswith(" ")), len(lines) - 1)
    found = lines[begins[-1] : end + 1]
    if len(found) > TRACEBACK_MOST:
        found = [found[0], "  ...", *found[-TRACEBACK_MOST:]]
    return replace(log, lines=tuple(found))


def _read(file: Path, last: int) -> Log:
    n_bytes = file.stat().st_size
    with file.open("rb") as log:
        if last and n_bytes > END_BYTES:
            log.seek(n_bytes - END_BYTES)
        lines = log.read().decode(errors="replace").splitlines()
    return Log(file, n_bytes, tuple(lines[-last:] if last else lines))
