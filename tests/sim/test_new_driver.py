"""The driver dies at a random time, another one attaches to what still runs: the run finishes within the rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.sim.scenario import MODEL, scenario

from elastic.driver import drive, restored
from elastic.ledger.journal import Journal, read
from elastic.sim.backend import SimBackend
from elastic.sim.replay import replay
from elastic.types import Action, DriverStarted, EnterPlan, Event, NodePrepared, NodeReady

pytestmark = pytest.mark.slow


class Died(Exception):
    pass


class Outliving(SimBackend):
    """Its nodes and workers outlive a driver, and report to the next one; orders are idempotent by generation."""

    die_at_s: float | None = None

    def poll(self, until_s: float | None) -> list[Event]:
        if self.die_at_s is not None and self._now_s >= self.die_at_s:
            self.die_at_s = None
            raise Died
        return super().poll(until_s)

    def execute(self, action: Action) -> None:
        if not (isinstance(action, EnterPlan) and action.plan.generation in self._groups):
            super().execute(action)

    def report_again(self) -> None:
        self._now_s += 1.0
        for name, machine in self._machines.items():
            if name not in self._lost():
                self._out.append(NodeReady(machine.node))
                if machine.prepared and not any(worker.node_id == name for worker in self._dead):
                    self._out.append(NodePrepared(name))


@pytest.mark.parametrize("batch", range(4))
def test_a_new_driver_goes_on_with_what_lives(batch: int, tmp_path: Path) -> None:
    n_died = 0
    for seed in range(1000 + batch, 1060, 4):
        path = tmp_path / f"{seed}.jsonl"
        job, pools, faults, delays = scenario(seed)
        backend = Outliving(pools, job, faults, delays)
        backend.die_at_s = 8.0 + seed % 30
        start = DriverStarted("random", 1, job, pools, MODEL)
        try:
            state = drive(backend, Journal(path, 1), start)
        except Died:
            n_died += 1
            before = restored(read(path))
            backend.report_again()
            state = drive(backend, Journal(path, 2), replace(start, epoch=2, attached=True), before)
            assert before is not None and state.generation >= before.generation and state.usd >= before.usd
        assert (state.phase, backend.violations) == ("succeeded", []), f"seed {seed}: {state.outcome_reason}"
        again = replay(read(path))
        assert again.identical and again.state == state, f"seed {seed}: {again.first_difference}"
    assert n_died > 5
