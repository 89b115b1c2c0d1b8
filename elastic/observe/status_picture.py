"""`elastic status` on a terminal: how the run stands, its layout, its nodes, what it cost, what
changed it last, and what it is bound by. As wide as the terminal; without one it is plain text
(run_tables)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from elastic.observe import picture_parts, run_tables
from elastic.observe.accounting.accounts import Account
from elastic.observe.accounting.transitions import Transition
from elastic.observe.diagnosis.verdicts import RunVerdict, percent
from elastic.observe.picture_parts import share_bar, table_of, trend
from elastic.observe.reporting.run_seen import RunStanding
from elastic.observe.run_view import View
from elastic.observe.why_lines import when
from elastic.text import duration

WIDE = 116  # columns, from which on two tables stand side by side
ROOMY = 84  # from which on a table has all of its columns
TREND = 24
NODES_ROOMY = 64
MOST_NODES, MOST_TRANSITIONS, MOST_VERDICTS = 12, 5, 3
PHASES = {
    "running": ("▶", "green"), "succeeded": ("✓", "green"), "entering": ("↻", "cyan"),
    "waiting": ("…", "cyan"), "stopping": ("■", "yellow"), "stopped": ("■", "yellow"),
    "failed": ("✕", "red"), "interrupted": ("!", "red"),
}  # fmt: skip


@dataclass(frozen=True)
class StatusPicture:
    """`holder`: the driver that runs it now, '' = none."""

    seen: RunStanding
    holder: str
    verdicts: Sequence[RunVerdict]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        view, books, driven = self.seen.view, self.seen.account, bool(self.holder)
        yield Rule(self._title(), align="left", style="dim")
        yield self._standing(width)
        if width >= WIDE:
            half = width // 2 - 2
            grid = Table.grid(expand=True, padding=(0, 2))
            grid.add_column(ratio=1)
            grid.add_column(ratio=1)
            capacity = Group(*_capacity(view, half, driven))
            grid.add_row(capacity, Group(*_money(view, books, half, driven=driven)))
            yield grid
        else:
            yield from _capacity(view, width, driven)
            yield from _money(view, books, width, driven=driven)
        yield from _transitions(view, books.transitions, width)
        yield from self._bound()

    def _title(self) -> Text:
        view = self.seen.view
        phase = run_tables.phase(view, bool(self.holder))
        glyph, style = PHASES.get(phase, ("", ""))
        driver = f"driven by {self.holder}" if self.holder else ""
        epoch = f"epoch {view.state.epoch}" if view.state.epoch > 1 else ""
        more = "  ·  ".join(word for word in (f"job {view.job.name or '-'}", epoch, driver) if word)
        return Text.assemble(
            (f"{view.state.run}  ", "bold"), (f"{glyph} {phase}  ", f"bold {style}"), (more, "dim")
        )

    def _standing(self, width: int) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        for name, shown in self._rows(width):
            table.add_row(name, Text(shown) if isinstance(shown, str) else shown)
        return table

    def _rows(self, width: int) -> Iterator[tuple[str, RenderableType]]:
        view, totals, steps = self.seen.view, self.seen.account.totals, self.seen.trend
        yield "step", _steps(view, width, bool(self.holder))
        if (loss := run_tables.loss(view)) is not None:
            yield "train_loss", f"{loss:.4f}  {trend(steps.losses, TREND)}".rstrip()
        for step, found in list(view.evaluations.items())[-1:]:
            for name, value in found.items():
                yield name, f"{value:.4f} at step {step}"
        speed = totals.tokens_per_s if view.ended else view.tokens_per_s()
        if speed:
            each = view.step_time_s()
            step_s = f"  {each:.3g} s a step" if each else ""
            yield f"{view.unit}/s", f"{speed:,.0f}  {trend(steps.rates, TREND)}{step_s}"
        yield from run_tables.standing(view)

    def _bound(self) -> Iterator[RenderableType]:
        if not self.verdicts:
            return
        yield _heading("bound by")
        for one in self.verdicts[:MOST_VERDICTS]:
            text = Text.assemble((one.bound, "bold yellow"), f"{one.won}: {one.number}")
            text.append(f"\n→ {one.advice}", style="dim")
            yield Padding(text, (0, 0, 0, 2))


def _heading(title: str, more: str = "") -> RenderableType:
    return Text.assemble("\n", (title, "bold"), (f"  {more}" if more else "", "dim"))


def _steps(view: View, width: int, driven: bool) -> RenderableType:
    """A bar where the end is known, and when that is, where somebody drives the run."""
    if not view.steps:
        return Text(view.progress)
    room = max(8, min(40, width // 4))
    bar = ProgressBar(
        total=view.steps, completed=min(view.step, view.steps), width=room, complete_style="green"
    )
    eta = f"  ETA {duration(view.eta_s())}" if driven and not view.ended else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_row(bar, Text(f"{view.place} ({view.step / view.steps:.0%}){eta}"))
    return grid


def _capacity(view: View, width: int, driven: bool) -> Iterator[RenderableType]:
    """The layout, nodes by pool and state, and each of a few, or those that are worth a word."""
    if view.plan is not None and not view.ended:
        yield _heading("layout")
        for line in picture_parts.layout_lines(view, width):
            yield Padding(line, (0, 0, 0, 2))
    if view.nodes or view.pools:
        yield _heading("nodes")
        yield Padding(picture_parts.pools_table(view, driven), (0, 0, 0, 2))
    here = [node for node in view.nodes.values() if view.status(node) not in ("lost", "released")]
    known = view.node_speeds.whys(view.node_speeds.by_node(view.nodes))
    whys = {node.node_id: known.get(node.node_id, "") for node in here}
    shown = [
        node
        for node in here
        if len(here) <= MOST_NODES or whys[node.node_id] or node.status != "prepared"
    ]
    if shown:
        yield Padding(
            picture_parts.nodes_table(view, shown[:MOST_NODES], width >= NODES_ROOMY), (1, 0, 0, 2)
        )
    if len(shown) > MOST_NODES:
        yield Padding(Text(f"and {len(shown) - MOST_NODES} more", style="dim"), (0, 0, 0, 2))
    for name, why in [(name, why) for name, why in whys.items() if why][:MOST_NODES]:
        yield Padding(Text(f"{name}: {why}", style="yellow"), (0, 0, 0, 2))


def _money(view: View, books: Account, width: int, *, driven: bool) -> Iterator[RenderableType]:
    """Goodput and dollars by category, the dearest first."""
    whole = sum(books.gpu_seconds.values())
    bill = sum(books.usd.values())
    priced, digits = bill > 0, 2 if bill >= 10 else 4
    if not whole and not priced:
        return
    more = f"goodput {percent(books.totals.goodput)}"
    spent = f"  ·  {run_tables.spending(view, driven)}" if priced else ""
    yield _heading("time and money", more + spent)
    names = sorted(books.gpu_seconds, key=lambda n: (-books.gpu_seconds[n], -books.usd[n]))
    room = max(6, min(30, width - 52))
    per, unit = (3600.0, "GPU-h") if whole >= 3600 else (1.0, "GPU-s")
    heads, rows = ("category", "share", unit, *(["dollars"] if priced else []), ""), []
    for name in names:
        gpu_s, usd = books.gpu_seconds[name], books.usd[name]
        share = gpu_s / whole if whole else 0.0
        if share < 0.0005 and usd < 0.00005:
            continue
        paid = [f"{usd:,.{digits}f}"] if priced else []
        bar = Text(share_bar(share, room), style="green" if name == "productive" else "yellow")
        rows.append((name, f"{100 * share:.1f} %", f"{gpu_s / per:,.2f}", *paid, bar))
    yield Padding(table_of(heads, rows, right=range(1, len(heads) - 1)), (0, 0, 0, 2))


def _transitions(view: View, found: Sequence[Transition], width: int) -> Iterator[RenderableType]:
    """The last ones, each with why it was ordered."""
    if not found:
        return
    more = f"the last {MOST_TRANSITIONS} of {len(found)}" if len(found) > MOST_TRANSITIONS else ""
    yield _heading("transitions", more)
    narrow = ["gen", "cause", "pause", "why"]
    roomy = ["gen", "at", "step", "layout", "cause", "pause", "lost", "why"]
    heads, rows = roomy if width >= ROOMY else narrow, []
    for one in found[-MOST_TRANSITIONS:]:
        cause = Text(one.cause, style="red" if one.cause == "loss" else "")
        known = {
            "gen": one.generation, "at": when(view, one.at_s), "step": one.at_step,
            "layout": one.to_layout, "cause": cause, "pause": f"{one.pause_s:.2f} s",
            "lost": one.steps_lost or "·", "why": view.orders.get(one.generation, ""),
        }  # fmt: skip
        rows.append([known[head] for head in heads])
    yield Padding(table_of(heads, rows), (0, 0, 0, 2))
