"""How soon a run knows what the cloud says of its nodes, on real Ray nodes of this machine, each
with metadata of its own.

A spot interruption is written on the metadata server at any moment between two looks; until the run
has the Notice, and until Ray drains the node too once the policy leaves it. Each repeat has a node
of its own, which ends with it. Then a real run, to which nodes are added and from which they are
killed: until it prepares a node that Ray has, and until it aborts a step.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from figures import Spread
from report import finish, options
from trial import Clock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.cluster.metadata_server import MetadataServer
from support.e2e.runs import job
from support.e2e.soak import Seen

from elastic import api
from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.ray import _ray_private
from elastic.ledger.journal import read
from elastic.storage import open_storage
from elastic.types import (
    Abort,
    Action,
    DrainNode,
    Event,
    NodeReady,
    Notice,
    Pool,
    Prepare,
    ReleaseNode,
)

MOST_S, REPEATS = 600.0, 10
WAIT_S = 120.0
ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
POOL = Pool("spot", market_type="spot", max_nodes=99)


@contextmanager
def stage() -> Iterator[tuple[LocalCluster, RayBackend]]:
    """A driver on a cluster that somebody else started, as yet without nodes."""
    with LocalCluster() as cluster, tempfile.TemporaryDirectory() as folder:
        cluster.connect("bench")
        _ray_private.mute_errors()
        backend = RayBackend(RayRun("capacity", folder, {}, (POOL,)))
        try:
            yield cluster, backend
        finally:
            backend.close()
            cluster.disconnect()


def wait(backend: RayBackend, clock: Clock, kind: type[Event]) -> Any:
    """The next event of the kind."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        clock.look(kind.__name__)
        for event in backend.poll(backend.now_s() + 0.5):
            if isinstance(event, kind):
                return event
    raise TimeoutError(f"no {kind.__name__} within {WAIT_S:.0f} s")


def one(
    cluster: LocalCluster, backend: RayBackend, server: MetadataServer, clock: Clock, name: str
) -> tuple[float, float]:
    """Seconds from the notice written to the Notice, and from the Notice to the drained node."""
    server.node(name)
    labels = {"elastic-node": name, "elastic-pool": "spot", "ray.io/market-type": "spot"}
    ray_id = cluster.add(
        NodeOrder(name, 1, labels, environment={ENDPOINT: server.endpoint(name)})
    ).result(WAIT_S)["ray_id"]
    wait(backend, clock, NodeReady)
    looked = f"GET /{name}/latest/meta-data/spot/instance-action"
    while looked not in server.asked:
        clock.look("the first look of a watcher")
        backend.poll(backend.now_s() + 0.1)
    pause_s = time.monotonic() + Random(name).random()
    while time.monotonic() < pause_s:
        backend.poll(backend.now_s() + 0.05)
    written_s = time.monotonic()
    server.interrupt(name, in_s=120)
    wait(backend, clock, Notice)
    noticed_s = time.monotonic()
    backend.execute(DrainNode(name))
    while (
        ray_id in {node.ray_id for node in backend.survey.alive.values()}
        and ray_id not in _ray_private.draining_nodes()
    ):
        clock.look("the drained node")
        time.sleep(0.005)
    drained_s = time.monotonic()
    backend.execute(ReleaseNode(name))
    cluster.kill(name).result(WAIT_S)
    return noticed_s - written_s, drained_s - noticed_s


def ordered_s(journal: Path, clock: Clock, after_s: float, done: Callable[[Action], bool]) -> float:
    """When the run first ordered such an action after that."""
    while True:
        clock.look("an order of the run")
        for line in read(journal) if journal.is_file() else ():
            if (
                line.at_s > after_s
                and line.decision is not None
                and any(map(done, line.decision.actions))
            ):
                return line.at_s
        time.sleep(0.1)


def in_a_run(repeats: int, clock: Clock) -> Mapping[str, Spread]:
    """Two nodes stay, a third one comes and is killed as soon as the run trains on it."""
    joined, broken = [], []
    root = str(Path(__file__).resolve().parents[2])
    with (
        LocalCluster((root,)) as cluster,
        tempfile.TemporaryDirectory() as folder,
        cluster.introduced(),
    ):
        layout = {n: f"dp_shard={n}" for n in (3, 2, 1)}
        pool = {"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": 3}
        path = job(Path(folder), 1_000_000, [], pools=[pool], layout=layout)
        journal = path / "runs" / "bench" / "journal.jsonl"
        options = api.Options(run_name="bench", address=cluster.address, show=False)
        run = threading.Thread(target=api.run, args=(path,), kwargs={"options": options})

        def add(name: str) -> None:
            labels = {"elastic-node": name, "elastic-pool": "spot", "ray.io/market-type": "spot"}
            cluster.add(NodeOrder(name, 1, labels)).result(WAIT_S)

        for name in ("a", "b"):
            add(name)
        run.start()
        seen = Seen(journal)

        def until_in_plan(names: Sequence[str], what: str) -> None:
            while (
                seen.in_transition
                or seen.plan is None
                or not {*names} <= {*seen.plan.nodes}
                or not seen.entered
            ):
                clock.look(what)
                time.sleep(0.1)
                seen.look()

        try:
            until_in_plan(("a", "b"), "the start of the run")
            for n in range(repeats):
                name, added_s = f"c{n}", time.time()
                add(name)
                ready_s = time.time()
                prepared_s = ordered_s(
                    journal,
                    clock,
                    added_s,
                    lambda a, name=name: isinstance(a, Prepare) and a.node_id == name,
                )
                joined.append(max(0.0, prepared_s - ready_s))
                until_in_plan((name,), "a plan with the node")
                time.sleep(1.0)
                killed_s = time.time()
                cluster.kill(name)
                broken.append(
                    ordered_s(journal, clock, killed_s, lambda a: isinstance(a, Abort)) - killed_s
                )
        finally:
            api.stop(open_storage(str(journal.parent)), "measured")
            run.join(WAIT_S)
    return {"ready_to_prepare_s": Spread(tuple(joined)), "kill_to_abort_s": Spread(tuple(broken))}


def measure(repeats: int, clock: Clock) -> Mapping[str, Any]:
    found = []
    with MetadataServer() as server, stage() as (cluster, backend):
        for n in range(repeats):
            found.append(one(cluster, backend, server, clock, f"spot-{n}"))
    spreads = {
        "notice_to_event_s": Spread(tuple(noticed for noticed, _ in found)),
        "event_to_drained_s": Spread(tuple(drained for _, drained in found)),
        "notice_to_drained_s": Spread(tuple(map(sum, found))),
        **in_a_run(repeats, clock),
    }
    middles = {name: spread.middle for name, spread in spreads.items()}
    return middles | {"spread": {name: spread.plain() for name, spread in spreads.items()}}


def main() -> int:
    given = options(__doc__, MOST_S, REPEATS)
    return finish("capacity", given, lambda clock: measure(given.repeats, clock))


if __name__ == "__main__":
    sys.exit(main())
