"""certify on a Ray cluster that somebody else started: everything runs on its nodes, and they
outlive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certify.roomy import wrong
from support.places import ROOT, TESTS

from elastic.certify.harness import cluster_place
from elastic.cli import command_line
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.ray import processes
from elastic.cluster.workers import remote_processes
from elastic.errors import SpecError
from elastic.scenarios.check import Bound, Check

GPU = {"ray.io/accelerator-type": "A100"}


def node(name: str, cpus: int, gpus: int = 0, **labels: str) -> RayNode:
    return RayNode(
        name * 8, f"10.0.0.{len(name)}", 1, {"elastic-node": name, **labels}, cpus, gpus, False
    )


@pytest.mark.parametrize(
    ("n", "free", "counts"),
    [(4, [8, 8], [2, 2]), (5, [1, 8], [1, 4]), (3, [0, 2, 2], [0, 2, 1]), (2, [1, 1], [1, 1])],
)
def test_ranks_are_shared_out_evenly(n: int, free: list[int], counts: list[int]) -> None:
    assert cluster_place.shared_out(n, free) == counts


def test_the_place_that_a_cluster_is() -> None:
    place = cluster_place.place_of("a:1", [node("h", 0), node("x", 8), node("y", 8)], None)
    assert (place.kind, place.ranks, place.where) == ("cpu-gloo", 4, "2 nodes of the cluster")
    assert [seat.node for seat in place.seats] == ["x", "x", "y", "y"]
    assert {env["CUDA_VISIBLE_DEVICES"] for env in place.environments()} == {""}
    assert (
        place.plain("s")["on"]
        == "a Ray cluster that was there: x (2 ranks, host 1), y (2 ranks, host 1)"
    )
    with_gpus = [node("x", 8, 4, **GPU), node("yy", 8, 4, **GPU), node("z", 8)]
    assert cluster_place.place_of("a:1", with_gpus, None).gpu_names == ("A100",) * 8
    assert cluster_place.place_of("a:1", with_gpus, 1).kind == "one-gpu"
    assert not cluster_place.place_of("a:1", with_gpus, 0).gpus
    with pytest.raises(
        SpecError,
        match=r"--gpus 9: the nodes of the Ray cluster have GPUs for at most 8 ranks \(x: 4, yy: 4",
    ):
        cluster_place.place_of("a:1", with_gpus, 9)
    with pytest.raises(SpecError, match="at most 0 ranks"):
        cluster_place.place_of("a:1", [node("h", 0)], None)


def test_pools_are_those_that_the_labels_name() -> None:
    nodes = [
        node("x", 8, **{"elastic-pool": "mine"}),
        node("y", 8),
        node("z", 1, **{"ray.io/market-type": "spot"}),
    ]
    place = cluster_place.place_of("a:1", nodes, 5)
    found = cluster_place.pools(place)
    assert [(p["name"], p["market_type"], p["max_nodes"], p["gpus_per_node"]) for p in found] == [
        ("mine", "on-demand", 1, 2), ("certify-1", "on-demand", 1, 2), ("certify-2", "spot", 1, 1)
    ]  # fmt: skip
    assert cluster_place.world(place) == 5


def test_which_cluster_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cluster_place.SUBMITTED, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_place.address() == ""
    monkeypatch.setenv(cluster_place.SUBMITTED, "{}")
    assert cluster_place.address() == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_place.address() == "10.0.0.1:6379"
    monkeypatch.setattr(cluster_place.util, "find_spec", lambda name: None)
    with pytest.raises(
        SpecError, match="RAY_ADDRESS is 10.0.0.1:6379, but Ray or pydantic is not installed here"
    ):
        cluster_place.address()


def test_an_address_where_nothing_is(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert command_line.main(["certify"]) == 2
    shown = capsys.readouterr()
    assert "the Ray cluster at 127.0.0.1:1 cannot be reached" in shown.err
    assert shown.err.count("\n") == 1 and not shown.out


# --------------------------------------------------------------------------------------- a real one


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, list[int]]]:
    """Address and raylets of two nodes."""
    with LocalCluster((str(ROOT), str(TESTS))) as made:
        starting = [made.add(NodeOrder(name, 2, {"elastic-node": name})) for name in ("x", "y")]
        with made.introduced():
            yield made.address, [int(answer.result(180)["pid"]) for answer in starting]


@pytest.mark.whole
class TestReal:
    def test_certify_runs_there_and_leaves_it_as_it_was(
        self, cluster: tuple[str, list[int]], tmp_path: Path
    ) -> None:
        address, raylets = cluster
        words = [
            "--gpus",
            "2",
            "--only",
            "abort,main path",
            "--json",
            "--storage",
            str(tmp_path / "store"),
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "elastic", "certify", *words], cwd=tmp_path, text=True,
            capture_output=True, env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ended.returncode in (0, 1), ended.stdout + ended.stderr
        found = json.loads(ended.stdout)
        assert found["place"]["on"].count("(1 ranks, host 1)") == 2
        checks = {check["name"]: check for check in found["checks"]}
        tried = [
            Check(**{**check, "bounds": tuple(Bound(**bound) for bound in check["bounds"])})
            for check in found["checks"]
        ]
        assert not [text for text in map(wrong, tried) if text], ended.stderr
        assert ended.returncode == int(any(check.verdict != "pass" for check in tried))
        assert {check["where"] for check in checks.values()} == {"2 nodes of the cluster"}
        assert {
            "abort dp_shard=2",
            "main path: kill",
            "main path: growth",
            "main path: notice",
        } <= set(checks)
        assert checks["main path: kill"]["figures"]["source"] == "peer"
        assert all(processes.started(pid) for pid in raylets), (
            "certify has killed a node of the user's"
        )
        assert not list((tmp_path / "store").iterdir())

    def test_processes_and_commands_on_its_nodes(self, cluster: tuple[str, list[int]]) -> None:
        nodes = remote_processes.connect(cluster[0])
        try:
            place = cluster_place.place_of(cluster[0], nodes, 2)
            hands = remote_processes.ProcessSignals(place.seats)
            order = remote_processes.ProcessOrder(
                "support.certify.certify_echo:Echo", ("a",), {"SAID": "b"}
            )
            one = remote_processes.RemoteProcess(place.seats[0], hands, order)
            assert one.ready(300) == ""
            one.send(("c", 1, 2))
            assert one.pipe.recv() == ("a", "b", ("c", 1, 2))
            one.signal(signal.SIGSTOP)
            one.end()
            with pytest.raises(EOFError):
                one.pipe.recv()
            one.join()
            assert one.ended
            failing = (
                "import os, sys, time; r = os.environ['R']; print('rank', r); r == '0' and "
                "sys.exit(3); time.sleep(60)"
            )
            remote_command = remote_processes.RemoteCommand(
                ("-c", failing), ({"R": "0"}, {"R": "1"}), 30.0
            )
            assert remote_processes.run(place.seats, remote_command, lambda: None) == [
                (3, "rank 0\n")
            ]
        finally:
            remote_processes.disconnect()
