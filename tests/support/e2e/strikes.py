"""Workers that are killed when a plan is ordered and nobody has entered it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.e2e.runs import events, plans, run, slow_until_grown

from elastic.cluster.local.local_cluster import LocalCluster
from elastic.ledger.journal import Line, read
from elastic.types import NodePrepared, Plan, PlanEntered, WorkerId

STRIKES_MOST = 3
SINGLES = [
    {"name": "spot", "market_type": "spot", "max_nodes": 3, "notice_s": 20},
    {"name": "on-demand", "market_type": "on-demand", "max_nodes": 1},
]
FOUR_NODES: dict[str, Any] = {
    "pools": SINGLES,
    "layout": {n: f"dp_shard={n}" for n in (4, 3, 2, 1)},
}


class Strikes(threading.Thread):
    """SIGKILLs workers as soon as a plan of a cause stands in the journal: it is ordered, and
    nobody has entered it. `whom`: by cause, who is struck then; once for each."""

    def __init__(self, journal: Path, whom: Mapping[str, Callable[[Plan], WorkerId]]) -> None:
        super().__init__(daemon=True)
        self.journal, self.whom = journal, whom
        self.struck: dict[str, WorkerId] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        size = 0
        while len(self.struck) < len(self.whom) and not self.ended.wait(0.004):
            now = self.journal.stat().st_size if self.journal.is_file() else 0
            if now != size:
                size = now
                self._look(read(self.journal))

    def growth_awaited(self, lines: list[Line]) -> bool:
        """A node was lost, and none has come in its place yet that is to be struck."""
        causes = {plan.cause for plan in plans(lines)}
        return "growth" in self.whom and "loss" in causes and "growth" not in causes

    def _look(self, lines: list[Line]) -> None:
        for plan in plans(lines):
            if plan.cause in self.whom and plan.cause not in self.struck:
                self._kill(lines, plan)

    def _kill(self, lines: list[Line], plan: Plan) -> None:
        victim = self.whom[plan.cause](plan)
        pids = next(
            e.pids for e in reversed(events(lines, NodePrepared)) if e.node_id == victim.node_id
        )
        self.struck[plan.cause] = victim
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def struck(
    folder: Path, whom: Mapping[str, Callable[[Plan], WorkerId]], on: LocalCluster
) -> tuple[dict[str, Any], list[Line], dict[str, WorkerId]]:
    """Runs the job; strikes once per cause. The plan must have been ordered and not entered; where
    a strike came too late, since this thread did not get a core in time, the job is run again.
    Returns summary, journal and who was struck."""
    for _ in range(STRIKES_MOST):
        shutil.rmtree(folder / "runs", ignore_errors=True)
        strikes = Strikes(folder / "runs" / "run" / "journal.jsonl", whom)
        strikes.start()
        try:
            with slow_until_grown(strikes.journal, folder / "slow", strikes.growth_awaited):
                summary, lines = run(folder, on=on)
        finally:
            strikes.ended.set()
            strikes.join()
        assert set(strikes.struck) == set(whom), (
            f"plans were ordered for {set(strikes.struck)} only"
        )
        first = {plan.cause: plan.generation for plan in reversed(plans(lines))}
        entered = {e.generation for e in events(lines, PlanEntered)}
        late = [cause for cause in whom if first[cause] in entered]
        if not late:
            return summary, lines, strikes.struck
    raise AssertionError(f"{STRIKES_MOST} times a strike came after its plan was entered: {late}")


def newcomer(plan: Plan) -> WorkerId:
    """A worker of the plan that holds nothing of the state yet."""
    return next(
        worker for worker in plan.ranks if worker not in {h.worker for h in plan.resume.holdings}
    )


def sender(plan: Plan) -> WorkerId:
    """Rank 1 of the generation before, which is to send its boxes."""
    return next(holding.worker for holding in plan.resume.holdings if holding.rank == 1)
