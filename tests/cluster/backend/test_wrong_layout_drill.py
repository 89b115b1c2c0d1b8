"""The drill that lets layouts compute something else: of no node, told to every worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.backend import drills
from elastic.cluster.backend.drill_runner import DrillRunner
from elastic.config.job import drill_entry
from elastic.errors import SpecError
from elastic.observe.event_messages import drill
from elastic.storage import open_storage
from elastic.types import DrillAsked, WorkerId
from elastic.types.orders import InjectFault, WorkerOrder
from elastic.worker.process.fault_injection import DeviceFaults

WORKERS = [WorkerId(node, k) for node in "ab" for k in (0, 1)]
ENTRY = {"at_step": 4, "wrong_layout": True}


@dataclass
class Crew:
    there: list[WorkerId]
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def workers(self, node_id: str | None = None) -> list[WorkerId]:
        return [worker for worker in self.there if node_id in (None, worker.node_id)]

    def pid(self, worker: WorkerId) -> int:
        return 0

    def signal(self, workers: Iterable[WorkerId], number: int) -> None: ...

    def order(self, worker: WorkerId, order: WorkerOrder) -> bool:
        self.told.append((worker, order.action))
        return True


def drilling(folder: Path, worker_group: Crew) -> DrillRunner:
    schedule = drills.Schedule([ENTRY], open_storage(folder))
    return DrillRunner(schedule, None, worker_group, {}, ())  # type: ignore[arg-type]


def test_every_worker_is_told_once_at_its_step(tmp_path: Path) -> None:
    worker_group = Crew(WORKERS)
    on = drilling(tmp_path, worker_group)
    assert on.at_step(3, None, 0.0) == [] == worker_group.told
    assert on.at_step(4, None, 0.0) == [DrillAsked(ENTRY)]
    assert worker_group.told == [(worker, InjectFault("layout")) for worker in WORKERS]
    assert on.at_step(5, None, 0.0) == []


def test_nobody_can_be_told(tmp_path: Path) -> None:
    (event,) = drilling(tmp_path, Crew([])).at_step(4, None, 0.0)
    assert isinstance(event, DrillAsked) and "no worker can be told" in event.drill["error"]


def test_it_belongs_to_no_node() -> None:
    entry = drill_entry(ENTRY)
    assert (
        entry.nodes() == []
        and entry.plain() == ENTRY
        and drill(ENTRY) == "wrong_layout (at step 4)"
    )
    for wrong in (
        {"wrong_layout": "any"},
        {"wrong_layout": True, "kill": "any"},
        {"wrong_layout": True, "gpu": 0},
    ):
        with pytest.raises(SpecError):
            drill_entry(wrong)


def test_a_worker_that_is_told_knows_it() -> None:
    faults = DeviceFaults()
    assert not faults.layout
    faults.inject_fault("layout")
    assert faults.layout and not faults.wrong
