"""Which scenarios certify plays where, and what on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic.certify.checks import scenario_checks
from elastic.certify.checks.scenario_checks import nodes_of, stage, where, why_not
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.workers.remote_processes import Seat
from elastic.scenarios.stories import AXES, LOOP_SCRIPT, MAIN_PATH, SCENARIOS

CPU = Place("cpu-gloo", 4, ray=True)
GPUS = Place("several-gpus", 4, tuple("0123"), ray=True)
NODES = tuple(RayNode(name * 8, f"10.0.0.{i}", 1, {}, 2, 0, False) for i, name in enumerate("xy"))
CLUSTER = replace(
    CPU,
    ranks=2,
    address="a:1",
    nodes=NODES,
    seats=tuple(Seat(node.ray_id, node.ray_id, node.address, False) for node in NODES),
)


def test_where_each_can_be_played() -> None:
    assert {why_not(CPU, one) for one in SCENARIOS} == {""}
    assert all("without Ray" in why_not(replace(CPU, ray=False), one) for one in SCENARIOS)
    assert "two GPUs" in why_not(Place("one-gpu", 4, ("0",), ray=True), MAIN_PATH)
    assert why_not(GPUS, MAIN_PATH) == "" and "it needs 6 GPUs" in why_not(GPUS, AXES)
    assert why_not(CLUSTER, MAIN_PATH) == why_not(CLUSTER, LOOP_SCRIPT) == ""
    assert "--local" in why_not(CLUSTER, AXES)
    assert "two nodes" in why_not(replace(CLUSTER, nodes=NODES[:1]), MAIN_PATH)


def test_what_it_is_played_on() -> None:
    assert [(n.spot, n.on_demand) for n in (nodes_of(p, MAIN_PATH) for p in (CPU, GPUS))] == [
        (2, 1), (3, 1)
    ]  # fmt: skip
    assert nodes_of(replace(CPU, ranks=2), MAIN_PATH).total == 2
    assert nodes_of(GPUS, AXES) == AXES.nodes
    assert where(CPU, MAIN_PATH) == "3 Ray nodes of its own on this host"
    assert where(CLUSTER, MAIN_PATH) == "2 nodes of the cluster"
    assert where(CPU, LOOP_SCRIPT).endswith("as a cluster that was there")


def test_a_name_is_that_of_one_task_or_said_to_be_left_out(tmp_path: Path) -> None:
    names = [name for one in SCENARIOS if not one.script for name in one.checks]
    for place in (CPU, GPUS, CLUSTER, replace(CPU, ray=False)):
        with Lab(place, folder=tmp_path / "lab") as lab:
            tried = [name for task in scenario_checks.tasks(lab) for name in task.names]
        assert sorted([*tried, *scenario_checks.left_out(place)]) == sorted(names)


@pytest.mark.parametrize("place", [CPU, GPUS], ids=["CPU", "GPUs"])
def test_the_job_of_a_place(place: Place, tmp_path: Path) -> None:
    with Lab(place, folder=tmp_path / "lab") as lab, stage(lab, MAIN_PATH) as at:
        pools = at.job["pools"]
        assert at.world == sum(pool["max_nodes"] for pool in pools)
        kinds = {pool["accelerator_type"] for pool in pools}
        assert (kinds, "layout" in at.job) == (({"GPU"}, False) if place.gpus else ({"CPU"}, True))
        assert Path(at.job["program"]).name == "paced.py"
        assert at.run.uri.startswith(str(tmp_path / "lab"))


def test_on_a_cluster_that_was_there_the_nodes_are_its_own(tmp_path: Path) -> None:
    with Lab(CLUSTER, folder=tmp_path / "lab", storage=str(tmp_path)) as lab:
        with stage(lab, LOOP_SCRIPT) as at:
            assert (at.address, at.world, at.connected) == ("a:1", 2, True)
            assert Path(at.job["script"]).name == "loop_script.py" and "program" not in at.job
            assert "layout" not in at.job and at.job["orphan_lease_s"] > 0
