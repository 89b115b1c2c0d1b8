"""Run folders: a run by its name, its folder or its URI; all runs of a storage folder; orders to a live run."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from elastic.errors import SpecError
from elastic.ledger.journal import Line, read
from elastic.observe.view import View, view_of
from elastic.storage import Storage, open_storage

DEFAULT_STORAGE = "elastic_runs"
JOURNAL = "journal.jsonl"


def storage_uri(asked: str | None) -> str:
    """Where runs lie: what was asked for, else $ELASTIC_STORAGE, else ./elastic_runs."""
    return open_storage(asked or os.environ.get("ELASTIC_STORAGE") or DEFAULT_STORAGE).uri


def open_run(run: str, storage: str | None = None) -> Storage:
    """The storage of a run that is there. Raises SpecError."""
    for place in (open_storage(run), open_storage(f"{storage_uri(storage)}/{run}")):
        if (place.root / JOURNAL).is_file():
            return place
    known = [name for name, _ in all_runs(storage)]
    listed = f"; runs there: {', '.join(known[-8:])}" if known else ""
    raise SpecError(f"no run '{run}' here or in {storage_uri(storage)}{listed}")


def lines_of(run: Storage) -> list[Line]:
    """The journal of a run."""
    return read(run.root / JOURNAL)


def view(run: Storage) -> View:
    return view_of(lines_of(run))


def age_s(run: Storage) -> float:
    """Seconds since the journal was last written."""
    return max(0.0, time.time() - (run.root / JOURNAL).stat().st_mtime)


def all_runs(storage: str | None = None) -> list[tuple[str, Storage]]:
    """Runs of a storage folder, by name, in order of their last news."""
    root = Path(storage_uri(storage))
    if not root.is_dir():
        return []
    found = [folder for folder in root.iterdir() if (folder / JOURNAL).is_file()]
    return [(f.name, open_storage(f)) for f in sorted(found, key=lambda f: (f / JOURNAL).stat().st_mtime)]


def order(run: Storage, data: dict[str, Any]) -> str:
    """Put an order, such as {"stop": reason} or {"drill": {...}}, into the inbox of a run; returns its key."""
    key = f"inbox/{time.time_ns():020d}-{secrets.token_hex(4)}.json"
    run.put(key, json.dumps(data).encode(), if_absent=True)
    return key
