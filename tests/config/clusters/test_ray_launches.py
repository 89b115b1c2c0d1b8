"""Ray's own provider for AWS starts every node type of the cluster files, against moto's EC2: what
is asked is what comes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
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
        if node_type.zone:
            assert zones[instance["SubnetId"]] == node_type.zone
        # moto does not tell those of interfaces
        if "NetworkInterfaces" not in node_type.node_config:
            assert account["sg-0REPLACE000000000"] in [
                group["GroupId"] for group in instance["SecurityGroups"]
            ]
    running = ec2.describe_instances()["Reservations"]
    assert len(running) == len(wanted)
