"""What stands in deploy/: policies, manifests and the image's recipe, as far as that can be tried
without a cloud or Docker."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.places import ROOT
from support.policies import allows

from elastic import api
from elastic.api.running.supervise import command_of
from elastic.cli import run_command
from elastic.config.clusters import load_cluster

DEPLOY = ROOT / "deploy"
MANIFESTS = {"RayCluster": "raycluster", "RayJob": "rayjob"}
POLICIES = sorted((DEPLOY / "iam").glob("*.json"))
# What Ray's provider for AWS calls on EC2, on a head and from `ray up`, and `elastic prices` and
# `reap` besides.
CALLED = {
    "RunInstances",
    "CreateTags",
    "TerminateInstances",
    "DescribeInstances",
    "DescribeSpotPriceHistory",
    "GetSpotPlacementScores",
}


def statements(name: str) -> list[dict[str, Any]]:
    return json.loads((DEPLOY / "iam" / f"aws-{name}.json").read_text())["Statement"]


def actions(found: dict[str, Any]) -> list[str]:
    return [found["Action"]] if isinstance(found["Action"], str) else found["Action"]


# ---------------------------------------------------------------------------------------------- IAM


@pytest.mark.parametrize("file", POLICIES, ids=lambda file: file.stem)
def test_a_policy_names_actions_that_are_there_and_no_stars(file: Path) -> None:
    import botocore.session

    known = set(botocore.session.get_session().get_service_model("ec2").operation_names)
    found = statements(file.stem.removeprefix("aws-"))
    assert len({entry["Sid"] for entry in found}) == len(found) > 2
    for entry in found:
        assert entry["Effect"] == "Allow"
        for action in actions(entry):
            service, _, call = action.partition(":")
            assert "*" not in action
            assert service != "ec2" or call in known, action
            if not call.startswith(("Describe", "Get")):
                assert entry["Resource"] != "*", action


@pytest.mark.parametrize("name", ["head", "user"])
def test_instances_are_started_and_ended_by_the_clusters_tag_alone(name: str) -> None:
    found = statements(name)
    assert {action.removeprefix("ec2:") for entry in found for action in actions(entry)} >= CALLED
    for entry in found:
        condition = json.dumps(entry.get("Condition", {}))
        instances = "arn:aws:ec2:*:*:instance/*" in entry["Resource"] or entry["Resource"] == "*"
        if "ec2:TerminateInstances" in actions(entry):
            assert "aws:ResourceTag/ray-cluster-name" in condition
        if "ec2:RunInstances" in actions(entry) and instances:
            assert "aws:RequestTag/ray-cluster-name" in condition
        if "ec2:CreateTags" in actions(entry):
            assert "ray-cluster-name" in condition or "ec2:CreateAction" in condition
    passed = next(entry["Resource"] for entry in found if "iam:PassRole" in actions(entry))
    assert passed == f"arn:aws:iam::*:role/elastic-{'worker' if name == 'head' else 'head'}"


INSTANCE, VOLUME = "arn:aws:ec2:us-east-1:1:instance/i-1", "arn:aws:ec2:us-east-1:1:volume/v-1"
OWN, OTHER = "REPLACE-CLUSTER", "REPLACE-CLUSTER-2"
WANTED, THERE = "aws:RequestTag/ray-cluster-name", "aws:ResourceTag/ray-cluster-name"


@pytest.mark.parametrize("name", ["head", "user"])
@pytest.mark.parametrize(
    ("action", "resource", "keys", "allowed"),
    [
        ("ec2:RunInstances", INSTANCE, {WANTED: OWN}, True),
        ("ec2:RunInstances", INSTANCE, {WANTED: OTHER}, False),
        ("ec2:RunInstances", INSTANCE, {}, False),
        ("ec2:RunInstances", VOLUME, {}, True),
        ("ec2:CreateTags", INSTANCE, {"ec2:CreateAction": "RunInstances", WANTED: OWN}, True),
        (
            "ec2:CreateTags",
            INSTANCE,
            {WANTED: OWN, THERE: OTHER},
            False,
        ),  # else a foreign one could be made one's own, and ended
        ("ec2:CreateTags", INSTANCE, {WANTED: OWN}, False),
        ("ec2:CreateTags", INSTANCE, {THERE: OWN}, True),
        ("ec2:TerminateInstances", INSTANCE, {THERE: OWN}, True),
        ("ec2:TerminateInstances", INSTANCE, {THERE: OTHER}, False),
        ("ec2:TerminateInstances", INSTANCE, {THERE: "elastic-cheap"}, False),
        ("ec2:TerminateInstances", INSTANCE, {}, False),
        ("ec2:StopInstances", INSTANCE, {THERE: OWN}, False),
        (
            "iam:PassRole",
            "arn:aws:iam::1:role/admin",
            {"iam:PassedToService": "ec2.amazonaws.com"},
            False,
        ),
        (
            "iam:PassRole",
            "arn:aws:iam::1:role/elastic-worker",
            {"iam:PassedToService": "lambda.amazonaws.com"},
            False,
        ),
    ],
)
def test_of_instances_only_this_clusters_may_be_started_tagged_and_ended(
    name: str, action: str, resource: str, keys: dict[str, str], allowed: bool
) -> None:
    assert allows(statements(name), action, resource, keys) is allowed
    assert not allows(statements("worker"), action, resource, keys)


def test_of_the_bucket_only_the_prefixes() -> None:
    bucket = "arn:aws:s3:::REPLACE-BUCKET"
    for who, removes in (("head", True), ("worker", False), ("user", None)):
        found = statements(who)
        assert allows(found, "s3:PutObject", f"{bucket}/elastic/run/journal.jsonl") is (
            removes is not None
        )
        assert allows(found, "s3:DeleteObject", f"{bucket}/elastic/run/journal.jsonl") is bool(
            removes
        )
        assert not allows(found, "s3:PutObject", f"{bucket}/tokens/x.bin") and not allows(
            found, "s3:GetObject", f"{bucket}-2/elastic/x"
        )
        assert allows(found, "s3:ListBucket", bucket, {"s3:prefix": "elastic/run/"}) is (
            removes is not None
        )
        assert not allows(found, "s3:ListBucket", bucket, {"s3:prefix": "payroll/"}) and not allows(
            found, "s3:ListBucket", bucket
        )


def test_workers_have_no_rights_on_instances_and_none_outside_their_prefixes() -> None:
    for entry in statements("worker"):
        assert all(action.startswith("s3:") for action in actions(entry))
        assert fnmatch(
            entry["Resource"], "arn:aws:s3:::REPLACE-BUCKET/*/*"
        ) or "s3:prefix" in json.dumps(entry["Condition"])


def test_the_policies_fit_the_cluster_files() -> None:
    """The profiles are those that deploy/iam/README.md makes, and each file has a name of its own
    to put in."""
    names = [load_cluster(file).name for file in (ROOT / "cluster_configs").glob("aws*.yaml")]
    assert len(set(names)) == len(names) > 2
    for file in (ROOT / "cluster_configs").glob("aws*.yaml"):
        spec = load_cluster(file)
        for node_type in spec.node_types:
            wanted = "elastic-head" if node_type.head else "elastic-worker"
            assert node_type.node_config["IamInstanceProfile"] == {"Name": wanted}


# --------------------------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_is_right_but_for_its_placeholders(kind: str) -> None:
    found = api.check_cluster(DEPLOY / "kubernetes" / f"{MANIFESTS[kind]}.yaml")
    assert [line for line in found.lines() if "placeholders; put in your own" not in line] == []
    assert {pool.market_type for pool in found.spec.pools} == {"spot", "on-demand"}
    assert all(pool.gpus_per_node == 8 and pool.usd_per_node_h > 0 for pool in found.spec.pools)
    assert found.spec.head is not None
    assert "nvidia.com/gpu" not in json.dumps(found.spec.head.node_config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            ("authOptions: {mode: token}", "authOptions: {mode: disabled}"),
            "spec.authOptions: Ray runs the code of whoever reaches",
        ),
        (
            ("    version: v2", "    version: v1"),
            "spec.autoscalerOptions: the first autoscaler does not know label selectors",
        ),
        (
            ("        ray.io/market-type: spot\n", ""),
            "spec.workerGroupSpecs.0.labels: the label ray.io/market-type is missing",
        ),
        (
            ("ray.io/market-type: spot", "ray.io/market-type: on-demand"),
            "labeled on-demand, but its node_config asks for spot nodes",
        ),
        (
            ("terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 5"),
            "a pod that is told to leave has 5 s; at least 30",
        ),
        (
            ("elastic:0.1.0", "elastic:latest"),
            "'REPLACE/elastic:latest' may be another one tomorrow",
        ),
        (
            (
                'limits: {cpu: "180", memory: 1900Gi, nvidia.com/gpu: "8"',
                'limits: {cpu: "180", nvidia.com/gpu: "4"',
            ),
            "GPU: 4, but a p5",
        ),
    ],
)
def test_a_mistake_in_a_manifest_is_one_line(
    tmp_path: Path, change: tuple[str, str], told: str
) -> None:
    text = (DEPLOY / "kubernetes" / "raycluster.yaml").read_text()
    assert change[0] in text
    file = tmp_path / "cluster.yaml"
    file.write_text(text.replace(*change, 1))
    assert any(told in line for line in api.check_cluster(file).lines()), api.check_cluster(
        file
    ).lines()


def run_starts(words: list[str]) -> list[bool]:
    """Of the first and of each later driver that the command starts: has no person started it?"""
    made = argparse.ArgumentParser()
    run_command.add(made.add_subparsers())
    starts = (command_of(words, again=again)[3:] for again in (False, True))
    return [made.parse_args(start).started_again for start in starts]


def test_both_manifests_describe_the_same_cluster() -> None:
    cluster = yaml.safe_load((DEPLOY / "kubernetes" / "raycluster.yaml").read_text())["spec"]
    job = yaml.safe_load((DEPLOY / "kubernetes" / "rayjob.yaml").read_text())["spec"]
    assert job["rayClusterSpec"] == cluster
    assert job["shutdownAfterJobFinishes"] is True  # nothing is left to be paid
    policy = yaml.safe_load((DEPLOY / "kubernetes" / "network_policy.yaml").read_text())
    assert (policy["kind"], policy["spec"]["policyTypes"]) == ("NetworkPolicy", ["Ingress"])
    text = (DEPLOY / "kubernetes" / "accounts.yaml").read_text()
    for who in ("head", "worker"):  # old checkpoints are the driver's to remove
        assert f"elastic-{who}" in text and f"deploy/iam/aws-{who}.json" in text
    accounts = list(yaml.safe_load_all(text))
    names = {entry["metadata"]["name"] for entry in accounts if entry["kind"] == "ServiceAccount"}
    templates = [
        group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    pods = [template["spec"] for template in templates]
    # not KubeRay's: a RayJob's cluster has another name each time
    own = policy["spec"]["podSelector"]["matchLabels"]
    assert own and all(template["metadata"]["labels"] == own for template in templates)
    assert policy["spec"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": own}}]
    words = job["entrypoint"].split()
    # a program's error is not paid for once more by backoffLimit
    assert {"--supervise", "--run-name"} <= set(words)
    # nor is a stop forgotten on the next cluster
    assert "--started-again" in words and run_starts(words[1:]) == [True, True]
    for pod in pods:
        (container,) = pod["containers"]
        security, mounts = (
            container["securityContext"],
            {mount["mountPath"] for mount in container["volumeMounts"]},
        )
        assert (
            pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            and security["readOnlyRootFilesystem"]
        )
        assert mounts == {"/dev/shm", "/tmp"} and container["workingDir"] == "/tmp"
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        for hook in container.get("lifecycle", {}).values():
            script = Path(hook["exec"]["command"][1])
            assert (ROOT / script.relative_to("/home/elastic")).is_file(), "the image has it"
    assert {pod["serviceAccountName"] for pod in pods} == names
    role = next(entry for entry in accounts if entry["kind"] == "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]


# ---------------------------------------------------------------------------------------- the image


def recipe() -> list[tuple[str, str]]:
    """Instruction and arguments of each line of the Dockerfile."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def copied(to: Path) -> None:
    """What the first stage sees of this repository."""
    for instruction, words in recipe()[
        : [i for i, (word, _) in enumerate(recipe()) if word == "FROM"][1]
    ]:
        if instruction == "COPY":
            *sources, target = words.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(
                        ROOT / source, to / target, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / source, to)


def test_the_image_runs_as_nobody_special_and_copies_what_is_there() -> None:
    lines = recipe()
    assert [words for word, words in lines if word == "USER"] == ["1000"]
    assert len([word for word, _ in lines if word == "FROM"]) == 2
    for word, words in lines:
        if word == "COPY" and "--from" not in words:
            sources = [source for source in words.split()[:-1] if not source.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), words


@pytest.mark.e2e
def test_what_the_image_copies_is_enough_to_install_the_package(tmp_path: Path) -> None:
    """Its last install command, without the packages that this one needs, from the files that it
    sees."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("the setuptools of this environment is older than 77")
    copied(tmp_path)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(tmp_path / "out"),
        ".",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    text = "from elastic import catalog; print(catalog.__file__, len(catalog.instance_types()))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "out")}
    said = subprocess.run(
        [sys.executable, "-c", text],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith(str(tmp_path / "out"))
    assert int(said.split()[1]) > 80  # the tables came along


@pytest.mark.whole
def test_the_images_install_commands_run_in_a_fresh_environment(tmp_path: Path) -> None:
    """Minutes, and hundreds of megabytes from pip's index. Without a GPU the build of torch for
    CPUs will do, where pip sees one: that with CUDA is gigabytes."""
    copied(tmp_path)
    runs = [words for word, words in recipe() if word == "RUN" and "/opt/elastic" in words]
    assert len(runs) == 3
    for words in runs:
        command = words.replace("/opt/elastic", str(tmp_path / "venv")).replace(
            "python3.12", sys.executable
        )
        if shutil.which("nvidia-smi") is None:
            command = command.replace('"torch===', '"torch==')
        subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=1800)
    said = subprocess.run(
        [tmp_path / "venv" / "bin" / "elastic", "--version"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith("elastic ")
    text = (
        "import sys, torch, ray, elastic.cluster.backend.ray_backend; print(sys.prefix, "
        "torch.__version__, elastic.__file__)"
    )
    done = [str(tmp_path / "venv" / "bin" / "python"), "-c", text]
    prefix, torch_version, file = subprocess.run(
        done, cwd="/", capture_output=True, text=True, check=True
    ).stdout.split()
    assert prefix == str(tmp_path / "venv") and file.startswith(prefix), (
        "installed there, not found in this checkout"
    )
    pin = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None and torch_version.partition("+")[0] == pin[1]
