"""What a manifest for KubeRay should say: what the schema of its CRD asks for, and more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from elastic.config.clusters.cluster_file import ClusterNodeType, ClusterSpec, Problem
from elastic.config.clusters.kuberay import chooses_nodes, pod_of
from elastic.config.clusters.kuberay_schema import problems_of_schema
from elastic.config.strict_model import listed, mapping

NOTICE_S = 30  # that a pod has to leave; the shortest of the clouds' notices
GRACE_S = 30  # Kubernetes' default
HOOK = re.compile(r"pre_stop\.sh\W*(\d*)")
HOOK_S = 110  # that deploy/kubernetes/pre_stop.sh waits where nobody says how long
LABEL = "elastic-cluster"  # what deploy/kubernetes/network_policy.yaml selects by
SLEEP = re.compile(r"\bsleep\W+(\d+)")


def cluster_of(spec: ClusterSpec) -> tuple[tuple[str | int, ...], Mapping[str, Any]]:
    """Where the cluster stands in the manifest, and what stands there."""
    inner = mapping(spec.data.get("spec"))
    if spec.data.get("kind") == "RayJob":
        return ("spec", "rayClusterSpec"), mapping(inner.get("rayClusterSpec"))
    return ("spec",), inner


def authentication(spec: ClusterSpec) -> Iterator[Problem]:
    place, cluster = cluster_of(spec)
    if mapping(cluster.get("authOptions")).get("mode") != "token":
        what = "Ray runs the code of whoever reaches its ports: no token is asked for"
        yield Problem((*place, "authOptions"), what, "authOptions: {mode: token}")


def autoscaler(spec: ClusterSpec) -> Iterator[Problem]:
    place, cluster = cluster_of(spec)
    if not cluster.get("enableInTreeAutoscaling"):
        key, what = "enableInTreeAutoscaling", "no autoscaler: replicas stay as they are"
        yield Problem((*place, key), what, f"{key}: true", True)
    elif mapping(cluster.get("autoscalerOptions")).get("version") != "v2":
        what = (
            "the first autoscaler does not know label selectors: it would start nodes of the "
            "wrong pool"
        )
        yield Problem((*place, "autoscalerOptions"), what, "autoscalerOptions: {version: v2}")


def head(spec: ClusterSpec) -> Iterator[Problem]:
    """A spot head is an error wherever it is; here nothing may keep it from such a node."""
    found = spec.head
    if found is None or found.bought_as is not None:
        return
    pod = pod_of(found.node_config)
    if any(worker.market_type == "spot" for worker in spec.workers) and not chooses_nodes(pod):
        what = (
            "nothing keeps the head's pod off the spot nodes that are there: a reclaim of its own "
            "would end the whole cluster"
        )
        right = (
            "nodeSelector: {karpenter.sh/capacity-type: on-demand}, or as your cloud calls it: see "
            "deploy/kubernetes/raycluster.yaml"
        )
        yield found.problem(
            "template", "spec", "nodeSelector", what=what, right=right, warning=True
        )


def network(spec: ClusterSpec) -> Iterator[Problem]:
    """gloo, NCCL and torch's store take whoever reaches their ports."""
    values = set()
    for entry in spec.node_types:
        metadata = mapping(mapping(entry.node_config.get("template")).get("metadata"))
        values.add(str(mapping(metadata.get("labels")).get(LABEL, "")))
    if len(values) > 1 or "" in values:
        what = f"its pods have no label {LABEL} of one value: no network policy selects them by it"
        right = f"template.metadata.labels: {{{LABEL}: NAME}} on head and workers, and "
        right += "deploy/kubernetes/network_policy.yaml with that name"
        yield Problem(cluster_of(spec)[0], what, right, True)


def pods(spec: ClusterSpec) -> Iterator[Problem]:
    for node_type in spec.node_types:
        pod = pod_of(node_type.node_config)
        containers = [mapping(container) for container in listed(pod.get("containers"))]
        if not node_type.head:
            yield from _grace(node_type, pod, containers)
        for n, container in enumerate(containers):
            image = str(container.get("image", ""))
            if image.endswith(":latest") or ":" not in image.rsplit("/", 1)[-1]:
                what = f"'{image}' may be another one tomorrow"
                right = "a tag or digest, the same for head and workers"
                place = ("template", "spec", "containers", n, "image")
                yield node_type.problem(*place, what=what, right=right, warning=True)


def _grace(
    worker: ClusterNodeType, pod: Mapping[str, Any], containers: list[Mapping[str, Any]]
) -> Iterator[Problem]:
    """Kubernetes counts the hook's time from the grace period, and kills all at its end."""
    grace = pod.get("terminationGracePeriodSeconds", GRACE_S)
    if not isinstance(grace, int):
        return  # the schema says so
    place = ("template", "spec", "terminationGracePeriodSeconds")
    hook_s = max(map(_hook_s, containers), default=0)
    if grace < NOTICE_S:
        what = f"a pod that is told to leave has {grace} s"
        yield worker.problem(*place, what=what, right=f"at least {NOTICE_S} s, as the clouds give")
    elif grace <= hook_s:
        default = "" if "terminationGracePeriodSeconds" in pod else " (Kubernetes' default)"
        what = (
            f"a pod is killed after {grace} s{default}, while its preStop hook still gives its "
            f"workers {hook_s} s"
        )
        right = (
            f"terminationGracePeriodSeconds: {hook_s + 10}, or a hook of at most {grace - 5} s: "
            f"pre_stop.sh {grace - 5}"
        )
        yield worker.problem(*place, what=what, right=right)


def _hook_s(container: Mapping[str, Any]) -> int:
    """How long its preStop hook may take; 0 = there is none, or that is not known."""
    hook = mapping(mapping(container.get("lifecycle")).get("preStop"))
    slept = mapping(hook.get("sleep")).get("seconds")
    if isinstance(slept, int):
        return slept
    text = " ".join(map(str, listed(mapping(hook.get("exec")).get("command"))))
    if found := HOOK.search(text):
        return int(found[1] or HOOK_S)
    return sum(int(seconds) for seconds in SLEEP.findall(text))


def schema(spec: ClusterSpec) -> Iterator[Problem]:
    yield from problems_of_schema(spec.data)


def replicas(spec: ClusterSpec) -> Iterator[Problem]:
    for worker in spec.workers:
        if worker.min_nodes > worker.max_nodes:
            what = f"{worker.max_nodes}, but minReplicas is {worker.min_nodes}"
            right = f"at least {worker.min_nodes}"
            yield worker.problem("maxReplicas", what=what, right=right)
        elif worker.node_config.get("maxReplicas") == 0:
            what, right = "0: the group is no pool", "at least 1, or no such group"
            yield worker.problem("maxReplicas", what=what, right=right, warning=True)


RULES = (schema, authentication, autoscaler, head, replicas, network, pods)
