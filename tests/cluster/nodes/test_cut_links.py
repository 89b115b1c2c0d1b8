"""Networks that swallow packets, both ways and one way, under one run on hosts that are namespaces
(routed_hosts.py): one scene after the other, judged at the end. `-s` shows what each measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.cluster.routed_hosts import BUCKET, HEAD, STORAGE, RoutedHosts, missing
from support.e2e.runs import SLOW, events, job, plans, undisturbed
from support.places import PROGRAMS
from support.waiting import HOSTS_S, until

from elastic.ledger.journal import Line, read
from elastic.ledger.lease import Times
from elastic.scenarios.judge import wrong
from elastic.scenarios.kept_steps import kept
from elastic.types import CopyStored, NodeLost, NodesMute, PlanEntered, StepDone

pytestmark = [pytest.mark.whole, pytest.mark.timeout(3600)]
NODES = ("node-a", "node-b", "node-c")
POOL = {"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": len(NODES)}
LAYOUTS = {n: f"dp_shard={n}" for n in (3, 2, 1)}
NAME, STEPS = "cut", 100_000  # it is stopped when all scenes were played
PAUSE_S = 0.5  # of a step, so that the journal stays short
OF_A_RUN = ("ray::Worker", "ray::NodeWatcher")  # processes of the cluster that are a run's
ALONE_S = 12.0


@dataclass
class Run:
    """`elastic run` on the head."""

    hosts: RoutedHosts
    process: subprocess.Popen[str] = field(init=False)
    failed: str = ""

    def __post_init__(self) -> None:
        words = (sys.executable, "-m", "elastic", "run", "job", "--run-name", NAME, "--json")
        into = ("sh", "-c", 'exec "$@" >out 2>err', "sh")
        self.process = self.hosts.start(HEAD, *into, *words, RAY_ADDRESS=self.hosts.head)

    def lines(self) -> list[Line]:
        journal = self.hosts.folder / "elastic_runs" / NAME / "journal.jsonl"
        return read(journal) if journal.is_file() else []

    def said(self) -> str:
        return (self.hosts.folder / "err").read_text()[-3000:]

    def step(self) -> int:
        return max((event.step for event in events(self.lines(), StepDone)), default=0)

    def members(self) -> set[str]:
        """Nodes of the newest plan, where it was entered."""
        lines = self.lines()
        ordered, entered = plans(lines), events(lines, PlanEntered)
        if not entered or entered[-1].generation != ordered[-1].generation:
            return set()
        return set(ordered[-1].nodes)

    def lost(self) -> list[str]:
        return [event.node_id for event in events(self.lines(), NodeLost)]

    def mute(self) -> list[NodesMute]:
        return events(self.lines(), NodesMute)

    def until(self, done: Callable[[], Any], what: str, within_s: float = HOSTS_S) -> None:
        def look() -> Any:
            assert self.process.poll() is None, self.said()
            return done()

        until(
            look,
            lambda: f"{what}; {self.members()} train, step {self.step()}; {self.said()}",
            within_s,
        )

    def trains(self, *nodes: str, steps: int = 3) -> None:
        """These nodes, and no others."""
        self.until(lambda: self.members() == set(nodes), f"a plan on {nodes}")
        now = self.step()
        self.until(lambda: self.step() >= now + steps, f"{steps} steps after step {now}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("cut")
    more = {"storage": f"s3://{BUCKET}", "durable_every": 10, "layout": LAYOUTS, "pools": [POOL]}
    job(folder / "job", STEPS, [], program=str(PROGRAMS / "tiny_watched.py"), **more)
    slow, watched = folder / "slow", folder / "watched"
    slow.touch()
    watched.mkdir()
    own = {SLOW: str(slow), "ELASTIC_TEST_PAUSE_S": str(PAUSE_S)}
    hosts = RoutedHosts(folder, NODES, {**own, "ELASTIC_TEST_WATCHED": str(watched)})
    try:
        yield Run(hosts)
    finally:
        hosts.close()


def all_from_storage(run: Run) -> None:
    """For longer than the lease: nobody is lost, training continues, and a checkpoint is stored
    afterwards."""
    run.until(lambda: run.members() == set(NODES), "the first plan")
    run.trains(*NODES)
    at, generation, since_s = run.step(), len(plans(run.lines())), time.monotonic()
    run.hosts.cut([STORAGE], [HEAD, *NODES])
    run.until(lambda: time.monotonic() - since_s > Times().ttl_s + 3.0, "the end of the lease")
    later = run.step()
    assert later > at
    run.until(lambda: run.step() > later, "a step behind the end of the lease")
    run.hosts.mend()
    durable = lambda: [e for e in events(run.lines(), CopyStored) if e.copy.kind == "durable"]  # noqa: E731
    run.until(lambda: [e for e in durable() if e.copy.step > later], "a checkpoint")
    assert (len(plans(run.lines())), run.lost()) == (generation, []), run.said()


def head_from_all(run: Run) -> None:
    """The link of the driver's own host: nobody is lost, and when it is back the same generation
    has trained all the while."""
    run.trains(*NODES)
    generation, lost, since_s = len(plans(run.lines())), run.lost(), time.monotonic()
    run.hosts.cut([HEAD], [STORAGE, *NODES])
    run.until(lambda: time.monotonic() - since_s > ALONE_S, "more than a mute node is given")
    run.hosts.mend()
    run.until(lambda: [mute.over for mute in run.mute()] != [""], "an answer")
    later, heard_s = run.step(), time.monotonic()
    run.until(lambda: run.step() > later + 3, "steps")
    began, over = run.mute()
    assert (began.hosts, began.over) == (len(NODES), "") and "answers again" in over.over
    assert (len(plans(run.lines())), run.lost()) == (generation, lost), run.said()
    print(f"steps are heard {time.monotonic() - heard_s:.1f} s after the first answer")


def driver_to_node(run: Run) -> None:
    """One way: what the driver sends does not arrive."""
    cut_off(run, lambda: run.hosts.swallow([HEAD], ["node-c"]), "node-c")


def driver_and_node(run: Run) -> None:
    cut_off(run, lambda: run.hosts.cut([HEAD], ["node-c"]), "node-c")


def cut_off(run: Run, cut: Callable[[], None], node: str) -> None:
    """The node, which reaches its peers all the while, is lost; the others continue, and take it in
    again when its link is back."""
    run.trains(*NODES)
    others = [one for one in NODES if one != node]
    cut()
    run.until(lambda: node in run.lost(), f"the loss of {node}")
    run.trains(*others)
    run.hosts.mend()
    run.trains(*NODES)


def node_and_node(run: Run) -> None:
    """The driver reaches both: the others continue without one of them."""
    run.trains(*NODES)
    run.hosts.cut(["node-a"], ["node-b"])
    run.until(lambda: len(run.members()) == 2, "a plan without one of two")
    assert not {"node-a", "node-b"} <= run.members()
    run.trains(*run.members())
    run.hosts.mend()


def ended(run: Run) -> None:
    """Right in all that the judge looks at; nobody trained who was in no plan; nothing is left."""
    words = ("stop", NAME, "--storage", f"s3://{BUCKET}")
    run.hosts.run(HEAD, sys.executable, "-m", "elastic", *words)
    until(lambda: run.process.poll() is not None, "the end of the run")
    assert run.process.returncode == 3, run.said()
    summary = json.loads((run.hosts.folder / "out").read_text().strip().splitlines()[-1])
    lines = run.lines()
    n = max(kept(lines))
    found = wrong(lines, replace(undisturbed(n), phase="stopped"))
    assert not found, found
    assert summary["steps"] == n
    trained = at_times(run.hosts.folder / "watched")
    assert set(trained) == set(NODES)
    assert outside(lines, trained) == []
    left = lambda: [pid for title in OF_A_RUN for pid in run.hosts.space.pids(title)]  # noqa: E731
    until(lambda: not left(), "the end of all processes of the run", 60)


def at_times(folder: Path) -> dict[str, list[float]]:
    """When the nodes have computed losses."""
    return {file.name: [float(s) for s in file.read_text().split()] for file in folder.iterdir()}


def outside(lines: list[Line], trained: dict[str, list[float]]) -> list[str]:
    """Losses that a node computed when it was neither in the plan that was entered last nor in one
    that was ordered since: two generations that train at once."""
    told = sorted(
        (at_s, event.generation)
        for line in lines
        for at_s, event in line.events
        if isinstance(event, PlanEntered)
    )
    ordered = [(line.at_s, plan) for line in lines for plan in plans([line])]
    found = []
    for node, times in trained.items():
        for at_s in times:
            newest = max((number for since_s, number in told if since_s <= at_s), default=0)
            mine = [plan.nodes for s, plan in ordered if s <= at_s and plan.generation >= newest]
            if not any(node in nodes for nodes in mine):
                found.append(f"{node} at {at_s:.2f}, in the time of generation {newest}")
    return found


SCENES = (all_from_storage, head_from_all, driver_to_node, driver_and_node, node_and_node, ended)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_link(run: Run, scene: Callable[[Run], None]) -> None:
    if run.failed:
        pytest.fail(f"not played after {run.failed}")
    run.failed = scene.__name__
    began_s = time.monotonic()
    scene(run)
    run.failed = ""
    print(f"{scene.__name__}: {time.monotonic() - began_s:.0f} s")
