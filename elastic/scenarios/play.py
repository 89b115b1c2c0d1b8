"""Plays a scenario: starts the run, lets each act happen once it trains calmly, stops it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.cluster.ray import processes
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.scenario import Act, Scenario
from elastic.scenarios.watched_run import Stage, WatchedRun

STRIKE_LOOK_S = 0.01
STRIKES_MOST = 3


class Late(Exception):
    """A strike came when its plan was entered already, since this process did not get a core in
    time."""


@dataclass(frozen=True)
class Played:
    """What was seen of a run. `left`: of it, afterwards; `hit`: nodes of workers that were struck;
    `start_s`: from its launch to the first step; `away_s`: without a driver, until the next one
    heard of a new step."""

    lines: list[Line]
    left: list[str]
    n_processes: int
    hit: frozenset[str] = frozenset()
    start_s: float = math.nan
    away_s: float = math.nan


def play(scenario: Scenario, stage: Stage, limit: Limit) -> Played:
    """Raises Failed, OutOfTime."""
    for n in range(STRIKES_MOST):
        tried = replace(stage, name=f"{stage.name}-{n}") if n else stage
        try:
            return _Play(scenario, tried, WatchedRun(tried, limit)).to_the_end()
        except Late:
            continue
    raise Failed(f"{STRIKES_MOST} times a strike came after its plan was entered")


@dataclass
class _Play:
    scenario: Scenario
    stage: Stage
    run: WatchedRun
    reached: int = 0  # the newest generation when the last act was over
    # generation that was struck -> the worker
    struck: dict[int, tuple[str, int]] = field(default_factory=dict)
    away_s: float = math.nan
    _act: Act | None = None

    def to_the_end(self) -> Played:
        run = self.run
        if any(act.strike for act in self.scenario.acts):
            run.told, run.look_s = self._strike, STRIKE_LOOK_S
        try:
            run.start()
            run.calm(self.stage.world)
            for act in self.scenario.acts:
                self._one(act)
            run.calm()
            summary = run.stopped()
        finally:
            left = run.end()
        left += run.lease_left()
        lines = list(RunFolder.of(self.stage.run).lines())
        hit = frozenset(node for node, _ in self.struck.values())
        start_s = summary["launch_to_first_step_s"] or math.nan
        return Played(lines, left, len(run.processes), hit, start_s, self.away_s)

    def _one(self, act: Act) -> None:
        run, drill = self.run, self._words(act)
        if drill:
            run.calm()
            self.reached = run.seen.generation
        self._act = act
        if act.kind == "kill_driver":
            self.away_s = run.driver_killed()
            return
        for words in drill.split("; ") if drill else ():
            run.drill(words)
        run.until(lambda: self._is_over(act), act.name)
        self.reached, self._act = run.seen.generation, None

    def _words(self, act: Act) -> str:
        """On a cluster nodes are not started: the processes that were killed are, again, on
        theirs."""
        if not self.stage.address:
            return act.drill
        return "" if act.kind == "add" else act.drill.replace("any-spot", "any")

    def _is_over(self, act: Act) -> bool:
        """A step was done by a generation that this act leads to."""
        seen = self.run.seen
        if act.replaces and seen.world(self.reached) == self.stage.world:
            return True  # the transition before has it already
        after = [
            number
            for number, plan in seen.plans.items()
            if number > self.reached and plan["cause"] == act.leads_to and seen.n_steps(number)
        ]
        if late := [number for number in self.struck if seen.n_steps(number)]:
            raise Late(late)
        struck = act.strike is None or any(number > self.reached for number in self.struck)
        whole = not act.back or seen.world(seen.generation) == self.stage.world
        return bool(after) and struck and whole

    def _strike(self, plan: dict[str, Any]) -> None:
        """Once, at the first plan of its cause."""
        strike = self._act.strike if self._act is not None else None
        number = int(plan["generation"])
        if (
            strike is None
            or plan["cause"] != strike.on
            or any(n > self.reached for n in self.struck)
        ):
            return
        holders = {_worker(one["worker"]): one["rank"] for one in plan["resume"]["holdings"]}
        ranks = [_worker(one) for one in plan["ranks"]]
        match strike.whom:
            case "second":
                victim = ranks[1]
            case "newcomer":
                victim = next(worker for worker in ranks if worker not in holders)
            case "sender":
                victim = next(worker for worker, rank in holders.items() if rank == 1)
        node, local_rank = victim
        processes.send([self.run.seen.pids[node][local_rank]])
        self.struck[number] = victim


def _worker(plain: Mapping[str, Any]) -> tuple[str, int]:
    return str(plain["node_id"]), int(plain["local_rank"])
