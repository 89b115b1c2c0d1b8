"""What a worker has to say of the data that it has opened comes before the person once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.places import ROOT

from elastic.observe.event_messages import of
from elastic.storage import Storage
from elastic.types import NodePrepared, Prepare, WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.hosting.aggregate import Gather
from elastic.worker.session.session import Session

SAID = (
    "data.train: 0.006 GB in object storage do not fit into a node's cache (data.cache_gb: 0.005)"
)


def prepared(job: dict[str, Any], folder: Path) -> NodePrepared:
    session = Session(WorkerId("a", 0), job, str(folder))
    try:
        session.order(WorkerOrder(Prepare("a")))
        ((_, event),) = session.poll(0, 120.0).messages
    finally:
        session.close()
    assert isinstance(event, NodePrepared), event
    return event


def test_data_that_does_not_fit_into_the_cache_is_said_once(tmp_path: Path, s3: Storage) -> None:
    s3.put("ids.bin", bytes(6_000_000))
    train = {"tokens": s3.uri_of("ids.bin"), "dtype": "uint8", "seq": 16}
    data = {"train": train, "cache_gb": 0.005, "cache": str(tmp_path / "cache")}
    program = str(ROOT / "tests" / "programs" / "tiny.py")
    job = {"program": program, "global_batch": 4, "steps": 1, "data": data}
    event = prepared(job, tmp_path)
    gather, view = Gather(lambda parts: None, lambda node_id: 1), SimpleNamespace(nodes={})
    for node, notes in (("a", 1), ("b", 0)):
        (told,) = gather.add(WorkerId(node, 0), replace(event, node_id=node))
        assert isinstance(told, NodePrepared) and len(told.notes) == notes
        said: str = of(told, view) or ""  # type: ignore[arg-type]
        assert (f"the program; note: {SAID}: a sample that" in said) == bool(notes)
