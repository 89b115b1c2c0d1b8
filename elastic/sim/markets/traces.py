"""How many nodes of a pool could be had, moment by moment: read from files, or from a past run.

Three kinds of files are read. JSON as the SkyPilot traces of "Can't Be Late" (Wu et al., NSDI 2024)
have it: `{"metadata": {"gap_seconds": 300}, "data": [4, 4, 3, ...]}`, one number for each tick. CSV
with the columns `at_s,nodes` (and `usd_per_node_h`, where the price changes too): from that second
on there are so many. CSV with the columns `at_s,event,node`, event being `add` or `remove`, as logs
of node groups have it.
"""

from __future__ import annotations

import csv
import io
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.types import DriverStarted, NodeLost, NodeReady, RequestFailed

ADD, REMOVE = "add", "remove"
LEVELS, EVENTS = ("at_s", "nodes"), ("at_s", "event", "node")
PRICE = "usd_per_node_h"
SHOWN = 80  # letters of what a file has in the place of columns
NODES_MOST = 10**6
GAP_LEAST_S = 1.0  # no cloud is asked more often
SECONDS_MOST = 1e11  # three thousand years
BIG_BYTES = 1 << 28  # a trace of three months in ticks of a minute is far below that


@dataclass(frozen=True)
class Trace:
    """A step function. `at_s`: when each stretch begins, the first at 0, rising; `nodes`: that can
    be had in it; `usd_per_node_h`: the price in it, empty = the pool's own; `ends_s`: where the
    trace ends, after which it begins anew. `tick_s`: so often it was looked, 0 = at every
    change. `of`: nodes that it is a share of, 0 = its most."""

    name: str
    at_s: tuple[float, ...]
    nodes: tuple[int, ...]
    ends_s: float
    usd_per_node_h: tuple[float, ...] = ()
    tick_s: float = 0.0
    of: int = 0

    @cached_property
    def most(self) -> int:
        """Nodes that were there at once: as many as were asked for, when it was recorded."""
        return self.of or max(self.nodes)

    @property
    def share(self) -> float:
        """Of its most nodes, those that are there on average."""
        ends = (*self.at_s[1:], self.ends_s)
        there = sum(n * (end - at) for n, at, end in zip(self.nodes, self.at_s, ends, strict=True))
        return there / (self.ends_s * self.most) if self.most else 0.0

    def _index(self, at_s: float) -> int:
        return bisect_right(self.at_s, at_s % self.ends_s) - 1

    def nodes_at(self, at_s: float) -> int:
        return self.nodes[self._index(at_s)]

    def usd_at(self, at_s: float) -> float | None:
        return self.usd_per_node_h[self._index(at_s)] if self.usd_per_node_h else None

    @property
    def mean_usd(self) -> float:
        """Where it has prices: their mean over the whole trace."""
        first = self.usd_per_node_h[0]
        same = all(usd == first for usd in self.usd_per_node_h)
        return first if same else self.usd_between(0.0, self.ends_s)[0]

    def usd_between(self, from_s: float, to_s: float) -> tuple[float, float]:
        """Where it has prices: their mean over that time, and the lowest at which it has a node
        then; infinite = it has none."""
        edges = [from_s, *(from_s + at_s for at_s in self.changes(from_s, to_s)), to_s]
        usd, paid, lowest = self.usd_per_node_h, 0.0, math.inf
        for begin_s, end_s in zip(edges, edges[1:], strict=False):
            if end_s > begin_s:
                k = self._index(0.5 * (begin_s + end_s))
                paid += usd[k] * (end_s - begin_s)
                lowest = min(lowest, usd[k]) if self.nodes[k] else lowest
        return paid / (to_s - from_s), lowest

    def changes(self, from_s: float, to_s: float) -> Iterable[float]:
        """Moments after `from_s`, up to `to_s`, at which another stretch begins; seconds after
        `from_s`."""
        turn = math.floor(from_s / self.ends_s)
        k = self._index(from_s) + 1
        while True:
            if k == len(self.at_s):
                turn, k = turn + 1, 0
            at_s = turn * self.ends_s + self.at_s[k]
            if at_s > to_s:
                return
            yield at_s - from_s
            k += 1

    def scaled(self, most: int) -> Trace:
        """The same share of `most` nodes, rounded down: a trace of one node says of each moment
        whether a whole pool can be had."""
        if not self.most or most == self.most:
            return self
        nodes = tuple(n * most // self.most for n in self.nodes)
        return merged(self.name, self.at_s, nodes, ends_s=self.ends_s, prices=self.usd_per_node_h)


def merged(
    name: str,
    at_s: Sequence[float],
    nodes: Sequence[int],
    *,
    ends_s: float,
    prices: Sequence[float] = (),
) -> Trace:
    """Neighboring stretches that are equal made one."""
    kept = [
        k
        for k in range(len(at_s))
        if k == 0 or nodes[k] != nodes[k - 1] or (len(prices) > 0 and prices[k] != prices[k - 1])
    ]
    return Trace(
        name,
        tuple(float(at_s[k]) for k in kept),
        tuple(nodes[k] for k in kept),
        ends_s,
        tuple(prices[k] for k in kept) if prices else (),
    )


# --------------------------------------------------------------------------------------- from files


def load_traces(path: str | Path) -> list[Trace]:
    """Of a file, or of all .json and .csv files in a folder, by name. Raises SpecError."""
    place = Path(path)
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in (".json", ".csv"))
        if not files:
            raise SpecError(f"{path}: no .json or .csv file in it; a trace is one of these")
        return [load_trace(file) for file in files]
    return [load_trace(place)]


def load_trace(file: str | Path) -> Trace:
    """Raises SpecError with file and place in it."""
    path = Path(file)
    try:
        if path.stat().st_size > BIG_BYTES:
            raise SpecError(f"{path}: larger than {BIG_BYTES >> 20} MiB; a trace is not that large")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read as a trace: {error}") from None
    if not text.strip():
        raise SpecError(f"{path}: it is empty; a trace has at least one tick")
    if text.lstrip().startswith("{"):
        return _of_ticks(path, text)
    return _of_rows(path, text)


def _of_ticks(path: Path, text: str) -> Trace:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: no JSON: {error}") from None
    metadata = found.get("metadata") if isinstance(found, dict) else None
    gap_s: Any = metadata.get("gap_seconds") if isinstance(metadata, Mapping) else None
    if not _is_number(gap_s) or not GAP_LEAST_S <= gap_s <= SECONDS_MOST:
        raise SpecError(
            f"{path}: metadata.gap_seconds is {str(gap_s)[:SHOWN]}; it must be the seconds of a "
            f"tick, from {GAP_LEAST_S:g} to {SECONDS_MOST:g}"
        )
    data = found.get("data")
    if not isinstance(data, list) or not data:
        raise SpecError(f"{path}: data must be a list of at least one number of nodes")
    nodes = [_count(path, f"data[{k}]", value) for k, value in enumerate(data)]
    at_s = [k * float(gap_s) for k in range(len(nodes))]
    trace = merged(path.stem, at_s, nodes, ends_s=len(nodes) * float(gap_s))
    return _some(path, replace(trace, tick_s=float(gap_s)))


def _of_rows(path: Path, text: str) -> Trace:
    reader = csv.DictReader(io.StringIO(text))
    try:
        columns = tuple(reader.fieldnames or ())
        rows = list(reader)
    except csv.Error as error:
        raise SpecError(f"{path}, line {reader.line_num}: no CSV: {error}") from None
    for k, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SpecError(f"{path}, line {k}: it has not {len(columns)} cells, as the first line")
    if all(name in columns for name in EVENTS):
        return _some(path, _of_events(path, rows))
    if not all(name in columns for name in LEVELS):
        raise SpecError(
            f"{path}: its columns are {', '.join(columns)[:SHOWN]}; a trace has "
            f"{', '.join(LEVELS)} (and {PRICE}), or {', '.join(EVENTS)}"
        )
    if len(rows) < 2:
        raise SpecError(f"{path}: {len(rows)} rows; a trace has two at least, the last is its end")
    at_s: list[float] = []
    nodes: list[int] = []
    prices: list[float] = []
    for k, row in enumerate(rows, 2):
        at_s.append(_moment(path, k, row["at_s"], after=at_s[-1] if at_s else None))
        nodes.append(_count(path, f"line {k}, nodes", _value(row["nodes"])))
        if PRICE in columns:
            prices.append(_price(path, k, row[PRICE]))
    start_s = at_s[0]
    return _some(
        path,
        merged(
            path.stem,
            [one - start_s for one in at_s[:-1]],
            nodes[:-1],
            ends_s=at_s[-1] - start_s,
            prices=prices[:-1],
        ),
    )


def _of_events(path: Path, rows: Sequence[Mapping[str, str]]) -> Trace:
    there: set[str] = set()
    at_s: list[float] = []
    nodes: list[int] = []
    last: float | None = None
    for k, row in enumerate(rows, 2):
        last = _moment(path, k, row["at_s"], after=last, equal=True)
        event, node = (row["event"] or "").strip(), (row["node"] or "").strip()
        if event not in (ADD, REMOVE):
            raise SpecError(
                f"{path}, line {k}: event is '{event[:SHOWN]}'; it must be add or remove"
            )
        if (event == ADD) == (node in there):
            what = "is there already" if event == ADD else "is not there"
            raise SpecError(f"{path}, line {k}: node '{node[:SHOWN]}' {what}")
        there ^= {node}
        if at_s and at_s[-1] == last:
            nodes[-1] = len(there)
        else:
            at_s.append(last)
            nodes.append(len(there))
    if len(at_s) < 2:
        raise SpecError(f"{path}: {len(at_s)} moments; a trace has two at least")
    start_s = at_s[0]
    return merged(
        path.stem, [one - start_s for one in at_s[:-1]], nodes[:-1], ends_s=at_s[-1] - start_s
    )


def _some(path: Path, trace: Trace) -> Trace:
    if not trace.most:
        raise SpecError(f"{path}: it never has a node; nothing could ever run on it")
    return trace


def _value(text: Any) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return True
    return isinstance(value, float) and math.isfinite(value)


def _count(path: Path, where: str, value: Any) -> int:
    if not _is_number(value) or not 0 <= value <= NODES_MOST or value != int(value):
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        raise SpecError(
            f"{path}: {where} is {shown[:SHOWN]}; it must be a whole number of nodes, from 0 to "
            f"{NODES_MOST:,}"
        )
    return int(value)


def _moment(path: Path, line: int, text: str, *, after: float | None, equal: bool = False) -> float:
    value = _value(text)
    if not _is_number(value) or abs(value) > SECONDS_MOST:
        raise SpecError(f"{path}, line {line}: at_s is '{text[:SHOWN]}'; it must be seconds")
    if after is not None and (value < after or (value == after and not equal)):
        raise SpecError(f"{path}, line {line}: at_s is {value:g} after {after:g}; times must rise")
    return float(value)


def _price(path: Path, line: int, text: str) -> float:
    value = _value(text)
    if not _is_number(value) or value < 0:
        raise SpecError(
            f"{path}, line {line}: {PRICE} is '{text[:SHOWN]}'; it must be dollars, 0 or more"
        )
    return float(value)


# ---------------------------------------------------------------------------------- from a past run


def of_run(lines: Iterable[Line]) -> dict[str, Trace]:
    """What a run has seen of each of its spot pools: all that it may have, but while the pool said
    no, or has just taken a node, only what it had. Raises SpecError where no time passed."""
    most: dict[str, int] = {}
    have: dict[str, set[str]] = {}
    steps: dict[str, list[tuple[float, int]]] = {}
    start_s = end_s = None
    for line in lines:
        for at_s, event in line.events:
            start_s, end_s = at_s if start_s is None else start_s, at_s
            if isinstance(event, DriverStarted):
                spot = [pool for pool in event.pools if pool.market_type == "spot"]
                most.update({pool.name: pool.max_nodes for pool in spot})
                continue
            name = _pool_of(event, have)
            if name not in most:
                continue
            nodes = have.setdefault(name, set())
            if isinstance(event, NodeReady):
                nodes.add(event.node.node_id)
            elif isinstance(event, NodeLost):
                nodes.discard(event.node_id)
            dry = isinstance(event, RequestFailed) or (
                isinstance(event, NodeLost) and event.cause != "released"
            )
            there = len(nodes) if dry else most[name]
            steps.setdefault(name, []).append((at_s, there))
    if start_s is None or end_s is None or end_s <= start_s:
        raise SpecError("no time passes in this journal; a trace has two moments at least")
    found = {}
    for name, n in most.items():
        rows = [(start_s, n), *steps.get(name, [])]
        at = [at_s - start_s for at_s, _ in rows]
        found[name] = merged(name, at, [there for _, there in rows], ends_s=end_s - start_s)
    return found


def _pool_of(event: Any, have: Mapping[str, set[str]]) -> str:
    if isinstance(event, NodeReady):
        return event.node.pool
    if isinstance(event, NodeLost):
        return next((name for name, nodes in have.items() if event.node_id in nodes), "")
    return event.pool if isinstance(event, RequestFailed) else ""
