"""Live progress on the terminal. A thread takes the journal's lines; where the output is no
terminal, plain lines."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.ledger.heard_lines import HeardLines
from elastic.ledger.journal import Line
from elastic.observe import picture_parts
from elastic.observe.accounting.accounts import Books
from elastic.observe.picture_parts import Printable
from elastic.observe.run_tables import paid, spending
from elastic.observe.run_view import Note, View
from elastic.policy.state.fold import Change, changes
from elastic.text import duration, printable, program_output

LOOK_S = 0.25
STOP_MOST_S = 5.0
PLAIN_EVERY_S = 5.0  # between two progress lines where there is no terminal
N_NOTES, N_NODES, N_LOST = 10, 12, 3
MOST_NOTE_LINES = 12  # of the notes together: the newest ones, whole
HANGING = " " * 25  # before what a note has beyond its first line: under its text
ROOMY = 84  # columns, from which on two things stand side by side
STEPS_KEPT = 1000  # that may still be undone; see Books
ACCOUNT_S = 2.0  # between two accounts
START_LEAST_S = 0.5  # of a phase of a run's start that has a line
DOING_AFTER_S = 2.0  # that such a phase is under way is told
KEPT = 200  # steps, notes and evaluations that it remembers
KEPT_GONE = 50  # nodes, the newest
KEPT_PLANS = 16  # of the newest generations: each names up to thousands of ranks
MOST_LINES = 2000  # of the workers' output that wait to be shown
STYLES = {
    "Decision": "cyan",
    "Notice": "yellow",
    "NodeLost": "red",
    "WorkerFailed": "red",
    "Silent": "red",
    "PlanFailed": "red",
    "DigestChecked": "bold red",
    "DrillAsked": "magenta",
    "PlanEntered": "bold green",
    "Evaluated": "blue",
    "SharesSet": "green",
    "ModelNoted": "yellow",
    "WrongNumbers": "bold red",
    "DeviceNoted": "yellow",
    "PinningFailed": "yellow",
    "NodesMute": "yellow",
    "RequestFailed": "yellow",
    "CopyFailed": "red",
    "CopySkipped": "yellow",
    "CopyDamaged": "bold red",
    "StopAsked": "yellow",
}


class Terminal:
    """Shows a run by its journal's lines until `stop`. `read`: see HeardLines. Never raises into
    the run."""

    def __init__(
        self, stream: TextIO | None = None, read: Callable[[], Iterable[Line]] = tuple
    ) -> None:
        self.view = View()
        self._books = Books(keeps=STEPS_KEPT)
        self._goodput: float | None = None
        self._accounted_s = float("-inf")
        self._console = Console(file=stream, highlight=False)
        self._heard = HeardLines(self._follow, "elastic-terminal", STOP_MOST_S, read=read)
        self._said_at_s = 0.0
        # what is waited for, as it was printed last, and when anything was
        self._reason, self._printed_s = "", time.monotonic()
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._kept: deque[str] = deque(maxlen=50)

    def say(self, line: str) -> None:
        """A line of the workers' output, shown soon."""
        self._lines.append(line)
        self._kept.append(line)

    def has_said(self, text: str) -> bool:
        """Was one of the last lines of the workers' output this text?"""
        return any(line.endswith(text) for line in self._kept)

    def earlier(self, change: Change) -> None:
        """What the journal holds already is taken in silently: an earlier driver showed it."""
        self.view.take(change)
        if self._console.is_terminal:
            self._books.take(change)

    def start(self) -> None:
        """Show what is heard."""
        self._forget()
        self._heard.start()

    def hear(self, line: Line) -> None:
        self._heard.hear(line)

    def stop(self) -> None:
        """Show what is left, then end."""
        self._heard.close()

    def _take(self, line: Line) -> None:
        for change in changes((line,), self.view.state):
            self.earlier(change)

    def _account(self, last: bool) -> None:
        """In the thread that takes lines in: the picture is drawn by another."""
        now_s = time.monotonic()
        if last or now_s - self._accounted_s >= ACCOUNT_S:
            self._accounted_s = now_s
            totals = self._books.so_far().totals
            self._goodput = totals.goodput if totals.gpu_seconds else None

    def _forget(self) -> None:
        """A run of months takes as much memory as one of minutes."""
        view = self.view
        del view.points[:-KEPT], view.notes[:-KEPT], view.entered[:-KEPT_PLANS]
        view.noise.clear()
        view.forget_nodes(KEPT_GONE)
        bounds: tuple[tuple[dict[int, Any], int], ...] = (
            (view.planned, KEPT_PLANS), (view.orders, KEPT_PLANS), (view.lost, KEPT_PLANS),
            (view.evaluations, KEPT),
        )  # fmt: skip
        for known, n in bounds:
            for number in sorted(known)[:-n]:
                del known[number]

    def _follow(self) -> None:
        if self._console.is_terminal:
            with Live(
                console=self._console,
                refresh_per_second=4,
                transient=False,
                get_renderable=lambda: Printable(LivePicture(self.view, self._goodput)),
            ):
                more = True
                while more:
                    more = self._heard.take(LOOK_S, self._take)
                    self._forget()
                    self._account(last=not more)
                    self._told()
        else:
            while self._plain():
                pass

    def _plain(self) -> bool:
        """False: no more will come."""
        n_before = len(self.view.notes)
        more = self._heard.take(LOOK_S, self._take)
        for note in self.view.notes[n_before:]:
            self._print(plain_note(self.view, note))
            self._reason = note.text if note.kind == "Decision" else self._reason
        self._told()
        view = self.view
        quiet_s = time.monotonic() - self._printed_s
        if view.phase == "waiting" and view.reason != self._reason and quiet_s >= PLAIN_EVERY_S:
            self._reason = view.reason
            self._print(plain_note(view, Note(view.at_s, view.step, "Decision", view.reason)))
        if (
            view.points
            and not view.job.restarted  # a script prints its own
            and (not more or view.at_s - self._said_at_s >= PLAIN_EVERY_S)
            and view.points[-1].at_s > self._said_at_s
        ):
            self._said_at_s = view.at_s
            self._print(progress_line(view))
        self._forget()
        return more

    def _told(self) -> None:
        for _ in range(len(self._lines)):
            # its colors become those that this terminal has
            shown = program_output(self._lines.popleft(), colored=True)
            self._print(Text.from_ansi(shown))

    def _print(self, text: str | Text) -> None:
        self._printed_s = time.monotonic()
        shown = text if isinstance(text, Text) else Text(printable(text))
        self._console.print(shown, soft_wrap=True)


@contextmanager
def start_line(what: str, stream: TextIO | None, *, doing: str = "") -> Iterator[None]:
    """While a run starts and there is nothing to draw yet: what has taken how long, in a line.
    `doing`: the same of what is not over yet, said once where it takes a while. `stream`: None =
    nobody looks."""
    began_s = time.monotonic()
    slow = threading.Timer(DOING_AFTER_S, print, (f"start: {doing} ...",), {"file": stream})
    slow.daemon = True
    if doing and stream is not None:
        slow.start()
    try:
        yield
    finally:
        slow.cancel()
    took_s = time.monotonic() - began_s
    if stream is not None and took_s >= START_LEAST_S:
        print(f"start: {what} in {took_s:.1f} s", file=stream, flush=True)


def plain_note(view: View, note: Note) -> str:
    """`   12.3 s  step 40  > reason` (a decision), or an event."""
    mark = "> " if note.kind == "Decision" else ""
    return f"{note.at_s - view.started_at_s:8.1f} s  step {note.step:<5} {mark}{note.text}"


def progress_line(view: View) -> str:
    """One line: step, loss, speed, layout, ETA."""
    point = view.points[-1]
    speed = view.tokens_per_s()
    return (
        f"{view.at_s - view.started_at_s:8.1f} s  step {view.step}/{view.steps}  train_loss "
        f"{point.train_loss:.4f}  {speed or 0:,.0f} {view.unit}/s  "
        f"{view.plan.layout if view.plan else '-'}  ETA {duration(view.eta_s())}"
    )


@dataclass(frozen=True)
class LivePicture:
    """The whole picture: progress, layout, nodes, newest events. `goodput`: None = nothing was paid
    for yet."""

    view: View
    goodput: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, roomy = self.view, options.max_width >= ROOMY
        width = options.max_width - 4  # of the panel
        layout = Group(*picture_parts.layout_lines(view, width // 2 if roomy else width))
        if roomy:
            top = Table.grid(expand=True, padding=(0, 2))
            top.add_column(ratio=1)
            top.add_column(ratio=1)
            top.add_row(self._progress(), layout)
            above: list[RenderableType] = [top]
        else:
            above = [self._progress(), Text(), layout]
        why = Text(f"why: {view.reason}" if view.reason else "", style="italic")
        body = Group(
            *above, Text(), *_nodes(view, roomy), Text(), *_notes(view, console, width), Text(), why
        )
        yield Panel(body, title=Text(f"elastic  {view.state.run}"), border_style="dim")

    def _progress(self) -> RenderableType:
        view, table = self.view, Table.grid(padding=(0, 2))
        loss = f"{view.points[-1].train_loss:.4f}" if view.points else "-"
        validation = view.validation_loss
        speed = view.tokens_per_s()
        done = min(view.step, view.steps)
        bar = ProgressBar(
            total=max(1, view.steps), completed=done, width=30, complete_style="green"
        )
        table.add_row("", bar)
        rows = [
            ("step", f"{view.step} / {view.steps or '-'}   ({view.phase})"),
            (
                "train_loss",
                loss + ("" if validation is None else f"   validation {validation:.4f}"),
            ),
            ("speed", f"{speed:,.0f} {view.unit}/s" if speed else "-"),
            ("goodput", f"{self.goodput:.0%}" if self.goodput is not None else "-"),
            ("checkpoint", "none yet" if view.saved_step is None else f"step {view.saved_step}"),
            *([("dollars", spending(view))] if paid(view) else []),
            # that are paid for
            ("nodes", ", ".join(f"{p} {n}" for p, n in view.state.alive_by_pool.items()) or "none"),
            ("ETA", duration(view.eta_s())),
        ]
        for name, shown in rows:
            table.add_row(name, Text(shown))
        return table


def _nodes(view: View, roomy: bool) -> Iterator[RenderableType]:
    """Each of a few; of many, how many there are by pool and state, and those that change."""
    lost = [name for name, node in view.nodes.items() if node.status == "lost"]
    old = {*lost[:-N_LOST]}
    shown = [node for name, node in view.nodes.items() if name not in old]
    many = len(shown) > N_NODES
    if many:
        shown = [node for node in shown if node.status not in ("prepared", "lost")][:N_NODES]
    if many or any(view.wanted.values()):
        yield picture_parts.pools_table(view)
        if shown:
            yield Text()
    if shown:
        yield picture_parts.nodes_table(view, shown, roomy)


def _notes(view: View, console: Console, width: int) -> list[Text]:
    """The newest ones, each to its end: as many as there is room for."""
    shown: list[Text] = []
    for note in reversed(view.notes[-N_NOTES:]):
        whole = plain_note(view, note)
        first = Text(whole).wrap(console, width)[0]
        rest = Text(whole[len(first) :].lstrip()).wrap(console, max(1, width - len(HANGING)))
        lines = [first, *(Text(HANGING) + line for line in rest if line.plain)]
        if shown and len(shown) + len(lines) > MOST_NOTE_LINES:
            break
        for line in lines:
            line.stylize(STYLES.get(note.kind, ""))
        shown[:0] = lines
    return shown
