"""What a person sees of nodes that are not equally fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.observe.small_run import PLANS, lines, tick, workers

from elastic.ledger.journal import parse_line, write_line
from elastic.observe import node_speeds, run_tables
from elastic.observe.accounting.accounts import account
from elastic.observe.dashboard.drawn_cluster import cluster
from elastic.observe.reporting.run_seen import seen_of
from elastic.observe.run_view import MOST_GONE, View, view_of
from elastic.observe.status_picture import _capacity
from elastic.types import (
    DeviceNoted,
    Event,
    Node,
    NodeLost,
    NodeReady,
    Quarantine,
    RanksTimed,
    SharesSet,
    Silent,
    StepDone,
    WorkerId,
    WrongNumbers,
)

A1 = WorkerId("a", 1)


def view_with(*events: Event) -> View:
    """After the first two steps of the small run, on the nodes a, b and c of two workers each."""
    return view_of([*lines()[:6], tick(5.2, *events)])


def timed(**unit_s: tuple[float, float]) -> RanksTimed:
    return RanksTimed(
        1,
        8,
        3,
        tuple(unit_s[worker.node_id][worker.local_rank] for worker in workers("a", "b", "c")),
    )


def test_speeds_and_samples_of_each_node() -> None:
    view = view_with(
        timed(a=(1.0, 1.0), b=(1.0, 2.0), c=(7.0, 7.0)), SharesSet(1, (2, 1, 2, 0, 2, 1), 9)
    )
    rows = [line.split() for line in run_tables.nodes(view)]
    assert rows[0][-3:] == ["SPEED", "SAMPLES", "STATUS"]
    assert [row[5:7] for row in rows[1:4:2]] == [["1.00", "3"], ["1.00", "3"]], (
        "c is alone in its pool"
    )
    assert rows[2][5:8] == ["1.00", "0.50", "2"]
    assert (
        " ".join(rows[4]) == "B b: 2 times slower than the faster ones of its pool on GPU 1 only"
        and len(rows) == 5
    )
    plain = {node["node_id"]: node for node in run_tables.status_plain(view)["nodes"]}
    assert (
        plain["b"]["speeds"] == [1.0, 0.5]
        and plain["b"]["samples"] == 2
        and "on GPU 1 only" in plain["b"]["why"]
    )
    assert plain["a"]["why"] == ""


def test_a_status_of_many_nodes_compares_their_speeds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    view, compared = view_with(timed(a=(1.0, 1.0), b=(1.0, 2.0), c=(7.0, 7.0))), []
    compare = node_speeds.times_slower

    def counted(*given: Any) -> dict[WorkerId, float]:
        compared.append(given)
        return compare(*given)

    monkeypatch.setattr(node_speeds, "times_slower", counted)
    seen = seen_of([*lines()[:6], tick(5.2, timed(a=(1.0, 1.0), b=(1.0, 2.0), c=(7.0, 7.0)))])
    shows: tuple[Callable[[], object], ...] = (
        lambda: run_tables.nodes(view),
        lambda: run_tables.status_plain(view),
        lambda: cluster(view),
        lambda: [*_capacity(seen.view, 80, True)],
    )
    for show, most in zip(shows, (1, 1, 1, 2), strict=True):
        compared.clear()
        show()
        assert 1 <= len(compared) <= most


def test_of_nodes_that_are_gone_a_status_lists_the_newest() -> None:
    gone = [f"n{k}" for k in range(2000)]
    more = [NodeReady(Node(name, "spot", 2)) for name in gone]
    view = view_with(*more, *(NodeLost(name, "its process is gone") for name in gone))
    rows = [line.split() for line in run_tables.nodes(view)]
    assert [row[1] for row in rows[1:-1]] == ["a", "b", "c", *gone[-MOST_GONE:]]
    assert " ".join(rows[-1]) == "and 1,976 more that were lost or released"
    plain = run_tables.status_plain(view)
    assert [node["node_id"] for node in plain["nodes"]] == [row[1] for row in rows[1:-1]]
    assert plain["more_gone"] == 1976


def test_before_anything_is_measured() -> None:
    rows = [line.split() for line in run_tables.nodes(view_with())]
    assert [row[5] for row in rows[1:]] == ["-", "-", "-"]


def test_why_a_node_is_slow_or_was_put_aside() -> None:
    slow = timed(a=(3.0, 3.0), b=(1.0, 1.0), c=(1.0, 1.0))
    view = view_with(slow, DeviceNoted(A1, "clocks lowered: 87 degrees"))
    assert view.node_speeds.whys(view.node_speeds.by_node(view.nodes))["a"] == (
        "3 times slower than the faster ones of its pool on all GPUs (the device says: clocks "
        "lowered: 87 degrees)"
    )
    view.add(
        tick(
            6, DeviceNoted(A1, ""), actions=(Quarantine("a", "too slow: ..."),), reason="a is left"
        )
    )
    assert (
        view.node_speeds.whys(view.node_speeds.by_node(view.nodes))["a"]
        == "quarantined: too slow: ..."
    )
    view.add(tick(7, NodeLost("a", "released")))
    assert view.node_speeds.by_node(view.nodes)["a"] == [] and "quarantined" in "\n".join(
        run_tables.status(view)
    )


def test_the_new_events_as_sentences() -> None:
    events = [
        SharesSet(1, (2, 1, 2, 1, 1, 1), 9),
        WrongNumbers(1, 30, 20, (A1,), "gradients differ"),
        DeviceNoted(A1, "2 uncorrectable errors"),
        DeviceNoted(A1, ""),
        Silent(A1, 1, "stepping", 2.0, "in the all-reduce of step 9"),
        timed(a=(1.0, 1.0), b=(1.0, 1.0), c=(1.0, 1.0)),
    ]
    view = view_with(*events)
    texts = [note.text for note in view.notes if note.at_s > 1005]
    assert texts == [
        "samples a step from step 10 on: 2, 1, 2, 1, 1, 1",
        "silent data corruption at step 30, right until step 20 (a/1): gradients differ",
        "GPU of worker a/1: 2 uncorrectable errors",
        "GPU of worker a/1: no findings any more",
        "worker a/1 is silent for 2.0 s (stepping): in the all-reduce of step 9",
    ]
    line = tick(5, *events)
    assert parse_line(write_line(line)) == line


def test_reports_of_speeds_take_no_time_in_the_account() -> None:
    plain, told = lines(), []
    for line in lines():
        told.append(line)
        if any(isinstance(event, StepDone) for _, event in line.events):
            told.append(
                replace(
                    line,
                    events=((line.at_s, timed(a=(1.0, 1.0), b=(1.0, 1.0), c=(1.0, 1.0))),),
                    decision=None,
                )
            )
    assert account(told) == account(plain) and len(told) > len(plain)
    assert account(told).gpu_seconds["productive"] == pytest.approx(
        account(plain).gpu_seconds["productive"]
    )
    assert PLANS[0].samples
