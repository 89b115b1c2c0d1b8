"""Ray's own provider for AWS starts every node type of the cluster files, against moto's EC2: what
is asked is what comes. Of that for Google Cloud what it asks is seen."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import boto3
import pytest
import yaml
from support.places import ROOT

from elastic.config.clusters import load_cluster

FILES = sorted((ROOT / "cluster_configs").glob("aws*.yaml"))
AMI = "ami-12c6146b"  # one that moto knows
REGION = "us-east-1"

pytestmark = pytest.mark.slow


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An account with what the files name; placeholder -> what is there."""
    moto = pytest.importorskip("moto")
    for name, value in (
        ("HOME", str(tmp_path)),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
    ):
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_EC2"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ssh").mkdir()
    with moto.mock_aws():
        ec2, iam = boto3.client("ec2", REGION), boto3.client("iam", REGION)
        vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
        found = {
            "sg-0REPLACE000000000": ec2.create_security_group(
                GroupName="own", Description="own", VpcId=vpc
            )["GroupId"]
        }
        for subnet in ec2.describe_subnets()["Subnets"]:
            found[f"subnet-0REPLACE00000000{subnet['AvailabilityZone'][-1]}"] = subnet["SubnetId"]
        for who in ("elastic-head", "elastic-worker"):
            iam.create_instance_profile(InstanceProfileName=who)
        yield found


def filled_in(file: Path, account: dict[str, str]) -> dict[str, Any]:
    text = re.sub(r"resolve:ssm:\S+", AMI, file.read_text())
    for placeholder, there in account.items():
        text = text.replace(placeholder, there)
    assert "REPLACE" not in yaml.dump(yaml.safe_load(text))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def attribute(ec2: Any, instance: Any, name: str) -> str:
    told = ec2.describe_instance_attribute(InstanceId=instance["InstanceId"], Attribute=name)
    return str(told[name[0].upper() + name[1:]]["Value"])


@pytest.mark.e2e
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_node_type_is_launched_as_it_is_written(file: Path, account: dict[str, str]) -> None:
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(filled_in(file, account))
    validate_config(config)
    config = AWSNodeProvider.bootstrap_config(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    wanted = {node_type.name: node_type for node_type in load_cluster(file).node_types}
    ec2 = boto3.client("ec2", REGION)
    zones = {
        subnet["SubnetId"]: subnet["AvailabilityZone"]
        for subnet in ec2.describe_subnets()["Subnets"]
    }
    for name, node_type in wanted.items():
        entry = config["available_node_types"][name]
        made = provider.create_node_with_resources_and_labels(
            entry["node_config"],
            {"ray-user-node-type": name},
            1,
            entry["resources"],
            entry.get("labels", {}),
        )
        (instance,) = ec2.describe_instances(InstanceIds=list(made))["Reservations"][0]["Instances"]
        assert instance["InstanceType"] == node_type.instance_type
        assert (instance.get("InstanceLifecycle") == "spot") == (node_type.market_type == "spot")
        assert instance["IamInstanceProfile"]["Arn"].endswith(
            "elastic-head" if node_type.head else "elastic-worker"
        )
        assert {"Key": "ray-cluster-name", "Value": config["cluster_name"]} in instance["Tags"]
        if not node_type.head:
            # whose head dies while it is installed; boto3 encodes it once
            assert (
                attribute(ec2, instance, "userData")
                == base64.b64encode(node_type.node_config["UserData"].encode()).decode()
            )
            assert attribute(ec2, instance, "instanceInitiatedShutdownBehavior") == "terminate"
        if node_type.zone:
            assert zones[instance["SubnetId"]] == node_type.zone
        # moto does not tell those of interfaces
        if "NetworkInterfaces" not in node_type.node_config:
            assert account["sg-0REPLACE000000000"] in [
                group["GroupId"] for group in instance["SecurityGroups"]
            ]
    running = ec2.describe_instances()["Reservations"]
    assert len(running) == len(wanted)


class Anything(ModuleType):
    """A module of Google's, as far as Ray's provider only names what is in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


class Compute:
    """Compute Engine's client: it keeps what is to be inserted."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self._http = type("Http", (), {"credentials": None})()

    def instances(self) -> Compute:
        return self

    def insert(self, **asked: Any) -> Compute:
        self.asked.append(asked)
        return self

    def execute(self, **_: Any) -> dict[str, Any]:
        return {}


@pytest.mark.e2e
def test_google_cloud_is_asked_for_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata and disks as they are; the key for SSH is the project's, not among an instance's
    metadata."""
    names = ["google_auth_httplib2", "googleapiclient", "googleapiclient.discovery"]
    names += ["googleapiclient.errors", "httplib2"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, Anything(name))
    monkeypatch.delitem(sys.modules, "ray.autoscaler._private.gcp.node", raising=False)
    from ray.autoscaler._private.gcp.node import GCPCompute

    monkeypatch.setattr(GCPCompute, "get_new_authorized_http", lambda *_: None)
    compute = Compute()
    spec = load_cluster(ROOT / "cluster_configs" / "gcp_a3_a2_spot.yaml")
    resource = GCPCompute(compute, "project", spec.zones[0], spec.name)
    for worker in spec.workers:
        labels = {"ray-node-name": "ray-own-worker"}
        resource.create_instance(dict(worker.node_config), labels, wait_for_operation=False)
        body = compute.asked[-1]["body"]
        assert body["metadata"] == worker.node_config["metadata"]
        assert "ssh-keys" not in str(body["metadata"])
        (disk,) = body["disks"]
        assert disk["initializeParams"]["diskType"] == (
            f"zones/{compute.asked[-1]['zone']}/diskTypes/pd-balanced"
        )
    monkeypatch.delitem(sys.modules, "ray.autoscaler._private.gcp.node")
    assert len(compute.asked) == len(spec.workers) == 3
