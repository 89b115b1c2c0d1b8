"""Two runs of one name, in two storages, side by side on one Ray cluster: neither touches the
other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.places import ROOT
from support.waiting import until

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.ray import processes
from elastic.ledger.journal import read
from elastic.types import NodeLost, NodePrepared, StepDone, WorkerFailed

# ledger/test_segments.py has the names that keep them apart
pytestmark = [pytest.mark.e2e, pytest.mark.whole]


def events(storage: Path, kind: type | tuple[type, ...]) -> list[Any]:
    path = storage / "baseline" / "journal.jsonl"
    lines = read(path) if path.is_file() else []
    return [event for line in lines for _, event in line.events if isinstance(event, kind)]


def test_two_runs_of_one_name_in_two_storages(shell: Shell, tmp_path: Path) -> None:
    storages = {name: tmp_path / f"of-{name}" for name in ("ann", "bob")}
    with LocalCluster((str(ROOT),)) as cluster:
        for name in storages:
            cluster.add(NodeOrder(name, 1, {"elastic-node": name, "elastic-pool": name})).result(
                180
            )
        shell.environment |= {**cluster.environment, "RAY_ADDRESS": cluster.address}

        def words(name: str, steps: int) -> tuple[str, ...]:
            pools = [{"name": name, "market_type": "owned", "gpus_per_node": 1, "max_nodes": 1}]
            changes = {
                "pools": pools,
                "storage": str(storages[name]),
                "program": str(PROGRAMS / "tiny_slow.py"),
            }
            return (
                "run",
                shell.job(name, steps=steps, layout="dp_shard=1", **changes),
                "--run-name",
                "baseline",
                "--json",
            )

        first = shell.start(*words("ann", 100_000))
        try:
            until(
                lambda: bool(events(storages["ann"], StepDone)) or first.poll() is not None,
                what="the first run's first step",
            )
            assert first.poll() is None, first.communicate()[1]
            code, out, err = shell.call(*words("bob", 30))
            assert (code, last_line(out)["steps"]) == (0, 30), err
            seen = len(events(storages["ann"], StepDone))
            until(
                lambda: len(events(storages["ann"], StepDone)) > seen,
                what="a step of the first run after the second has ended",
            )
            (prepared,) = events(storages["ann"], NodePrepared)
            assert prepared.node_id == "ann" and all(
                processes.started(pid) for pid in prepared.pids
            )
            assert not events(storages["ann"], (WorkerFailed, NodeLost))
            for name, phase in (("ann", "running"), ("bob", "succeeded")):
                code, out, err = shell.here(
                    "status", "baseline", "--storage", str(storages[name]), "--json"
                )
                assert (code, json.loads(out)["phase"]) == (0, phase), err
            code, _, err = shell.here("stop", "baseline", "--storage", str(storages["ann"]))
            assert code == 0, err
            out, err = first.communicate(timeout=300)
            assert first.returncode == 3, err
            assert last_line(out)["steps"] >= seen
        finally:
            first.kill()
