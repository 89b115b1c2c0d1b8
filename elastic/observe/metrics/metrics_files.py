"""Follows the journal of a run that is going on, in a thread of its own, and writes what each step
has told: a full disk or a slow callback never holds the driver up."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from elastic.ledger.heard_lines import HeardLines
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.metrics_csv import CSV, MetricsCsv
from elastic.observe.metrics.node_loads import NodeLoads, over_nodes
from elastic.observe.metrics.retried_writes import RetriedWrites
from elastic.observe.metrics.step_rows import Row, row
from elastic.observe.metrics.stored_copies import StoredCopies
from elastic.observe.metrics.tensorboard_files import TensorBoardFiles
from elastic.types import EnterPlan, Evaluated, PlanEntered, PlansFound, StepDone

log = logging.getLogger(__name__)

OnStep = Callable[[Row], Any]

FLUSH_S = 1.0
KEEP_S = 60.0  # between two copies into a storage that is no folder
CLOSE_MOST_S = 30.0  # of which a callback may need the most
PLANS_KEPT, STEPS_KEPT = 16, 4096


class MetricsFiles(HeardLines):
    """`on_step` is called with the row of each step, in order, when the next one has come: what is
    evaluated at a step is reported after it."""

    def __init__(self, run: RunFolder, on_step: OnStep | None = None) -> None:
        super().__init__(self._follow, "metrics", CLOSE_MOST_S, read=run.lines)
        self._run, self._on_step = run, on_step
        self._csv = RetriedWrites(self._table, partial(self._failed, CSV))
        # None: tensorboardX is not installed
        self._board: RetriedWrites[TensorBoardFiles] | None = RetriedWrites(
            lambda: TensorBoardFiles(run.folder), partial(self._failed, "TensorBoard's files")
        )
        self._copies = StoredCopies(run)
        self._copies_failed = False  # and that was said
        self._waiting: list[Row] = []  # of steps, the newest last
        self._workers: dict[int, int] = {}  # generation -> how many
        self._generation = self._tokens = self._step = 0
        self._tokens_at: deque[tuple[int, int]] = deque(maxlen=STEPS_KEPT)  # step, tokens up to it
        self._loads, self._drawn_at_s = NodeLoads(), 0.0  # what has come since is to be drawn
        self._live = False  # False: what is read was told by an earlier driver
        self._draws = False  # in TensorBoard
        self._flushed_s = self._kept_s = time.monotonic()

    # ----------------------------------------------------------------------------- in the thread

    def _follow(self) -> None:
        self._open()
        self._live = self._draws = True
        while self.take(FLUSH_S, self._take):
            now_s = time.monotonic()
            if now_s - self._flushed_s >= FLUSH_S:
                self._flushed_s = now_s
                self._flush(len(self._waiting) - 1)
            if now_s - self._kept_s >= KEEP_S:
                self._keep()
        self._flush(len(self._waiting))
        self._again(now=True)
        self._keep(last=True)

    def _table(self) -> MetricsCsv:
        self._run.folder.mkdir(parents=True, exist_ok=True)
        return MetricsCsv(self._run.folder)

    def _again(self, now: bool = False) -> None:
        """What could not be written; `now`: also where it was tried less than a minute ago."""
        self._csv.attempt(now)
        if self._board is not None:
            self._board.attempt(now)

    def _open(self) -> None:
        try:
            self._again()
        except ImportError:
            self._board = None
            log.info("no files for TensorBoard: pip install tensorboardX")
        if (last := self._last) is not None:
            self._step, self._tokens = int(last["step"]), int(last["tokens"])
        drawn = self._drawn
        self._draws = drawn is not None and not drawn.known
        self._copies = StoredCopies(self._run, drawn.names() if drawn is not None else ())
        try:
            for line in self._earlier():
                self._take(line)
        except Exception as error:  # noqa: BLE001 - storage, or a journal of another version
            self._missing("what earlier drivers did", error)
        self._before = ()
        self._flush(len(self._waiting))

    def _earlier(self) -> Iterable[Line]:
        """What earlier drivers wrote that the table may lack: the newest lines, or all, where the
        table ends before these begin (another machine wrote it, or an older version did not)."""
        state = self._before[0].state if self._before else None
        reached = int(state.get("step", 0)) if state is not None else 0
        return self._run.lines() if self._step < reached else self._before

    def _take(self, line: Line) -> None:
        if line.state is not None:
            self._begin_at(line.state)
        for at_s, event in line.events:
            self._loads.take(event, at_s)
            match event:
                case StepDone():
                    self._done(event, at_s)
                case PlanEntered():
                    self._generation = event.generation
                    self._undone_after(event.step)
                case Evaluated():
                    self._evaluated(event, at_s)
                case PlansFound(plans):
                    self._workers |= {plan.generation: len(plan.ranks) for plan in plans}
                case _:
                    pass
        for action in line.decision.actions if line.decision is not None else ():
            if isinstance(action, EnterPlan):
                self._workers[action.plan.generation] = len(action.plan.ranks)
        for old in list(self._workers)[:-PLANS_KEPT]:
            del self._workers[old]
        if len(self._waiting) > STEPS_KEPT:  # of a journal that is read at once
            self._flush(len(self._waiting) - 1)

    def _begin_at(self, state: Mapping[str, Any]) -> None:
        """Of the lines that it stands for only the plans are of use."""
        plans = state.get("plans", {})
        self._workers |= {int(number): len(plan["ranks"]) for number, plan in plans.items()}
        self._generation = (state.get("plan") or {}).get("generation", 0)

    def _done(self, event: StepDone, at_s: float) -> None:
        if event.step <= self._step or event.generation < self._generation:
            return
        self._step, self._tokens = event.step, self._tokens + event.tokens
        self._tokens_at.append((self._step, self._tokens))
        workers = self._workers.get(event.generation, 0)
        if (drawn := self._drawn) is not None:
            drawn.logged |= event.logged.keys()
        self._waiting.append(row(event, at_s=at_s, workers=workers, tokens=self._tokens))

    def _undone_after(self, step: int) -> None:
        if step >= self._step:
            return
        self._step = step
        self._waiting = [one for one in self._waiting if one["step"] <= step]
        self._csv.put(lambda csv: csv.cut(step))
        self._draw(TensorBoardFiles.cut)
        while self._tokens_at and self._tokens_at[-1][0] > step:
            self._tokens_at.pop()
        last = self._last
        in_file = int(last["tokens"]) if last is not None else 0
        self._tokens = self._tokens_at[-1][1] if self._tokens_at else in_file

    def _evaluated(self, event: Evaluated, at_s: float) -> None:
        for one in reversed(self._waiting):
            if one["step"] == event.step:
                one.update(event.metrics)
                return
        if event.step <= self._step:
            self._csv.put(lambda csv: csv.evaluated(event.step, event.metrics))
            if self._draws:
                self._draw(lambda board: board.add_values(event.step, at_s, event.metrics))

    def _flush(self, n: int) -> None:
        """The first n of what waits."""
        rows, self._waiting = self._waiting[: max(0, n)], self._waiting[max(0, n) :]
        self._again()
        if rows:
            self._csv.put(lambda csv: csv.add(rows), len(rows))
        if rows and self._draws:
            self._draw(lambda board: board.add_rows(rows), len(rows))
            if self._loads.at_s != self._drawn_at_s:
                self._drawn_at_s = self._loads.at_s
                seen = over_nodes(self._loads.of(self._loads.newest))
                at = rows[-1]["step"], rows[-1]["at_s"]
                self._draw(lambda board: board.add_values(*at, seen, part="system"))
        for one in rows if self._live else ():
            self._tell(one)

    def _tell(self, one: Row) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(dict(one))
        except Exception as error:  # noqa: BLE001 - a function of the user's
            log.warning("on_step is called no more, it raised %s: %s", type(error).__name__, error)
            self._on_step = None

    # ------------------------------------------------------------ what cannot be written is retried

    @property
    def _last(self) -> Row | None:
        """The newest row of the table."""
        return self._csv.made.last if self._csv.made is not None else None

    @property
    def _drawn(self) -> TensorBoardFiles | None:
        return self._board.made if self._board is not None else None

    def _draw(self, write: Callable[[TensorBoardFiles], object], n_rows: int = 1) -> None:
        if self._board is not None:
            self._board.put(write, n_rows)

    def _failed(self, what: str, error: Exception) -> None:
        self._missing(f"{what} for now", error)

    def _missing(self, what: str, error: Exception) -> None:
        run = self._run.name
        log.warning("%s: not in %s (%s); elastic report %s --csv has all", run, what, error, run)

    def _keep(self, last: bool = False) -> None:
        """Where the run is in object storage they go there too."""
        self._kept_s = time.monotonic()
        if not self._run.storage.remote:
            return
        drawn = self._drawn
        error = self._copies.send([CSV, *(drawn.names() if drawn is not None else ())], last=last)
        if error is not None and not self._copies_failed:
            text = "%s: %s and TensorBoard's files are not stored for now, which is retried (%s)"
            log.warning(text, self._run.name, CSV, error)
        self._copies_failed = error is not None
