"""Traces: what is read from which file, what is refused in which words, and what a past run has
seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.sim.markets.generators import FittedMarket, fitted, usual
from elastic.sim.markets.traces import Trace, load_trace, load_traces, of_run
from elastic.types import (
    DriverStarted,
    ModelProfile,
    Node,
    NodeLost,
    NodeReady,
    Pool,
    RequestFailed,
)


def written(folder: Path, text: str, name: str = "zone-a.json") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def ticks(*data: object, gap_s: object = 300) -> str:
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": list(data)})


def test_ticks_become_stretches(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, ticks(4, 4, 3, 3, 0, 4)))
    assert (trace.name, trace.at_s, trace.nodes) == ("zone-a", (0, 600, 1200, 1500), (4, 3, 0, 4))
    assert trace.ends_s == 1800 and trace.most == 4
    assert trace.share == pytest.approx((4 + 4 + 3 + 3 + 0 + 4) / 24)


def test_it_begins_anew_where_it_ends(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, ticks(1, 0, 2)))
    assert [trace.nodes_at(at_s) for at_s in (0, 299, 300, 899, 900, 1200)] == [1, 1, 0, 2, 1, 0]
    assert list(trace.changes(100, 1600)) == [200, 500, 800, 1100, 1400]
    assert list(trace.changes(850, 900)) == [50]


def test_a_csv_of_levels_may_have_prices(tmp_path: Path) -> None:
    rows = "at_s,nodes,usd_per_node_h\n100,4,1.5\n160,4,1.5\n200,2,2.5\n300,0,9\n"
    trace = load_trace(written(tmp_path, rows, "a.csv"))
    assert (trace.at_s, trace.nodes, trace.ends_s) == ((0, 100), (4, 2), 200)
    assert [trace.usd_at(at_s) for at_s in (0, 99, 100, 200)] == [1.5, 1.5, 2.5, 1.5]


def test_a_log_of_nodes_that_come_and_go(tmp_path: Path) -> None:
    rows = "at_s,event,node\n10,add,a\n10,add,b\n70,remove,a\n90,add,c\n100,remove,b\n"
    trace = load_trace(written(tmp_path, rows, "a.csv"))
    assert (trace.at_s, trace.nodes, trace.ends_s) == ((0, 60, 80), (2, 1, 2), 90)


def test_a_folder_is_read_by_name(tmp_path: Path) -> None:
    written(tmp_path, ticks(1, 0), "b.json")
    written(tmp_path, ticks(2, 1), "a.json")
    assert [trace.name for trace in load_traces(tmp_path)] == ["a", "b"]


def test_the_same_share_of_another_number_of_nodes() -> None:
    trace = Trace("t", (0, 10, 20), (4, 3, 1), 30)
    assert trace.scaled(8).nodes == (8, 6, 2)
    assert trace.scaled(2).nodes == (2, 1, 0) and trace.scaled(4) is trace


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("", "a.json", "it is empty"),
        ("{", "a.json", "no JSON"),
        (ticks(gap_s=300), "a.json", "at least one number"),
        (ticks(1, gap_s=0), "a.json", "gap_seconds is 0; it must be the seconds of a tick, from 1"),
        (ticks(1, gap_s=float("nan")), "a.json", "gap_seconds is nan"),
        (ticks(1, gap_s=1e308), "a.json", "from 1 to 1e+11"),
        (ticks(1, 10**400), "a.json", "from 0 to 1,000,000"),
        ('{"metadata": ' + "[" * 10**5, "a.json", "no JSON"),
        (ticks(1, -1), "a.json", "data[1] is -1"),
        (ticks(1, float("nan")), "a.json", "data[1] is nan"),
        (ticks(1, 0.5), "a.json", "whole number"),
        (ticks(1, "2"), "a.json", "data[1] is '2'"),
        (ticks(0, 0), "a.json", "never has a node"),
        ('{"data": [1]}', "a.json", "gap_seconds is None"),
        ("at_s,count\n1,2\n", "a.csv", "its columns are at_s, count"),
        ("at_s,nodes\n0,2\n", "a.csv", "1 rows"),
        ("at_s,nodes\n0,2,1\n5,1\n", "a.csv", "line 2: it has not 2 cells"),
        ("at_s,nodes\n0,2\n5\n", "a.csv", "line 3: it has not 2 cells"),
        ("at_s,nodes\n0," + "1" * 2 * 10**5 + "\n5,1\n", "a.csv", "no CSV: field larger"),
        ("[" * 10**5, "a.json", "its columns are [[["),
        ("at_s,nodes\n0,2\n1e300,1\n", "a.csv", "line 3: at_s is '1e300'"),
        ("at_s,nodes\n0,2\n0,1\n", "a.csv", "line 3: at_s is 0 after 0"),
        ("at_s,nodes\n0,2\nlate,1\n", "a.csv", "line 3: at_s is 'late'"),
        ("at_s,nodes\n0,2\n5,-1\n", "a.csv", "line 3, nodes is -1"),
        ("at_s,nodes,usd_per_node_h\n0,2,nan\n5,1,1\n", "a.csv", "line 2: usd_per_node_h"),
        ("at_s,event,node\n0,add,a\n1,gone,a\n", "a.csv", "line 3: event is 'gone'"),
        ("at_s,event,node\n0,add,a\n1,add,a\n", "a.csv", "line 3: node 'a' is there already"),
        ("at_s,event,node\n0,remove,a\n1,add,a\n", "a.csv", "line 2: node 'a' is not there"),
        ("at_s,event,node\n0,add,a\n", "a.csv", "1 moments"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, name: str, words: str) -> None:
    path = written(tmp_path, text, name)
    with pytest.raises(SpecError) as caught:
        load_trace(path)
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(path)) + 240


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no .json or .csv file"):
        load_traces(tmp_path)


def test_what_a_run_has_seen_of_its_spot_pools() -> None:
    """While the pool said no, what the run had; else what it may have."""
    pools = (Pool("spot", market_type="spot", max_nodes=4), Pool("own", max_nodes=1))
    start = DriverStarted("r", 1, {}, pools, ModelProfile(1, 1, ()))
    events = [
        (0.0, start),
        (10.0, NodeReady(Node("a", "spot", 1))),
        (12.0, NodeReady(Node("b", "spot", 1))),
        (20.0, RequestFailed("spot", "x", "no capacity")),
        (30.0, NodeLost("a", "taken")),
        (40.0, NodeReady(Node("c", "spot", 1))),
        (50.0, NodeLost("c", "released")),
    ]
    found = of_run([Line(at_s, 1, ((at_s, event),), None) for at_s, event in events])
    assert list(found) == ["spot"]
    assert (found["spot"].at_s, found["spot"].nodes) == ((0, 20, 30, 40), (4, 2, 1, 4))
    with pytest.raises(SpecError, match="no time passes"):
        of_run([Line(0.0, 1, ((0.0, start),), None)])


def test_a_fit_makes_others_like_it_and_says_how_near() -> None:
    data = [4] * 30 + [2] * 10 + [0] * 20 + [3] * 15 + [4] * 40 + [1] * 5
    moments = [k * 600.0 for k in range(6)]
    at, nodes = [0.0], [data[0]]
    for k in range(1, len(data)):
        if data[k] != data[k - 1]:
            at.append(k * 600.0)
            nodes.append(data[k])
    trace = Trace("t", tuple(at), tuple(nodes), len(data) * 600.0)
    fit = fitted(trace)
    assert fit.made(nodes=8, length_s=1e6, seed=1) == fit.made(nodes=8, length_s=1e6, seed=1)
    assert fit.made(nodes=8, length_s=1e6, seed=1) != fit.made(nodes=8, length_s=1e6, seed=2)
    assert fit.made(nodes=8, length_s=1e6).most <= 8
    quality = fit.quality(trace, n=40)
    assert quality["share"] == pytest.approx(trace.share, abs=1e-4)
    assert quality["share_made"] == pytest.approx(trace.share, abs=0.15)
    with pytest.raises(SpecError, match="never changes"):
        fitted(Trace("flat", (0.0,), (3,), moments[-1]))


def test_what_is_made_like_a_trace_is_of_as_many_nodes_and_at_its_prices() -> None:
    """Also where it never has them all."""
    at_s, nodes = (0.0, 1e6, 1e6 + 60, 1e6 + 120), (1, 0, 2, 1)
    trace = Trace("t", at_s, nodes, 1e6 + 180, (1.0, 5.0, 3.0, 1.0))
    fit = fitted(trace)
    made = next(made for k in range(99) if max((made := of(fit, k)).nodes) == 4)
    assert made.most == 8 and made.scaled(8) is made and made.scaled(16).nodes[0] == 8
    assert set(made.usd_per_node_h) <= {1.0, 5.0} and made.usd_per_node_h[0] == 1.0
    assert fit.usd_per_node_h == (5.0, 1.0, 3.0)
    assert of(fitted(replace(trace, usd_per_node_h=())), 0).usd_per_node_h == ()


def of(fit: FittedMarket, seed: int) -> Trace:
    return fit.made(nodes=8, length_s=1e5, seed=seed)


def test_a_made_up_market_has_the_rates_that_it_was_made_of() -> None:
    made = usual("p", nodes=50, length_s=1e7, taken_per_node_h=0.05, dry_h=0.25, seed=3)
    assert made.most <= 50
    assert made.share * made.most / 50 == pytest.approx(20 / 20.25, abs=0.005)
