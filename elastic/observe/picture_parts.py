"""What the pictures of a run on a terminal are made of: the live one, and that of `elastic status`.
What a run says goes in as text, never as markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from elastic.observe import node_speeds
from elastic.observe.plans.layout_drawing import draw, letters
from elastic.observe.run_view import View
from elastic.text import n_of, printable
from elastic.types import Node

MOST_DRAWN = 64  # ranks; more are a text of their own
STATES = ("prepared", "ready", "pending", "draining", "quarantined", "released", "lost")
STATUS_STYLES = {
    "prepared": "green",
    "ready": "cyan",
    "draining": "yellow",
    "quarantined": "red",
    "lost": "dim strike",
    "released": "dim",
}
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Printable:
    """A picture in which nothing that a run says commands the terminal; its colors do."""

    picture: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.picture, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def table_of(
    heads: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()
) -> Table:
    """A table without lines but below its head. The last column gives way: it is cut where the
    others need the room."""
    texts = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", border_style="dim"
    )
    *others, last = range(len(heads))
    for k in others:
        widest = max([cell_len(heads[k]), *(row[k].cell_len for row in texts)])
        table.add_column(
            heads[k], justify="right" if k in right else "left", no_wrap=True, width=widest
        )
    # the one that rich may make narrower: its cells are cut instead of wrapped
    table.add_column(heads[last], justify="right" if last in right else "left")
    for row in texts:
        row[last].no_wrap, row[last].overflow = True, "ellipsis"
        table.add_row(*row)
    return table


def layout_lines(view: View, width: int) -> list[Text]:
    """The running generation, and its grid as far as that can be drawn so wide."""
    plan = view.plan
    if plan is None:
        return [Text("no generation yet", style="dim")]
    workers = n_of(len(plan.ranks), "worker")
    head = Text(f"generation {plan.generation}   {plan.layout}   {workers}", style="bold")
    if len(plan.ranks) > MOST_DRAWN:
        return [head]
    grid = draw(plan, letters(list(view.nodes)))
    drawn = [Text(line, no_wrap=True, overflow="ellipsis") for line in grid]
    return [head, *(drawn if max(map(len, grid)) <= 2 * width else ())]


def pools_table(view: View, driven: bool = True) -> Table:
    """Nodes by pool and state, those that are requested, and what a pool's nodes cost now, where
    somebody drives the run."""
    costs = driven and not view.ended
    by_pool: dict[str, Counter[str]] = {name: Counter() for name in view.pools}
    known = Counter((node.pool, view.status(node)) for node in view.nodes.values())
    for (name, state), n in (known + Counter(view.forgotten)).items():
        by_pool.setdefault(name, Counter())[state] = n
    seen = [state for state in STATES if any(counts[state] for counts in by_pool.values())]
    asked = {name: n for name, n in view.wanted.items() if n}
    more = (*(["requested"] if asked else []), *(["$/h"] if costs else []))
    heads, rows = ("pool", "market", *seen, *more), []
    for name, counts in by_pool.items():
        pool = view.pools.get(name)
        cells = [
            Text(str(counts[state] or "·"), style=_count_style(state, counts[state]))
            for state in seen
        ]
        cells += [Text(str(asked.get(name, "·")), style="dim")] if asked else []
        n_paid = view.state.alive_by_pool.get(name, 0)
        usd_per_h = n_paid * pool.usd_per_node_h if pool is not None else 0.0
        paid = [f"{usd_per_h:,.2f}" if usd_per_h else "-"] if costs else []
        rows.append((name, pool.market_type if pool else "-", *cells, *paid))
    return table_of(heads, rows, right=range(2, len(heads)))


def _count_style(state: str, n: int) -> str:
    return STATUS_STYLES.get(state, "") if n and state != "lost" else "dim"


def deadline(view: View, node: Node) -> str:
    """`draining 28 s`: its state, and how long it has."""
    left = "" if node.deadline_s is None else f" {max(0.0, node.deadline_s - view.at_s):.0f} s"
    return view.status(node) + left


def nodes_table(view: View, nodes: Sequence[Node], wide: bool) -> Table:
    """A row for each; the letters are those of the drawn layout."""
    names = letters(list(view.nodes))
    speeds, rows = view.node_speeds.by_node(view.nodes), []
    samples = node_speeds.samples_by_node(view.plan)
    for node in nodes:
        speed = node_speeds.shown(speeds[node.node_id])
        state = Text(deadline(view, node), style=STATUS_STYLES.get(view.status(node), ""))
        more = (str(node.gpus), speed, str(samples[node.node_id] or "-")) if wide else ()
        rows.append((names[node.node_id], node.node_id, node.pool, *more, state))
    heads = ("workers", "speed", "samples") if wide else ()
    return table_of(("", "node", "pool", *heads, "state"), rows)


def trend(values: Sequence[float], width: int) -> str:
    """`▇▅▃▁`: means of as many stretches, between the least and the largest of them."""
    known = [value for value in values if isfinite(value)]
    n = min(width, len(known))
    if n < 2:
        return ""
    edges = [round(k * len(known) / n) for k in range(n + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high <= low:
        return BLOCKS[3] * n
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * (mean - low) / (high - low))] for mean in means)


def share_bar(share: float, width: int) -> str:
    """At least one sign for what is there at all."""
    return "━" * max(1 if share > 0 else 0, round(width * min(1.0, share)))
