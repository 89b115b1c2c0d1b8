"""RayCluster and RayJob manifests of KubeRay as a ClusterSpec: a worker group is a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.catalog.bounded_yaml import yaml_of
from elastic.config.clusters.cluster_file import (
    MARKETS,
    ClusterNodeType,
    ClusterSpec,
    Place,
    Problem,
)
from elastic.config.clusters.elastic_section import Own, OwnPool
from elastic.config.clusters.kuberay_schema import problems_of_schema
from elastic.config.clusters.pools import pools_of
from elastic.config.strict_model import USD_MOST, finite, listed, mapping, whole
from elastic.types import MarketType
from elastic.types.nouns import ACCELERATOR_LABEL, MARKET_LABEL, REGION_LABEL, ZONE_LABEL

KINDS = ("RayCluster", "RayJob")
GPU_KEYS = ("nvidia.com/gpu", "amd.com/gpu")
PRICE = "elastic/usd-per-node-h"  # an annotation of a group's pod template
# node labels by which the common Kubernetes offers and autoscalers tell spot machines
SPOT_SELECTORS = {
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-provisioning": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
# and by which they tell node pools, whose market is not known here
POOL_SELECTORS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
    "kubernetes.azure.com/mode",
)
INSTANCE_SELECTOR, ZONE_SELECTOR = "node.kubernetes.io/instance-type", "topology.kubernetes.io/zone"


def documents(text: str, shown: str) -> list[Mapping[str, Any]]:
    """The RayCluster and RayJob manifests in a file's text. Raises SpecError where it is not
    YAML."""
    return [
        entry
        for entry in yaml_of(text, shown, several=True)
        if isinstance(entry, dict) and entry.get("kind") in KINDS
    ]


def spec_of(file: str, manifests: list[Mapping[str, Any]]) -> tuple[ClusterSpec, list[Problem]]:
    manifest = manifests[0]
    place: Place = ("spec",) if manifest["kind"] == "RayCluster" else ("spec", "rayClusterSpec")
    cluster: Any = manifest
    for key in place:
        cluster = mapping(mapping(cluster).get(str(key)))
    workers = [
        _group(mapping(entry), (*place, "workerGroupSpecs", n))
        for n, entry in enumerate(listed(cluster.get("workerGroupSpecs")))
    ]
    head = _head(mapping(cluster.get("headGroupSpec")), (*place, "headGroupSpec"))
    prices = {
        w.name: OwnPool(usd_per_node_h=p)
        for w in workers
        if (p := _price(w.node_config)) is not None
    }
    pools, sources, problems = pools_of("kubernetes", (head, *workers), Own(pools=prices))
    name = str(mapping(manifest.get("metadata")).get("name", ""))
    made = ClusterSpec(
        file, name, "kubernetes", "", (), (head, *workers), pools, dict(manifest), 0, sources,
        head_usd_per_h=_price(head.node_config) or 0.0,
    )  # fmt: skip
    said = [*_about_groups(manifest, (*place, "workerGroupSpecs")), *_without_a_most(workers)]
    return made, [*said, *problems]


def _about_groups(manifest: Mapping[str, Any], place: Place) -> list[Problem]:
    """What the schema says against the groups' own keys: a pool would come out wrong, or vanish."""
    depth = len(place)
    return [
        problem
        for problem in problems_of_schema(manifest)
        if problem.place[:depth] == place and len(problem.place) <= depth + 2
    ]


def _without_a_most(workers: Sequence[ClusterNodeType]) -> list[Problem]:
    what = f"it is missing: Kubernetes takes {2**31 - 1} for it"
    return [
        worker.problem("maxReplicas", what=what, right="give the most that you pay for")
        for worker in workers
        if not worker.max_nodes and "maxReplicas" not in worker.node_config
    ]


def _head(config: Mapping[str, Any], place: Place) -> ClusterNodeType:
    bought_as = _market_of(pod_of(config))
    return ClusterNodeType(
        "head", place, market_type=bought_as or "owned", bought_as=bought_as, node_config=config,
        head=True,
    )  # fmt: skip


def pod_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a group of workers, or of the head."""
    return mapping(mapping(entry.get("template")).get("spec"))


def _selector(pod: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in mapping(pod.get("nodeSelector")).items()}


def _market_of(pod: Mapping[str, Any]) -> MarketType | None:
    """Of the nodes that its selector lets it have; None = any."""
    selector = _selector(pod)
    if any(selector.get(key) == value for key, value in SPOT_SELECTORS.items()):
        return "spot"
    return "on-demand" if selector.keys() & SPOT_SELECTORS.keys() else None


def chooses_nodes(pod: Mapping[str, Any]) -> bool:
    """Whether it names a node pool, or has an affinity: what market that is only its cluster
    knows."""
    affinity = mapping(mapping(pod.get("affinity")).get("nodeAffinity"))
    return bool(affinity) or bool(_selector(pod).keys() & set(POOL_SELECTORS))


def _group(entry: Mapping[str, Any], place: Place) -> ClusterNodeType:
    labels = {str(key): str(value) for key, value in mapping(entry.get("labels")).items()}
    pod = pod_of(entry)
    selector, bought_as = _selector(pod), _market_of(pod) or "on-demand"
    market = labels.get(MARKET_LABEL)
    return ClusterNodeType(
        str(entry.get("groupName", f"group {place[-1]}")),
        place,
        selector.get(INSTANCE_SELECTOR, ""),
        next((m for m in MARKETS if m == market), bought_as),
        bought_as,
        labels.get(REGION_LABEL, ""),
        labels.get(ZONE_LABEL) or selector.get(ZONE_SELECTOR, ""),
        labels,
        _resources(pod, labels),
        dict(entry),
        whole(entry.get("minReplicas")),
        whole(entry.get("maxReplicas", entry.get("replicas"))),
    )


def _resources(pod: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, float]:
    """GPUs that the containers may use; where there are none: whole CPUs."""
    limits = [
        mapping(mapping(mapping(container).get("resources")).get("limits"))
        for container in listed(pod.get("containers"))
    ]
    gpus = sum(_quantity(limit.get(key)) for limit in limits for key in GPU_KEYS)
    if gpus or labels.get(ACCELERATOR_LABEL):
        return {"GPU": gpus}
    return {"CPU": float(int(sum(_quantity(limit.get("cpu")) for limit in limits)))}


def _price(entry: Mapping[str, Any]) -> float | None:
    metadata = mapping(mapping(entry.get("template")).get("metadata"))
    found = finite(mapping(metadata.get("annotations")).get(PRICE))
    return found if found is not None and 0 <= found <= USD_MOST else None


def _quantity(value: Any) -> float:
    text = str(value if value is not None else 0)
    return (finite(text[:-1]) or 0.0) / 1000 if text.endswith("m") else finite(text) or 0.0
