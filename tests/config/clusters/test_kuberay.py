"""Manifests of KubeRay: what the schema of its CRD refuses, and what would end a pod too early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster import condense_crd
from support.places import ROOT

from elastic import api
from elastic.cli.command_line import main
from elastic.config.clusters import load_cluster
from elastic.config.clusters.kuberay_schema import problems_of_schema
from elastic.errors import SpecError

MANIFESTS = {
    name: ROOT / "deploy" / "kubernetes" / name for name in ("raycluster.yaml", "rayjob.yaml")
}
CLUSTER = MANIFESTS["raycluster.yaml"].read_text()
GRACE = "terminationGracePeriodSeconds: 120"
HOOK = "[sh, /home/elastic/deploy/kubernetes/pre_stop.sh]"


def errors(folder: Path, text: str) -> list[str]:
    """What is said of the file, without its name."""
    file = folder / "manifest.yaml"
    file.write_text(text)
    lines = api.check_cluster(file).lines()
    return [line.removeprefix(f"{file}:") for line in lines if " warning: " not in line]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifests_of_this_repository_follow_the_schema(name: str) -> None:
    manifest = yaml.safe_load(MANIFESTS[name].read_text())
    assert problems_of_schema(manifest) == []
    assert api.check_cluster(MANIFESTS[name]).ok


REFUSED = [
    (
        ("maxReplicas: 8", "maxReplica: 8"),
        "61: error: spec.workerGroupSpecs.0.maxReplica: KubeRay 1.7.0 knows no key 'maxReplica' here: "
        "it is refused, or ignored; did you mean maxReplicas",
    ),
    (("groupName: p5-spot", "numOfHosts: 1"), "workerGroupSpecs.0.groupName: it is missing, and KubeRay needs it"),
    (("maxReplicas: 8", "maxReplicas: eight"), "maxReplicas: it is eight; it must be a whole number"),
    (("maxReplicas: 8", "maxReplicas: true"), "maxReplicas: it is True; it must be a whole number"),
    (("replicas: 0\n      minReplicas: 0\n      maxReplicas: 8", "minReplicas: 0"), "maxReplicas: it is missing: Kubernetes takes 2147483647"),
    (("minReplicas: 0", "minReplicas: 9"), "maxReplicas: 8, but minReplicas is 9; at least 9"),
    (('num-cpus: "0"', "num-cpus: 0"), "num-cpus: it is 0; it must be text (in quotes)"),
    (("mode: token", "mode: tokens"), "authOptions.mode: it is tokens; one of disabled, token"),
    (('nvidia.com/gpu: "8"', "nvidia.com/gpu: 8 GPUs"), "nvidia.com/gpu: 8 GPUs is no quantity; a whole"),
    (("readOnlyRootFilesystem", "readOnlyRootFs"), "did you mean readOnlyRootFilesystem?"),
    (("ray.io/v1\n", "ray.io/v2\n"), "apiVersion: 'ray.io/v2' is not the API of KubeRay's operator; apiVersion: ray.io/v1"),
    (("workerGroupSpecs:", "workers:"), "spec.workers: KubeRay 1.7.0 knows no key 'workers' here"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "what"), REFUSED, ids=lambda value: "")
def test_what_the_schema_refuses_is_told_where_it_stands(
    tmp_path: Path, change: tuple[str, str], what: str
) -> None:
    assert change[0] in CLUSTER
    found = errors(tmp_path, CLUSTER.replace(*change, 1))
    assert any(what in line for line in found), found


def test_a_key_that_a_group_does_not_have_keeps_its_pool_from_being_planned(tmp_path: Path) -> None:
    """Else the pool would vanish without a word. In a pod it does not matter to a plan."""
    file = tmp_path / "manifest.yaml"
    file.write_text(CLUSTER.replace("maxReplicas: 8", "maxReplica: 8"))
    with pytest.raises(SpecError, match="knows no key 'maxReplica' here"):
        load_cluster(file)
    file.write_text(CLUSTER.replace("runAsNonRoot", "runAsNobody"))
    assert [pool.name for pool in load_cluster(file).pools] == ["p5-spot", "p5-on-demand"]


def test_a_group_without_pods_is_named(tmp_path: Path) -> None:
    file = tmp_path / "manifest.yaml"
    file.write_text(CLUSTER.replace("maxReplicas: 8", "maxReplicas: 0"))
    (told,) = (line for line in api.check_cluster(file).lines() if "no pool" in line)
    assert "warning: spec.workerGroupSpecs.0.maxReplicas: 0: the group is no pool" in told


@pytest.mark.parametrize(
    ("grace", "hook", "told"),
    [
        ("terminationGracePeriodSeconds: 40", HOOK, "killed after 40 s, while its preStop hook still gives its workers 110 s"),
        ("terminationGracePeriodSeconds: 110", HOOK, "terminationGracePeriodSeconds: 120, or a hook of at most 105 s"),
        ("terminationGracePeriodSeconds: 111", HOOK, ""),
        ("hostNetwork: false", HOOK, "killed after 30 s (Kubernetes' default)"),
        ("hostNetwork: false", HOOK.replace("]", ', "25"]'), ""),
        ("hostNetwork: false", '[sh, -c, "sh pre_stop.sh 45"]', "gives its workers 45 s"),
        ("hostNetwork: false", '[sh, -c, "touch /tmp/x; sleep 60"]', "gives its workers 60 s"),
        ("terminationGracePeriodSeconds: 20", HOOK, "a pod that is told to leave has 20 s; at least 30 s"),
    ],
)  # fmt: skip
def test_a_grace_period_is_longer_than_the_hook(
    tmp_path: Path, grace: str, hook: str, told: str
) -> None:
    found = errors(tmp_path, CLUSTER.replace(GRACE, grace).replace(HOOK, hook))
    assert all(told in line for line in found) if told else not found
    assert len(found) == (2 if told else 0)  # of both groups


def test_a_hook_of_kubernetes_own_that_sleeps(tmp_path: Path) -> None:
    found = errors(tmp_path, CLUSTER.replace(f"exec: {{command: {HOOK}}}", "sleep: {seconds: 130}"))
    assert len(found) == 2 and all("gives its workers 130 s" in line for line in found)


HEAD = "nodeSelector: {karpenter.sh/capacity-type: on-demand}"


def about_head(folder: Path, selector: str) -> list[str]:
    file = folder / "manifest.yaml"
    assert HEAD in CLUSTER
    file.write_text(CLUSTER.replace(HEAD, selector))
    lines = api.check_cluster(file).lines()
    return [
        line.removeprefix(f"{file}:")
        for line in lines
        if "spec.headGroupSpec" in line and "REPLACE" not in line
    ]


@pytest.mark.parametrize(
    "selector",
    ["karpenter.sh/capacity-type: spot", 'cloud.google.com/gke-spot: "true"', "eks.amazonaws.com/capacityType: SPOT"],
)  # fmt: skip
def test_a_head_on_spot_nodes_is_refused(tmp_path: Path, selector: str) -> None:
    (error,) = about_head(tmp_path, f"nodeSelector: {{{selector}}}")
    assert "error: spec.headGroupSpec: the head is a spot node: its reclaim ends" in error


def test_a_head_that_may_come_to_a_spot_node_is_warned_of(tmp_path: Path) -> None:
    (warning,) = about_head(tmp_path, "nodeSelector: {kubernetes.io/arch: amd64}")
    assert " warning: spec.headGroupSpec.template.spec.nodeSelector: nothing keeps the" in warning
    assert "karpenter.sh/capacity-type: on-demand" in warning


@pytest.mark.parametrize(
    "selector",
    [
        "nodeSelector: {cloud.google.com/gke-provisioning: standard}",
        "nodeSelector: {kubernetes.azure.com/agentpool: system}",
        "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
        "[{matchExpressions: [{key: cloud.google.com/gke-spot, operator: DoesNotExist}]}]}}}",
    ],
)  # fmt: skip
def test_a_head_that_is_kept_off_spot_nodes_in_another_cloud(tmp_path: Path, selector: str) -> None:
    assert about_head(tmp_path, selector) == []


@pytest.mark.parametrize("name", [*MANIFESTS, "init"])
def test_the_head_is_on_demand_and_not_evicted_and_workers_have_their_notice(
    tmp_path: Path, name: str
) -> None:
    """Karpenter does not evict an annotated pod from a node that will be reclaimed: no preStop."""
    file = MANIFESTS.get(name, tmp_path / "own.yaml")
    if name == "init":
        asked = ["init", str(tmp_path / "job"), "--on", "kubernetes", "--cluster", str(file)]
        assert main(asked) == 0
    spec = load_cluster(file)
    assert spec.head is not None and spec.head.market_type == "on-demand"
    assert "Without Karpenter no node has its labels" in file.read_text() or name == "rayjob.yaml"

    def annotations(node_config: Any) -> Any:
        return node_config["template"].get("metadata", {}).get("annotations", {})

    assert annotations(spec.head.node_config) == {"karpenter.sh/do-not-disrupt": "true"}
    assert all(not annotations(worker.node_config) for worker in spec.workers)


def test_the_network_policy_and_the_accounts_fit_what_init_writes(tmp_path: Path) -> None:
    """With the cluster's name in the policy, as the file says."""
    file = tmp_path / "own.yaml"
    asked = ["init", str(tmp_path / "first"), "--on", "kubernetes", "--cluster", str(file)]
    assert main(asked) == 0
    text = file.read_text()
    assert "with first for both values of elastic-cluster" in text
    policy = (ROOT / "deploy" / "kubernetes" / "network_policy.yaml").read_text()
    assert policy.count("{elastic-cluster: elastic}") == 2
    made = yaml.safe_load(policy.replace("elastic-cluster: elastic", "elastic-cluster: first"))
    accounts = (ROOT / "deploy" / "kubernetes" / "accounts.yaml").read_text()
    spec = yaml.safe_load(text)["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert labels == made["spec"]["podSelector"]["matchLabels"]
        who = "head" if "groupName" not in group else "worker"
        assert group["template"]["spec"]["serviceAccountName"] == f"elastic-{who}"
        assert f"metadata: {{name: elastic-{who}}}" in accounts


@pytest.mark.parametrize("other", ["", "elastic-cluster: other", "elastic-cluster: [a]"])
def test_pods_that_no_network_policy_selects_are_warned_of(tmp_path: Path, other: str) -> None:
    file = tmp_path / "manifest.yaml"
    told = []
    for text in (CLUSTER, CLUSTER.replace("elastic-cluster: elastic", other, 1)):
        file.write_text(text)
        told.append(
            [line for line in api.check_cluster(file).lines() if "no network policy" in line]
        )
    ok, (warning,) = told
    assert not ok and " warning: spec: its pods have no label elastic-cluster of one" in warning


def test_a_crd_is_condensed_to_what_is_checked(tmp_path: Path) -> None:
    """Parts that stand in several places stand once; a key with a default need not be there."""
    words = {word * 9: {"type": "string"} for word in "abcdef"}
    names = {"type": "object", "required": ["a" * 9], "properties": words}
    told = {
        "type": "object",
        "description": "long",
        "required": ["a" * 9, "b" * 9],
        "properties": {**words, "b" * 9: {"type": "string", "default": "b"}},
    }
    parts = {"kind": {"type": "string"}, "one": told, "all": {"type": "array", "items": told}}
    schema: dict[str, Any] = {"type": "object", "properties": {**parts, "status": told}}
    crd = {"spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]}}
    for file in condense_crd.FILES.values():
        (tmp_path / file).write_text(yaml.safe_dump(crd))
    made = json.loads(condense_crd.condensed(tmp_path, "9.9"))
    assert made["version"] == "9.9" and made["kinds"]["RayJob"] == made["kinds"]["RayCluster"]
    (number,) = (number for number, part in made["parts"].items() if part == names)
    top = made["parts"][made["kinds"]["RayJob"]["$ref"]]["properties"]
    assert top["one"] == {"$ref": number} and "status" not in top
