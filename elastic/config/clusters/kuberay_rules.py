"""What a manifest for KubeRay should say, beyond its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic.config.clusters.cluster_file import ClusterSpec, Problem

NOTICE_S = 30  # that a pod has to leave; the shortest of the clouds' notices


def cluster_of(spec: ClusterSpec) -> tuple[tuple[str | int, ...], Mapping[str, Any]]:
    """Where the cluster stands in the manifest, and what stands there."""
    inner = _mapping(spec.data.get("spec"))
    if spec.data.get("kind") == "RayJob":
        return ("spec", "rayClusterSpec"), _mapping(inner.get("rayClusterSpec"))
    return ("spec",), inner


def authentication(spec: ClusterSpec) -> Iterator[Problem]:
    place, cluster = cluster_of(spec)
    if _mapping(cluster.get("authOptions")).get("mode") != "token":
        what = "Ray runs the code of whoever reaches its ports: no token is asked for"
        yield Problem((*place, "authOptions"), what, "authOptions: {mode: token}")


def autoscaler(spec: ClusterSpec) -> Iterator[Problem]:
    place, cluster = cluster_of(spec)
    if not cluster.get("enableInTreeAutoscaling"):
        right = "enableInTreeAutoscaling: true"
        yield Problem(
            (*place, "enableInTreeAutoscaling"),
            "no autoscaler: replicas stay as they are",
            right,
            True,
        )
    elif _mapping(cluster.get("autoscalerOptions")).get("version") != "v2":
        what = (
            "the first autoscaler does not know label selectors: it would start nodes of the "
            "wrong pool"
        )
        yield Problem((*place, "autoscalerOptions"), what, "autoscalerOptions: {version: v2}")


def pods(spec: ClusterSpec) -> Iterator[Problem]:
    for node_type in spec.node_types:
        pod = _mapping(_mapping(node_type.node_config.get("template")).get("spec"))
        place = (*node_type.place, "template", "spec")
        grace = pod.get("terminationGracePeriodSeconds", 30)
        if not node_type.head and isinstance(grace, int) and grace < NOTICE_S:
            what = f"a pod that is told to leave has {grace} s"
            yield Problem(
                (*place, "terminationGracePeriodSeconds"),
                what,
                f"at least {NOTICE_S} s, as the clouds give",
            )
        containers = pod.get("containers") if isinstance(pod.get("containers"), list) else []
        for n, container in enumerate(containers or []):
            image = str(_mapping(container).get("image", ""))
            if image.endswith(":latest") or ":" not in image.rsplit("/", 1)[-1]:
                right = "a tag or digest, the same for head and workers"
                yield Problem(
                    (*place, "containers", n, "image"),
                    f"'{image}' may be another one tomorrow",
                    right,
                    True,
                )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


RULES = (authentication, autoscaler, pods)
