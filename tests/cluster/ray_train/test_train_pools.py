"""The pools of an ElasticTrainer on a Ray cluster: its node types, those that are there and those
that its autoscaler can start; and what cannot drive a run there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic.errors import SpecError

train = pytest.importorskip("ray.train")
from elastic.cluster.local.local_cluster import LocalCluster  # noqa: E402
from elastic.cluster.nodes import node_types  # noqa: E402
from elastic.cluster.nodes.node_types import Monitor  # noqa: E402
from elastic.cluster.ray_train import train_types  # noqa: E402
from elastic.cluster.ray_train.train_types import connected, pools, wanted  # noqa: E402

Scaling = train.ScalingConfig


def node(name: str | None, cpus: int, gpus: int = 0, **labels: str) -> dict[str, Any]:
    """As `ray.nodes()` has it."""
    named = {} if name is None else {"ray.io/node-group": name}
    told = {f"ray.io/{key.replace('_', '-')}": value for key, value in labels.items()}
    return {"Alive": True, "Labels": named | told, "Resources": {"CPU": cpus, "GPU": gpus}}


def of_cluster(
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[dict[str, Any]],
    scaling: Any,
    monitor: Monitor | None = None,
) -> list[dict[str, Any]]:
    """`monitor`: that of the autoscaler on the head."""
    monkeypatch.setattr(train_types.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(train_types._ray_private, "autoscaler_v2", lambda: True)
    monkeypatch.setattr(train_types, "on_head", lambda ask: ask())
    monkeypatch.setattr(node_types, "monitor_here", lambda: monitor)
    return pools(wanted(scaling, None), on_cluster=True)


SPOT = {"name": "a", "accelerator_type": "H100", "market_type": "spot"}


def test_each_node_type_that_the_cluster_labels_is_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `ray up` and KubeRay; the head's own label is none, and nodes without what is wanted
    of them are left out."""
    head = node("head", 4)
    head["Resources"]["node:__internal_head__"] = 1.0
    gone = node("gone", 4, 8) | {"Alive": False}
    kind = {"accelerator_type": "H100"}
    nodes = [
        head, gone, node("a", 64, 8, market_type="spot", **kind), node("cpus", 16),
        node("a", 64, 8, market_type="spot", **kind), node("b", 64, 4, market_type="other"),
    ]  # fmt: skip
    found = of_cluster(monkeypatch, nodes, Scaling(num_workers=(2, 16), use_gpu=True))
    b = {"name": "b", "accelerator_type": "GPU", "market_type": "owned"}
    assert found == [
        SPOT | {"gpus_per_node": 8, "max_nodes": 16},
        b | {"gpus_per_node": 4, "max_nodes": 16},
    ]
    labels = {"ray.io/market-type": "spot"}
    only = Scaling(num_workers=4, use_gpu=True, label_selector=labels)
    assert [pool["name"] for pool in of_cluster(monkeypatch, nodes, only)] == ["a"]
    bare = of_cluster(monkeypatch, [head, node(None, 2)], Scaling(num_workers=4))
    assert [(pool["name"], pool["gpus_per_node"]) for pool in bare] == [("workers", 4)]


def monitor_of(file: Path, **types: Any) -> Monitor:
    """An autoscaler that can start these."""
    types = {"head": {"resources": {"CPU": 4}}, **types}
    file.write_text(json.dumps({"head_node_type": "head", "available_node_types": types}))
    return Monitor(str(file), Path("monitor.log"))


def test_node_types_that_the_autoscaler_can_start_are_pools_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their nodes count by a label, where the type has one that names a pool."""
    of_a = {"ray.io/market-type": "spot", "ray.io/accelerator-type": "H100"}
    gpus, labeled = {"CPU": 64, "GPU": 8}, {"pool": "b", **of_a}
    monitor = monitor_of(
        tmp_path / "types.yaml", a={"resources": gpus, "labels": of_a, "max_workers": 3},
        none={"resources": gpus, "max_workers": 0},
        b8={"resources": gpus, "labels": labeled, "max_workers": 1},
    )  # fmt: skip
    scaling = Scaling(num_workers=(2, 16), use_gpu=True)
    wants = [
        SPOT | {"gpus_per_node": 8, "max_nodes": 3},
        SPOT | {"name": "b", "gpus_per_node": 8, "max_nodes": 1},
    ]
    assert of_cluster(monkeypatch, [], scaling, monitor) == wants


@pytest.mark.parametrize("asked", ["H100", "H100-80GB-SXM", "L4"])
def test_an_accelerator_that_is_asked_for_is_any_spelling_of_a_label_and_each_without_one(
    asked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = {"resources": {"GPU": 8}, "max_workers": 1}
    h100 = gpus | {"labels": {"ray.io/accelerator-type": "H100"}}
    monitor = monitor_of(tmp_path / "types.yaml", labeled=h100, bare=gpus)
    scaling = Scaling(num_workers=8, use_gpu=True, accelerator_type=asked)
    found = of_cluster(monkeypatch, [], scaling, monitor)
    names = ["bare"] if asked == "L4" else ["labeled", "bare"]
    assert [(pool["name"], pool["accelerator_type"]) for pool in found] == [
        (name, asked) for name in names
    ]


def test_an_autoscaler_whose_types_nobody_tells_is_no_one_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its nodes would count to no pool. Those of a type that is there have a name."""
    scaling = Scaling(num_workers=4)
    unread = Monitor(str(tmp_path / "of root"), Path("monitor.log"))
    said = r"is not known here; give cluster=FILE .*or job=\{'pools'"
    with pytest.raises(SpecError, match=said):
        of_cluster(monkeypatch, [], scaling, unread)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(SpecError, match=said):
        of_cluster(monkeypatch, [], scaling)
    assert [p["name"] for p in of_cluster(monkeypatch, [node("a", 2)], scaling)] == ["a"]
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert [p["name"] for p in of_cluster(monkeypatch, [], scaling)] == ["workers"]
    only_looks_on = Monitor("", Path("monitor.log"))
    assert [p["name"] for p in of_cluster(monkeypatch, [], scaling, only_looks_on)] == ["workers"]


@pytest.mark.e2e
def test_the_head_is_asked_from_another_node(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process() -> int:
        return os.getpid()

    assert train_types.on_head(process) == os.getpid(), "this is the head"
    monkeypatch.setattr(ray.get_runtime_context(), "get_node_id", lambda: "another one")
    assert train_types.on_head(process) not in (os.getpid(), None)


def test_a_process_that_can_drive_no_run_of_the_cluster_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(address: str, **_: Any) -> None:
        raise RuntimeError("No node info found matching attributes: '10.0.0.9' when trying to ...")

    monkeypatch.setattr(train_types.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(train_types.ray, "init", init)
    with pytest.raises(SpecError, match="this host is no node"), connected("10.0.0.1:6379"):
        pass
    monkeypatch.setattr(train_types._ray_private, "is_client", lambda: True)
    with pytest.raises(SpecError, match="this process is a Ray client"), connected(None):
        pass
