"""Capacity events by chance on a real Ray cluster of four to six nodes: training continues as if
nothing had happened, and nothing of the run is left. `ELASTIC_SOAK_SEED=N` plays the same events
again, `ELASTIC_SOAK_EVENTS=N` so many (200: a quarter of an hour).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import SystemRandom

import pytest
import ray
from support.child import child
from support.e2e.runs import MARK, SLOW, job, went_on_as_if_nothing_happened
from support.e2e.soak import NODES_FIRST, START_MOST_S, Before, Chance, happenings, steps_of
from support.places import ROOT
from support.waiting import until

from elastic import api
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.ledger.journal import read

pytestmark = pytest.mark.e2e
SEED = 20
POOL = {"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": 6, "notice_s": 12}
SHARDS = {n: f"dp_shard={n}" for n in (6, 5, 4, 3, 2, 1)}
MIXED = SHARDS | {6: "dp_shard=3,tp=2", 4: "pp=2,dp_shard=2"}
THREADS = ("notice_watchers", "survey", "autoscaler", "inbox", "lease", "drain")


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Before]:
    """Temporary files of the test's processes and of this one go to a folder of their own."""
    temp = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # of all runs of a user: it is to stay
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv(SLOW, str(tmp_path / "slow"))
    monkeypatch.setenv("ELASTIC_TEST_PAUSE_S", "0.7")  # workers that start rehearse: they pause too
    yield Before.now(mark, temp)
    shutil.rmtree(temp, ignore_errors=True)


def soak(seed: int, n_events: int, layout: dict[int, str], folder: Path, before: Before) -> None:
    script = happenings(seed, n_events)
    steps = steps_of(script)
    print(f"seed {seed}: {n_events} events within {steps} steps")
    job(folder, steps, [], pools=[POOL], layout=layout, durable_every=25)
    with LocalCluster((str(ROOT),)) as cluster:
        chance = Chance(cluster, folder, folder / "runs" / "soak" / "journal.jsonl", script)
        for _ in range(NODES_FIRST):
            chance.add()
        chance.arrived(START_MOST_S)
        chance.start()
        try:
            options = api.Options(run_name="soak", address=cluster.address, show=False)
            with cluster.introduced():
                result = api.run(folder, options=options)
        finally:
            chance.close()
            print("\n".join(chance.played))
        assert not chance.error, chance.error
        lines = read(result.folder / "journal.jsonl")
        went_on_as_if_nothing_happened(result.summary, lines, steps)
        assert not chance.script, f"{len(chance.script)} events did not happen"
        print(f"{len(result.summary['transitions'])} transitions, {result.summary['wall_s']:.0f} s")
        drained = frozenset(chance.seen.drained)
        nothing_left(lambda: before.left_on_cluster(cluster, set(chance.nodes), drained))
        assert not [thread.name for thread in threading.enumerate() if thread.name in THREADS]
    nothing_left(before.left_on_machine)


def nothing_left(look: Callable[[], list[str]]) -> None:
    until(lambda: not look(), lambda: f"the end of {look()}", 60)


@pytest.mark.whole
def test_twenty_events(tmp_path: Path, before: Before) -> None:
    soak(int(os.environ.get("ELASTIC_SOAK_SEED", SEED)), 20, SHARDS, tmp_path, before)


@pytest.mark.whole
@pytest.mark.timeout(3600)
def test_sixty_events(tmp_path: Path, before: Before) -> None:
    soak(
        int(os.environ.get("ELASTIC_SOAK_SEED", SystemRandom().randrange(10**6))),
        int(os.environ.get("ELASTIC_SOAK_EVENTS", 60)),
        MIXED,
        tmp_path,
        before,
    )


@pytest.mark.whole  # as the runs are that it is looked for in
def test_each_kind_of_leak_is_seen(before: Before) -> None:
    with LocalCluster((str(ROOT),)) as cluster:
        cluster.add(NodeOrder("stays", 1, {"elastic-node": "stays"})).result(START_MOST_S)
        assert before.left_on_cluster(cluster, {"stays"}) == []
        cluster.add(NodeOrder("more", 1, {"elastic-node": "more"})).result(START_MOST_S)
        cluster.connect("leaks")
        actor = (
            ray.remote(num_cpus=0)(threading.Event)
            .options(name="a", namespace="elastic-x", lifetime="detached")
            .remote()
        )
        ray.get(actor.is_set.remote())
        ray.util.placement_group([{"CPU": 1}], name="p", lifetime="detached")
        cluster.disconnect()
        left = sorted(
            text.partition(" (")[0] for text in before.left_on_cluster(cluster, {"stays"})
        )
        assert left == ["actor elastic-x/a", "node more is left", "placement group p", "ray::Event"]
        assert "node gone is gone" in before.left_on_cluster(cluster, {"stays", "more", "gone"})
        assert any("ray" in text for text in before.left_on_machine()), "it stalls"
    nothing_left(before.left_on_machine)
    segment, folder = Path(f"/dev/shm/leaked-{os.getpid()}"), before.temp / "leaked"
    segment.touch()
    folder.mkdir()
    with child(["sleep", "600"]) as sleeper:
        try:
            assert set(before.left_on_machine()) >= {  # others may use shared memory just now
                f"process {sleeper.pid}: sleep 600 ",
                f"temporary {folder}",
                f"shared memory {segment.name}",
            }
        finally:
            segment.unlink()
