"""Which process of pytest-xdist runs which tests.

The tests of a file stay together: they share fixtures. So do those of a room of tests/worker, which
share one pool of gloo processes; whoever has begun such a pool keeps it for the next room. Of files
whose tests share nothing and take long, each test goes by itself. Each process takes the group that
takes longest by the record (tests/durations.csv) of those that are left, so that none waits long at
the end; what is new is taken to be long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from support.durations import RECORD, file_of, read
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARED = "tests/worker/"  # each folder in it is a group
APART = (
    "tests/api/test_init_job.py", "tests/bench/test_smoke.py", "tests/e2e/test_chaos_runs.py",
    "tests/e2e/test_run.py", "tests/e2e/test_scenarios.py", "tests/e2e/test_script.py",
)  # fmt: skip
UNKNOWN_S = 15.0


def group_of(node: str) -> str:
    file = file_of(node)
    if file in APART:
        return node
    room = file.removeprefix(SHARED).partition("/") if file.startswith(SHARED) else None
    # the standalone ranks are processes of their own
    return f"{SHARED}{room[0]}/" if room and room[1] and room[0] != "standalone" else file


def expected_s(nodes: Iterable[str], known: Mapping[str, list[float]]) -> float:
    """By the record: that of each test, and what it has of the rest of their files."""
    tests = list(nodes)
    rest = {node: f"{file_of(node)}::*" for node in tests}
    names = {*tests, *rest.values()}
    new = [node for node in tests if node not in known and rest[node] not in known]
    return sum(median(known[name]) for name in names if name in known) + UNKNOWN_S * len(new)


class LongestFirst(LoadScopeScheduling):
    """Assigns groups; see above."""

    ordered = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self.ordered:
            known = read(RECORD)
            for group in sorted(
                self.workqueue, key=lambda group: -expected_s(self.workqueue[group], known)
            ):
                self.workqueue.move_to_end(group)
            self.ordered = True
        super()._assign_work_unit(node)
