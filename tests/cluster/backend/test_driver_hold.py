"""How a driver connects to its cluster, and how it lets go of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.backend import driver_hold
from elastic.cluster.backend.driver_hold import DriverHold
from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.ray import _ray_private
from elastic.errors import LostContact, SpecError
from elastic.types import Abort, Action, DrainNode, Node, Quarantine, ReleaseNode, WorkerId
from elastic.worker.hosting.hosting_backend import Pacing


@pytest.mark.parametrize(
    "error", [ConnectionError("Failed to connect to Ray cluster"), RuntimeError("no GCS")]
)
def test_a_cluster_that_accepts_and_does_not_answer_is_told_in_words(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(address: str, **_: Any) -> None:
        raise error

    monkeypatch.setattr(_ray_private.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(_ray_private.ray, "init", init)
    run = RayRun("r", "/runs/r", {}, (), address="10.0.0.1:6379")
    said = rf"^run 'r': the Ray cluster at 10\.0\.0\.1:6379 does not answer \(.*{error}\); run it again"
    with pytest.raises(LostContact, match=said):
        driver_hold.connect(run, None)


def test_gpus_of_a_cluster_are_not_left_idle_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    shut: list[str] = []
    labels = {"ray.io/accelerator-type": "H100"}
    nodes = [RayNode("a", "10.0.0.2", 1, labels, 64, 8, False)]
    monkeypatch.setattr(_ray_private.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(_ray_private.ray, "shutdown", lambda: shut.append("it"))
    monkeypatch.setattr(_ray_private, "connect", lambda *_: None)
    monkeypatch.setattr(_ray_private, "mute_errors", lambda: None)
    monkeypatch.setattr(driver_hold, "living", lambda: nodes)
    run = RayRun("r", "/runs/r", {}, ())
    assert driver_hold.connect(run, None)
    said = r"^run 'r': its job names no pools.* 10\.0\.0\.2 \(8 GPUs, .*=H100\); give --cluster"
    with pytest.raises(SpecError, match=said):
        driver_hold.connect(replace(run, default_pools=True), None)
    assert shut == ["it"]
    nodes.clear()
    assert driver_hold.connect(replace(run, default_pools=True), None)


def test_a_host_that_is_no_node_of_the_cluster_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: str, namespace: str) -> None:
        raise RuntimeError("No node info found matching attributes: '10.0.0.9' when trying to ...")

    monkeypatch.setattr(_ray_private.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(_ray_private, "connect", connect)
    with pytest.raises(SpecError, match=r"^this host is no node of .* 10\.0\.0\.1:6379: .*ray job"):
        driver_hold.connect(RayRun("r", "/runs/r", {}, (), address="10.0.0.1:6379"), None)


def test_a_process_that_is_a_ray_client_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ray_private, "is_client", lambda: True)
    with pytest.raises(SpecError, match=r"Ray client \(ray://\.\.\.\), but the driver runs on a"):
        driver_hold.connect(RayRun("r", "/runs/r", {}, ()), None)


class Lease:
    """Expires by this driver's own clock, while a newer driver has attached to the workers: storage
    is away, so that `lost` is never seen."""

    lost, epoch, trouble, unheard_s = False, 1, None, 0.0

    def __init__(self) -> None:
        self.certain = True

    def give_up(self) -> None:
        self.lost = True


class Group:
    """Workers that obey another driver from then on that the lease has expired."""

    def __init__(self) -> None:
        self.ended: list[WorkerId] = []
        self.asked = 0

    def workers(self, node_id: str = "") -> list[WorkerId]:
        return [WorkerId(node_id, 0)]

    def end(self, workers: list[WorkerId], *, gone: bool = False) -> None:
        self.ended += workers

    def replaced(self) -> str:
        self.asked += 1
        return "the driver of epoch 1 has been replaced by that of epoch 2"

    def order_all(self, action: Action) -> None: ...


ORDERS: list[Action] = [
    ReleaseNode("c"),
    DrainNode("c"),
    Quarantine("c", "slow"),
    Abort(3, (WorkerId("c", 0),)),
]


@pytest.mark.parametrize("last", ORDERS, ids=lambda action: type(action).__name__)
@pytest.mark.parametrize("expired", [False, True])
def test_a_lease_that_expires_between_two_orders_of_one_decision_holds_back_the_second(
    last: Action, expired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, group = Lease(), Group()
    drained: list[str] = []
    released: list[str] = []
    monkeypatch.setattr(
        "elastic.cluster.backend.ray_backend.drain_in_ray",
        lambda ray_id, *_: drained.append(ray_id),
    )

    def release(node_id: str, taken_in_s: float | None) -> None:
        released.append(node_id)
        lease.certain = not (expired and node_id == "a")

    backend: Any = object.__new__(RayBackend)
    nobody = SimpleNamespace(
        forget=lambda *_: None,
        abort=lambda *_: None,
        left=lambda *_: None,
        announced_s=lambda _: None,
        written=lambda **_: None,
    )
    vars(backend).update(
        run=RayRun("r", "/runs/r", {}, ()), cluster=None, lease=lease, worker_group=group,
        _group=group, _pacing=Pacing(), _closed=False, _early=[], nodes={
            name: Node(name, "spot", 1) for name in "abc"
        }, provider=SimpleNamespace(
            release=release, quarantine=nobody.left, ray_id=lambda name: name, autoscaled=True,
        ), inbox=nobody,
        cloud_feed=SimpleNamespace(notices=nobody, forget=nobody.forget), gather=nobody,
        drilling=nobody, entrance=nobody, liveness=nobody, stores=nobody, now_s=lambda: 0.0,
        _pool=lambda name: SimpleNamespace(notice_s=30.0),
    )  # fmt: skip
    backend.hold = DriverHold(backend.run, None, backend, group, False)
    backend.execute(ReleaseNode("a"))
    with pytest.raises(LostContact, match="epoch 2") if expired else nullcontext():
        backend.execute(last)
    more = [name for name in "c" if not expired]
    assert released == ["a", *(more if isinstance(last, ReleaseNode) else [])]
    assert drained == (more if isinstance(last, DrainNode) else [])
    kills = [] if isinstance(last, DrainNode) else more
    assert [worker.node_id for worker in group.ended] == ["a", *kills]
    assert backend.hold.let_go is expired
    assert group.asked == expired, "no question while the lease is certain"
