"""The drill that lets a device fail: which entries there may be, what the workers are told, and
what they do then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from elastic.cluster.backend import drills
from elastic.cluster.backend.drill_runner import DrillRunner
from elastic.config.drill import DrillSpec
from elastic.config.job import drill_entry
from elastic.errors import SpecError
from elastic.observe.event_messages import drill
from elastic.storage import open_storage
from elastic.types import DrillAsked, Node, Pool, WorkerId
from elastic.types.orders import InjectFault, WorkerOrder
from elastic.worker.process.fault_injection import PLACES, DeviceFaults
from elastic.worker.session.worker_errors import kind_of

ENTRY = {"at_step": 4, "device_error": "b", "gpu": 1, "place": "backward"}


@dataclass
class Crew:
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def workers(self, node_id: str | None = None) -> list[WorkerId]:
        return [WorkerId(node, k) for node in "ab" for k in (0, 1) if node_id in (None, node)]

    def pid(self, worker: WorkerId) -> int:
        return 0

    def signal(self, workers: Iterable[WorkerId], number: int) -> None: ...

    def order(self, worker: WorkerId, order: WorkerOrder) -> bool:
        self.told.append((worker, order.action))
        return True


def test_the_worker_of_that_gpu_is_told_where_to_fail(tmp_path: Path) -> None:
    worker_group, schedule = Crew(), drills.Schedule([ENTRY], open_storage(tmp_path))
    nodes = {name: Node(name, "p", 2) for name in "ab"}
    on = DrillRunner(schedule, None, worker_group, nodes, (Pool("p", "CPU", 2, "spot", 1.0, 0, 2),))  # type: ignore[arg-type]
    (event,) = on.at_step(4, None, 0.0)
    assert event == DrillAsked({**ENTRY, "device_error": ["b"]})
    assert worker_group.told == [(WorkerId("b", 1), InjectFault("device_error", place="backward"))]
    assert drill(event.drill) == "device_error b gpu 1 place backward (at step 4)"


def test_what_an_entry_may_say() -> None:
    assert drill_entry(ENTRY).plain() == ENTRY
    (places,) = [
        one for one in get_args(DrillSpec.model_fields["place"].annotation) if one is not type(None)
    ]
    assert get_args(places) == PLACES
    for wrong in (
        {"device_error": "any", "place": "loss"},
        {"corrupt": "any", "place": "move"},
        {"device_error": True},
    ):
        with pytest.raises(SpecError):
            drill_entry(wrong)


@pytest.mark.parametrize("place", PLACES)
def test_it_fails_there_first_and_then_everywhere(place: str) -> None:
    faults = DeviceFaults()
    faults.inject_fault("device_error", place=place)
    assert faults.alters == (place == "backward")
    for other in PLACES:
        if other != place:
            faults.check(other)
    with pytest.raises(torch.AcceleratorError) as raised:
        faults.check(place)
    assert kind_of(raised.value) == "device"
    for other in PLACES:
        with pytest.raises(torch.AcceleratorError):
            faults.check(other)
    with pytest.raises(ValueError, match="'device_error' in 'loss'"):
        DeviceFaults().inject_fault("device_error", place="loss")


def test_the_backward_pass_through_a_block_fails() -> None:
    faults = DeviceFaults()
    faults.inject_fault("device_error", place="backward")
    x = torch.ones(2, requires_grad=True)
    altered = faults.altered(x * 2)
    assert torch.equal(altered, torch.full((2,), 2.0))
    with pytest.raises(torch.AcceleratorError):
        altered.sum().backward()
