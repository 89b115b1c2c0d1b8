"""The scenarios, played where certify runs.

On this host they have nodes of their own, which join and leave. On a user's cluster the nodes stay:
a kill ends all worker processes of one node, which are then started again there, and a node with
notice is only left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from elastic.certify.harness import cluster_place
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Task
from elastic.scenarios.check import Check
from elastic.scenarios.limit import Limit
from elastic.scenarios.scenario import Nodes, Scenario
from elastic.scenarios.stages import OWN_NODES, job_of, staged
from elastic.scenarios.stories import MAIN_PATH, SCENARIOS
from elastic.scenarios.watched_run import Stage

NO_RAY = "without Ray (not installed, or --no-ray)"
FIRST, LATER = 3.5, 0.05  # weights: the main path, and what is played with the time that is left
OWN = f"{OWN_NODES} Ray nodes of its own on this host"


def tasks(lab: Lab) -> list[Task]:
    """Those that can be played here."""
    return [
        Task(
            scenario.checks,
            partial(played, lab, scenario),
            scenario.least_s,
            FIRST if scenario is MAIN_PATH else LATER,
            where(lab.place, scenario),
        )
        for scenario in SCENARIOS
        if not scenario.script and not why_not(lab.place, scenario)
    ]


def left_out(place: Place) -> dict[str, str]:
    """Name -> why it cannot be tried here."""
    return {
        name: why
        for scenario in SCENARIOS
        if not scenario.script and (why := why_not(place, scenario))
        for name in scenario.checks
    }


def why_not(place: Place, scenario: Scenario) -> str:
    """Why it cannot be played here; '' = it can."""
    if not place.ray:
        return NO_RAY
    if place.address and not scenario.anywhere:
        return "it needs nodes that join and leave; --local plays it on this host's own"
    if place.address:
        return (
            ""
            if len(place.nodes) > 1
            else "it needs two nodes of the cluster at least; --local runs it on this host's own"
        )
    if scenario.on_cluster:
        return ""
    if place.kind == "one-gpu":
        return "nodes that join and leave need two GPUs at least; --gpus 0 runs it on the CPU"
    n = scenario.nodes.total * scenario.nodes.workers
    if place.gpus and not scenario.anywhere and len(place.gpus) < n:
        return f"it needs {n} GPUs; --gpus 0 plays it on the CPU"
    return ""


def where(place: Place, scenario: Scenario) -> str:
    if place.address:
        return place.where
    if scenario.on_cluster:
        return f"{OWN}, as a cluster that was there"
    return f"{nodes_of(place, scenario).total} Ray nodes of its own on this host"


def nodes_of(place: Place, scenario: Scenario) -> Nodes:
    """On any number of GPUs one worker a node; all but one node may leave."""
    nodes = scenario.nodes
    if not scenario.anywhere:
        return nodes
    n = place.ranks if place.gpus else min(nodes.total, place.ranks)
    layouts = {} if place.gpus else nodes.layouts
    return replace(nodes, spot=n - nodes.on_demand, layouts=layouts)


@contextmanager
def stage(lab: Lab, scenario: Scenario, *, configured: bool = False) -> Iterator[Stage]:
    """`configured`: in the storage that certify was given."""
    place, folder = lab.place, lab.folder / scenario.name.replace(" ", "-")
    with lab.room(configured=configured) as (name, storage):
        if place.address:
            job = job_of(scenario, cluster_place.pools(place))
            world = cluster_place.world(place)
            yield Stage(folder, job, world, name, storage, place.address, connected=True)
        else:
            there = replace(scenario, nodes=nodes_of(place, scenario))
            with staged(there, folder, "GPU" if place.gpus else "CPU") as at:
                yield replace(at, name=name, storage=storage)


def played(lab: Lab, scenario: Scenario, limit: Limit) -> Iterator[Check]:
    lab.drop()  # its processes take no time from the run
    with stage(lab, scenario) as at:
        yield from checks_at(scenario, at, limit)


def checks_at(scenario: Scenario, at: Stage, limit: Limit) -> Iterator[Check]:
    """Plays it and judges it."""
    from elastic.scenarios.kept_steps import kept
    from elastic.scenarios.play import play
    from elastic.scenarios.story_checks import checks, undisturbed

    seen = play(scenario, at, limit)
    yield from checks(scenario, seen, undisturbed(max(kept(seen.lines), default=0), limit))
