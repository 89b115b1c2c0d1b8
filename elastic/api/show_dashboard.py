"""The dashboard of runs: what its server asks of the other rooms, and the one that `elastic run
--dashboard` starts beside the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic.api.diagnose import TracedStep, communication, diagnosed, step_parts, traced_step
from elastic.ledger.lease import HolderWatch
from elastic.ledger.run_folder import RunFolder
from elastic.observe.dashboard.followed_run import PageSources
from elastic.observe.dashboard.run_shelf import RunShelf, shelf_of
from elastic.observe.diagnosis.axis_rows import AxisRow
from elastic.observe.diagnosis.evidence import Evidence
from elastic.observe.diagnosis.verdicts import RunVerdict
from elastic.observe.trackers.tracker_process import NICE
from elastic.storage import Storage, open_storage
from elastic.types import Plan
from elastic.version import python_path

if TYPE_CHECKING:
    from elastic.observe.dashboard.dashboard_server import DashboardServer

END_S = 5.0  # that the server beside a driver may take to end
BESIDE = "--beside-driver"


@dataclass(frozen=True)
class DashboardOptions:
    """`beside_driver`: the run may not have begun, and the server ends when its standard input
    does: with the driver, however that ends."""

    host: str = "127.0.0.1"
    port: int | None = None  # None = the usual one, or any where that is taken
    storage: str | None = None
    beside_driver: bool = False


def dashboard(runs: Sequence[str], options: DashboardOptions, say: Callable[[str], None]) -> None:
    """Shows runs (none named: all of the storage folder) until it is interrupted; `say` is told the
    URL. Raises SpecError."""
    # its web framework takes 0.2 s to import
    from elastic.observe.dashboard.dashboard_server import DashboardServer, listening

    profiles = TracedProfiles()
    sources = PageSources(
        HolderWatch, profiles.verdicts, profiles.of, step_parts, profiles.communication
    )
    if options.beside_driver:
        os.nice(NICE)
    with listening(options.host, options.port) as place:
        if options.beside_driver:
            shelf = RunShelf(tuple(RunFolder.of(open_storage(run)) for run in runs), sources)
        else:
            shelf = shelf_of(list(runs), sources, options.storage)
            shelf.check()
        server = DashboardServer(shelf, place, options.host)
        asyncio.run(_serve(server, options.beside_driver, say))


async def _serve(server: DashboardServer, beside: bool, say: Callable[[str], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if beside:

        def wait() -> None:
            sys.stdin.read()
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait, name="elastic-driver-ends", daemon=True).start()
    say(server.url)
    await server.serve(stop, last_look=beside)


@dataclass
class TracedProfiles:
    """What profiles of runs say of their steps; each is read from storage once."""

    _known: dict[str, TracedStep] = field(default_factory=dict)

    def of(self, seen: Evidence, plan: Plan, storage: Storage) -> Mapping[str, float]:
        """Seconds of a step of the running plan by what they are for; {} = no profile was made."""
        return self._traced(seen, plan, storage).parts

    def communication(self, seen: Evidence, plan: Plan, storage: Storage) -> tuple[AxisRow, ...]:
        """Of the running plan, beside what is planned."""
        return communication(seen, plan, self._traced(seen, plan, storage))

    def verdicts(self, seen: Evidence, storage: Storage) -> tuple[RunVerdict, ...]:
        """As `elastic report` has them."""
        main = seen.main
        traced = self.of(seen, main.plan, storage) if main is not None else {}
        return diagnosed(seen, traced=traced)

    def _traced(self, seen: Evidence, plan: Plan, storage: Storage) -> TracedStep:
        main = seen.main
        if main is None or not main.profile or main.plan.generation != plan.generation:
            return TracedStep()
        key = storage.uri_of(main.profile)
        if key not in self._known:
            self._known[key] = traced_step(storage, main.profile)
        return self._known[key]


class DashboardBeside:
    """A dashboard in a process of its own, so that the driver's loop waits for no page. What it
    says, its URL or why there is none, is told by `say`."""

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        self._say = say
        words = [sys.executable, "-P", "-m", "elastic", "dashboard", run.uri, BESIDE]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,  # Ctrl-C is for the driver, which ends it at last
        )
        self._thread = threading.Thread(target=self._hear, name="elastic-dashboard", daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._say(line.rstrip())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(END_S)
