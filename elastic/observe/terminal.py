"""Live progress on the terminal. A thread follows the journal file; where the output is no
terminal, plain lines."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.observe import node_speeds
from elastic.observe.event_messages import duration
from elastic.observe.plans.layout_drawing import draw, letters
from elastic.observe.run_view import Note, Tail, View
from elastic.policy.state.fold import Change
from elastic.text import n_of

LOOK_S = 0.25
PLAIN_EVERY_S = 5.0  # between two progress lines where there is no terminal
N_NOTES, N_LOST = 10, 3
KEPT = 200  # steps and notes that it remembers
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
    "RequestFailed": "yellow",
    "CopyFailed": "red",
    "CopySkipped": "yellow",
    "CopyDamaged": "bold red",
    "StopAsked": "yellow",
}
STATUS_STYLES = {
    "prepared": "green",
    "ready": "cyan",
    "draining": "yellow",
    "quarantined": "red",
    "lost": "dim strike",
}


class Terminal:
    """Shows a run from its journal until `stop`. Never raises into the run."""

    def __init__(self, journal: str | Path, stream: TextIO | None = None) -> None:
        self.view = View()
        self._tail = Tail(journal)
        self._console = Console(file=stream, highlight=False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="elastic-terminal", daemon=True)
        self._said_at_s = 0.0
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

    def start(self) -> None:
        """Show what comes from now on."""
        self._tail.skip()
        self._forget()
        self._thread.start()

    def stop(self) -> None:
        """Show what is left, then end."""
        self._stopping.set()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._tail.close()

    def _take(self) -> list[Note]:
        found = [note for line in self._tail.read() for note in self.view.add(line)]
        self._forget()
        return found

    def _forget(self) -> None:
        """A run of months takes as much memory as one of minutes."""
        del self.view.points[:-KEPT], self.view.notes[:-KEPT]

    def _follow(self) -> None:
        if self._console.is_terminal:
            with Live(
                console=self._console,
                refresh_per_second=4,
                transient=False,
                get_renderable=lambda: render(self.view),
            ):
                while not self._stopping.wait(LOOK_S):
                    self._take()
                    self._told()
                self._take()
                self._told()
        else:
            while not self._stopping.wait(LOOK_S):
                self._plain()
            self._plain(last=True)

    def _plain(self, last: bool = False) -> None:
        for note in self._take():
            self._print(plain_note(self.view, note))
        self._told()
        view = self.view
        if (
            view.points
            and not view.job.restarted  # a script prints its own
            and (last or view.at_s - self._said_at_s >= PLAIN_EVERY_S)
            and view.points[-1].at_s > self._said_at_s
        ):
            self._said_at_s = view.at_s
            self._print(progress_line(view))

    def _told(self) -> None:
        for _ in range(len(self._lines)):
            self._print(self._lines.popleft())

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


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


def render(view: View) -> RenderableType:
    """The whole picture: progress, layout, nodes, newest events."""
    top = Table.grid(expand=True, padding=(0, 2))
    top.add_column(ratio=1)
    top.add_column(ratio=1)
    top.add_row(_progress(view), _layout(view))
    why = Text(f"why: {view.reason}" if view.reason else "", style="italic")
    body = Group(top, Text(), _nodes(view), Text(), *_notes(view), Text(), why)
    return Panel(body, title=f"elastic  {view.state.run}", border_style="dim")


def _progress(view: View) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    loss = f"{view.points[-1].train_loss:.4f}" if view.points else "-"
    validation = (
        view.evaluations[max(view.evaluations)].get("validation_loss") if view.evaluations else None
    )
    speed = view.tokens_per_s()
    table.add_row(
        "", ProgressBar(total=max(1, view.steps), completed=min(view.step, view.steps), width=30)
    )
    table.add_row("step", f"{view.step} / {view.steps or '-'}   ({view.phase})")
    table.add_row(
        "train_loss", loss + (f"   validation {validation:.4f}" if validation is not None else "")
    )
    table.add_row("speed", f"{speed:,.0f} {view.unit}/s" if speed else "-")
    table.add_row(
        "checkpoint", f"step {view.saved_step}" if view.saved_step is not None else "none yet"
    )
    if view.state.usd or view.state.usd_per_h:
        table.add_row("dollars", _dollars(view))
    table.add_row("nodes", _by_pool(view) or "none")
    table.add_row("ETA", duration(view.eta_s()))
    return table


def _dollars(view: View) -> str:
    """`$3.12 of $20.00, $7.20 an hour`."""
    state, budget = view.state, view.job.budget_usd
    of = f" of ${budget:,.2f}" if budget is not None else ""
    return f"${state.usd_at(view.at_s):,.2f}{of}, ${state.usd_per_h:,.2f} an hour"


def _by_pool(view: View) -> str:
    """`spot 2, on-demand 1`: that are paid for."""
    return ", ".join(f"{pool} {n}" for pool, n in view.state.alive_by_pool.items())


def _names(view: View) -> dict[str, str]:
    return letters(list(view.nodes))


def _layout(view: View) -> RenderableType:
    if view.plan is None:
        return Text("no generation yet", style="dim")
    head = (
        f"generation {view.plan.generation}   {view.plan.layout}   "
        f"{n_of(len(view.plan.ranks), 'worker')}"
    )
    return Group(Text(head, style="bold"), *(Text(line) for line in draw(view.plan, _names(view))))


def _nodes(view: View) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    table.add_row(
        *(
            Text(head, style="dim")
            for head in ("", "node", "pool", "market", "workers", "speed", "samples", "status")
        )
    )
    names = _names(view)
    lost = [node for node in view.nodes.values() if node.status == "lost"]
    for node in [node for node in view.nodes.values() if node not in lost[:-N_LOST]]:
        pool = view.pools.get(node.pool)
        left = (
            f" {max(0.0, node.deadline_s - view.at_s):.0f} s" if node.deadline_s is not None else ""
        )
        status = Text(view.status(node) + left, style=STATUS_STYLES.get(node.status, ""))
        speed, n = (
            node_speeds.shown(view.node_speeds.of_node(view.nodes, node.node_id)),
            node_speeds.samples_of(view.plan, node.node_id),
        )
        kind = (node.pool, pool.market_type if pool else "-", str(node.gpus))
        table.add_row(
            *(
                Text(cell)
                for cell in (names[node.node_id], node.node_id, *kind, speed, str(n or "-"))
            ),
            status,
        )
    for name, count in view.wanted.items():
        if count:
            market = view.pools[name].market_type if name in view.pools else "-"
            table.add_row(
                "",
                "-",
                name,
                market,
                "-",
                "-",
                "-",
                Text(f"{n_of(count, 'node')} asked for", style="dim"),
            )
    return table


def _notes(view: View) -> list[Text]:
    return [
        Text(
            plain_note(view, note),
            style=STYLES.get(note.kind, ""),
            overflow="ellipsis",
            no_wrap=True,
        )
        for note in view.notes[-N_NOTES:]
    ]
