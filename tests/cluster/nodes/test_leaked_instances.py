"""elastic cluster reap, against moto's EC2 on loopback (real boto3)."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster.aws_endpoint import AwsEndpoint
from support.places import ROOT

from elastic import api
from elastic.cli.command_line import main
from elastic.cluster.nodes import leaked_instances
from elastic.errors import CloudFailed, SpecError

YAML = """
cluster_name: NAME
provider: {type: aws, region: us-east-1}
auth: {ssh_user: ubuntu}
head_node_type: head
available_node_types:
  head: {node_config: {InstanceType: m5.large}}
  spot: {max_workers: 4, node_config: {InstanceType: p4d.24xlarge, InstanceMarketOptions: {MarketType: spot}}}
"""


@pytest.fixture(scope="module")
def ec2() -> Iterator[Any]:
    """A client of a server that this process, too, asks instead of Amazon."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-tests")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        import boto3

        client = boto3.session.Session().client("ec2", region_name="us-east-1")
        yield client
        client.close()
    server.stop()


def file_of(tmp_path: Path, name: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML.replace("NAME", name))
    return str(path)


def launch(ec2: Any, cluster: str, kind: str, n: int = 1) -> list[str]:
    tags = [{"Key": "ray-cluster-name", "Value": cluster}, {"Key": "ray-node-type", "Value": kind}]
    market = {"InstanceMarketOptions": {"MarketType": "spot"}} if kind == "worker" else {}
    answer = ec2.run_instances(
        ImageId="ami-12c6146b", InstanceType="m5.large" if kind == "head" else "p4d.24xlarge",
        MinCount=n, MaxCount=n, **market, TagSpecifications=[{"ResourceType": "instance",
        "Tags": [*tags, {"Key": "ray-user-node-type", "Value": kind}]}],
    )  # fmt: skip
    return sorted(entry["InstanceId"] for entry in answer["Instances"])


def running(ec2: Any, ids: list[str]) -> list[str]:
    found = ec2.describe_instances(InstanceIds=ids)["Reservations"]
    return sorted(
        i["InstanceId"]
        for group in found
        for i in group["Instances"]
        if i["State"]["Name"] == "running"
    )


@pytest.mark.slow
def test_workers_without_a_head_are_listed_and_ended(
    ec2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, mine, others = (
        file_of(tmp_path, "dead"),
        launch(ec2, "dead", "worker", 2),
        launch(ec2, "other", "worker"),
    )
    assert main(["cluster", "reap", file]) == 0
    shown = capsys.readouterr().out
    assert (
        all(name in shown for name in mine)
        and others[0] not in shown
        and "--yes ends them" in shown
        and "spot" in shown
    )
    assert running(ec2, mine) == mine
    assert main(["cluster", "reap", file, "--yes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(entry["instance_id"] for entry in told["instances"]) == mine
    assert told["ended"] and not told["left"] and told["usd_per_h"] > 0
    assert not running(ec2, mine) and running(ec2, others) == others
    assert main(["cluster", "reap", file, "--yes"]) == 0
    assert "no instance is left" in capsys.readouterr().out


def test_a_cluster_whose_head_runs_is_not_dead(
    ec2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, head, workers = (
        file_of(tmp_path, "living"),
        launch(ec2, "living", "head"),
        launch(ec2, "living", "worker"),
    )
    assert main(["cluster", "reap", file, "--yes"]) == 2
    assert f"its head {head[0]} runs" in capsys.readouterr().err
    assert running(ec2, workers) == workers
    assert main(["cluster", "reap", file, "--yes", "--alive"]) == 0
    assert not running(ec2, [*head, *workers])


def test_what_does_not_end_is_told(
    ec2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, ids = file_of(tmp_path, "stubborn"), launch(ec2, "stubborn", "worker")
    monkeypatch.setattr(leaked_instances, "ENDED", ("gone",))
    assert main(["cluster", "reap", file, "--yes"]) == 1
    assert f"{ids[0]} of 1 instance could not be ended" in capsys.readouterr().out


@pytest.mark.slow
def test_faults_are_said_in_one_line(
    ec2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.config import Config
    from botocore.exceptions import ClientError

    file = file_of(tmp_path, "faulty")
    said = {
        "RequestExpired": "have expired",
        "AuthFailure": "does not know these credentials",
        "UnauthorizedOperation": "may not call ec2:DescribeInstances",
    }
    for code, words in said.items():
        error = ClientError({"Error": {"Code": code, "Message": "no"}}, "DescribeInstances")
        assert words in str(leaked_instances._explained(error, "us-east-1"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(
            leaked_instances,
            "PATIENCE",
            Config(connect_timeout=1, read_timeout=1, retries={"total_max_attempts": 1}),
        )
        with pytest.raises(CloudFailed, match="does not answer"):
            api.reap(file)
        closed.listen()  # and never answers
        with pytest.raises(CloudFailed, match="does not answer"):
            api.reap(file)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(SpecError, match="there are no credentials"):
        api.reap(file)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AwsEndpoint]:
    """An EC2 of which only its faults are known; retries come at once."""
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    with AwsEndpoint() as started:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_EC2"):
            monkeypatch.setenv(name, started.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-tests")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        yield started


@pytest.mark.parametrize(
    ("code", "said", "exit_code"),
    [
        ("RequestLimitExceeded", "asks to slow down (RequestLimitExceeded), also after 4 tries", 1),
        ("InternalError", "DescribeInstances: InternalError", 1),
        ("ExpiredToken", "the credentials have expired; renew them", 2),
        ("InvalidAccessKeyId", "does not know these credentials", 2),
        ("OptInRequired", "may not call ec2:DescribeInstances", 2),
    ],
)
def test_what_ec2_refuses_is_one_line(
    faulty: AwsEndpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: str,
    said: str,
    exit_code: int,
) -> None:
    faulty.fault = code
    assert main(["cluster", "reap", file_of(tmp_path, "refused")]) == exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "secret" not in line
    assert faulty.asked == ["DescribeInstances"] * (
        leaked_instances.ATTEMPTS if exit_code == 1 else 1
    ), "what a person must mend does not pass"


@pytest.mark.slow
def test_an_endpoint_that_hangs_is_left_in_bounded_time(
    faulty: AwsEndpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from botocore.config import Config

    real = leaked_instances.PATIENCE
    assert leaked_instances.ATTEMPTS * max(real.connect_timeout, real.read_timeout) <= 100, (
        "seconds, as it stands"
    )
    quick = Config(
        connect_timeout=0.3,
        read_timeout=0.3,
        retries={"mode": "standard", "total_max_attempts": leaked_instances.ATTEMPTS},
    )
    monkeypatch.setattr(leaked_instances, "PATIENCE", quick)
    faulty.hang.set()
    assert main(["cluster", "reap", file_of(tmp_path, "hung"), "--yes"]) == 1
    assert "EC2 in us-east-1 does not answer" in capsys.readouterr().err
    assert faulty.asked == ["DescribeInstances"] * leaked_instances.ATTEMPTS


def test_credentials_that_cannot_be_fetched(
    faulty: AwsEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text("[profile broken]\ncredential_process = false\n")
    monkeypatch.setenv("AWS_PROFILE", "broken")
    with pytest.raises(SpecError, match="EC2 in .*: there are no credentials; set "):
        api.reap(file_of(tmp_path, "unknown"))
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(SpecError, match="EC2 in .*: there are no credentials; set "):
        api.reap(file_of(tmp_path, "unknown"))
    assert faulty.asked == []


def test_of_other_clouds_it_says_in_one_line_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        YAML.replace("type: aws", "type: gcp, project_id: p, availability_zone: us-east1-b")
    )
    with pytest.raises(SpecError) as refused:
        api.reap(path)
    assert str(refused.value) == (
        f"{path}: reap itself knows EC2 only; `gcloud compute instances list --project=p "
        "--filter=labels.ray-cluster-name=NAME` lists this cluster's machines, stopped ones "
        "(whose disks are paid for) too, and `gcloud compute instances delete NAMES --zone=ZONE "
        "--project=p` ends them"
    )
    path.write_text(
        YAML.replace("type: aws", "type: azure, location: westus2, resource_group: 'my group'")
    )
    with pytest.raises(SpecError) as refused:
        api.reap(path)
    listed = "`az resource list --resource-group 'my group' --output table` lists what is in it"
    assert listed in str(refused.value) and "--tag" not in str(refused.value)
    assert "are called ray-NAME-..., and `az resource delete --ids IDS`" in str(refused.value)
    path.write_text(YAML.replace("type: aws", "type: azure, resource_group: NAME"))
    with pytest.raises(SpecError, match="; `az group delete --name NAME` ends it all"):
        api.reap(path)
    path.write_text(YAML.replace("type: aws", "type: other"))
    with pytest.raises(SpecError, match="of a provider 'other' nothing is known"):
        api.reap(path)
    for manifest, said in (
        ("raycluster", "pods -n default -l ray.io/cluster=elastic`"),
        ("rayjob", "rayclusters -n default -l ray.io/originated-from-cr-name=elastic`"),
    ):
        with pytest.raises(SpecError) as refused:
            api.reap(ROOT / "deploy" / "kubernetes" / f"{manifest}.yaml")
        assert f"`kubectl get {said}" in str(refused.value)
        assert f"`kubectl delete {manifest} elastic -n default` ends it" in str(refused.value)
        assert "\n" not in str(refused.value)
