"""Which process of pytest-xdist runs which tests.

The tests of a file stay together: they share fixtures. So do all of tests/worker, which share one
pool of gloo processes. Each process takes the group that takes longest by the record
(tests/durations.csv) of those that are left, so that none waits long at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from support.durations import RECORD, file_of, read
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARED = ("tests/worker/",)  # folders whose files share what is costly to start


def group_of(node: str) -> str:
    file = file_of(node)
    return next((folder for folder in SHARED if file.startswith(folder)), file)


def expected_s(nodes: Iterable[str], known: Mapping[str, list[float]]) -> float:
    """By the record: that of each test, and what it has of the rest of their files."""
    tests = list(nodes)
    names = {*tests, *(f"{file_of(node)}::*" for node in tests)}
    return sum(median(known[name]) for name in names if name in known)


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
