"""`elastic cluster check`: each mistake that it knows is told where it was made, with what would be
right."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.places import ROOT

from elastic import api

CONFIGS = ROOT / "cluster_configs"
CHEAP = (CONFIGS / "aws_g6e_g5_cheap.yaml").read_text()
FAST = (CONFIGS / "aws_p5_p4d_spot.yaml").read_text()
ZONES = (CONFIGS / "aws_multi_zone.yaml").read_text()
GOOGLE = (CONFIGS / "gcp_a3_a2_spot.yaml").read_text()
HOSTS = (CONFIGS / "on_premises.yaml").read_text()
ONE = (CONFIGS / "one_machine.yaml").read_text()


def told(folder: Path, text: str) -> list[str]:
    """What is said of the file, without its name."""
    file = folder / "cluster.yaml"
    file.write_text(text)
    lines = api.check_cluster(file).lines()
    return [
        line.removeprefix(f"{file}:")
        for line in lines
        if "placeholders; put in your own" not in line
    ]


ERRORS = [
    (
        CHEAP,
        ("g6e.48xlarge", "g6e.48xlareg"),
        "InstanceType: unknown instance type 'g6e.48xlareg'; did you mean g6e.48xlarge?",
    ),
    (
        CHEAP,
        ("resources: {GPU: 8}", "resources: {GPU: 4}"),
        "resources.GPU: GPU: 4, but a g6e.48xlarge has 8; GPU: 8",
    ),
    (
        CHEAP,
        ("resources: {GPU: 8}", "resources: {GPU: 8, CPU: 500}"),
        "a g6e.48xlarge has 192 vCPUs; CPU: 192 or less",
    ),
    (
        CHEAP,
        ("ray.io/accelerator-type: L40S", "ray.io/accelerator-type: L4"),
        "accelerator-type: L4, but a g6e.48xlarge has L40S",
    ),
    (
        CHEAP,
        ("      ray.io/market-type: spot\n", ""),
        "labels: the label ray.io/market-type is missing; one of spot, on-demand",
    ),
    (
        CHEAP,
        ("      ray.io/accelerator-type: L40S\n", ""),
        "the label ray.io/accelerator-type is missing; here L40S",
    ),
    (
        CHEAP,
        ("      ray.io/availability-region: us-east-1\n", ""),
        "ray.io/availability-region is missing; here us-east-1",
    ),
    (
        CHEAP,
        ("      ray.io/availability-zone: us-east-1b\n", ""),
        "ray.io/availability-zone is missing; the zone in which",
    ),
    (
        CHEAP,
        ("ray.io/market-type: spot", "ray.io/market-type: on-demand"),
        "labeled on-demand, but its node_config asks for spot",
    ),
    (
        CHEAP,
        ("availability-region: us-east-1", "availability-region: us-east-2"),
        "but the cluster is in us-east-1",
    ),
    (
        CHEAP,
        ("availability-zone: us-east-1b", "availability-zone: -b-"),
        "'-b-' is no value of a label: Ray refuses the node",
    ),
    (
        CHEAP,
        ("ray.io/market-type: spot", "ray.io/market type: spot"),
        "'ray.io/market type' is no label: Ray refuses the node",
    ),
    (
        CHEAP,
        ("on_demand_floor: 1", "on_demand_floor: 3"),
        "a floor of 3 is asked, but g6e-small-on-demand give 2; add a node type",
    ),
    (
        CHEAP,
        ("HttpTokens: required", "HttpTokens: optional"),
        "head.node_config.MetadataOptions: its metadata service answers",
    ),
    (
        CHEAP,
        ("HttpTokens: required", "HttpTokens: require"),
        "HttpTokens: it is 'require'; it must be one of optional, required",
    ),
    (
        CHEAP,
        ("HttpTokens: required", "HttpToken: required"),
        "HttpToken: EC2 knows no such key; did you mean HttpTokens?",
    ),
    (
        CHEAP,
        ("BlockDeviceMappings: [{", "BlockDeviceMapping: [{"),
        "BlockDeviceMapping: EC2 knows no such key; did you mean Block",
    ),
    (
        CHEAP,
        ("VolumeSize: 100", "VolumeSize: 100GB"),
        "BlockDeviceMappings.0.Ebs.VolumeSize: it is '100GB'; it must be a number",
    ),
    (
        CHEAP,
        ("      InstanceInitiatedShutdownBehavior: terminate\n", ""),
        "shuts itself down is only stopped: its disk is paid",
    ),
    (
        CHEAP,
        ("SecurityGroupIds: [sg-0REPLACE000000000]", "SecurityGroupIds: sg-1"),
        "it is 'sg-1'; it must be a list",
    ),
    (
        CHEAP,
        ("SecurityGroupIds:", "SubnetId: subnet-1\n      SecurityGroupIds:"),
        "SubnetId: Ray sets it itself; SubnetIds: [...]",
    ),
    (
        CHEAP,
        ("RAY_AUTH_MODE=token ", ""),
        "head_start_ray_commands: Ray runs the code of whoever reaches its ports",
    ),
    (
        CHEAP,
        ("--autoscaling-config=~/ray_bootstrap_config.yaml\n", "\n"),
        "the head starts no autoscaler",
    ),
    (
        CHEAP,
        ("ray start --address=", "ray begin --address="),
        "worker_start_ray_commands: no command starts Ray",
    ),
    (
        CHEAP,
        (
            "HEAD_IP:6379 --object-store-memory=1000000000",
            "HEAD_IP:6379 --object-store-memory=40000000000",
        ),
        "is more than half",
    ),
    (
        CHEAP,
        ("upscaling_speed: 100", "upscaling_sped: 100"),
        "1: error: Ray refuses it: Additional properties are not allowed",
    ),
    (
        CHEAP,
        ("max_workers: 4", "max_workers: four"),
        "max_workers: Ray refuses it: 'four' is not of type 'integer'",
    ),
    (
        CHEAP,
        ("head_node_type: head", "head_node_type: boss"),
        "`head_node_type` must be one of `available_node_types`",
    ),
    (
        CHEAP,
        ("availability_zone: us-east-1b", "availability_zone: us-east-1a"),
        "us-east-1b is not among the cluster's: Ray drops",
    ),
    (
        FAST,
        ("NetworkCardIndex: 31, DeviceIndex: 0", "NetworkCardIndex: 31, DeviceIdx: 0"),
        "DeviceIdx: EC2 knows no such key",
    ),
    (
        FAST,
        ("InstanceType: p5.48xlarge", "InstanceType: p5.4xlarge"),
        "GPU: 8, but a p5.4xlarge has 1",
    ),
    (
        FAST,
        ("InstanceType: p5.48xlarge", "InstanceType: p5en.48xlarge"),
        "32 EFA interfaces, a p5en.48xlarge has 16",
    ),
    (
        FAST,
        (
            "MarketType: spot, SpotOptions: {SpotInstanceType: one-time}",
            "MarketType: capacity-block",
        ),
        "that is not named",
    ),
    (
        FAST,
        ("MarketType: spot", "MarketType: sport"),
        "MarketType: it is 'sport'; it must be one of spot, ",
    ),
    (
        ZONES,
        ("      NetworkInterfaces: *network_c", "      SecurityGroupIds: [sg-1]"),
        "3 zones and this type no subnet: Ray takes",
    ),
    (
        ZONES,
        ("      NetworkInterfaces: *network_c", "      SubnetIds: [x, y]"),
        "2 subnets, but all nodes are labeled us-east-1c",
    ),
    (
        ZONES,
        ("us-east-1a,us-east-1b,us-east-1c", "us-east-1a,us-east-1b"),
        "its zone us-east-1c is not among the cluster's",
    ),
    (
        ZONES,
        ("subnet-0REPLACE00000000c", "subnet-0REPLACE00000000a"),
        "named for us-east-1a and us-east-1c, but a subnet lies in one",
    ),
    (
        GOOGLE,
        ("project_id: REPLACE", "project_id: null"),
        "provider.project_id: it is missing; the id of the Google Cloud project",
    ),
    (
        GOOGLE,
        ("resources: {GPU: 8}", "resources: {}"),
        "the 8 GPUs of a a3-highgpu-8g are not named, Ray cannot know them; GPU: 8",
    ),
    (
        GOOGLE,
        ("{automaticRestart: false, onHostMaintenance: TERMINATE}", "{}"),
        "a machine with GPUs cannot be moved",
    ),
    (
        GOOGLE,
        ("availability_zone: us-central1-a", "availability_zone: us-central1-b"),
        "but Ray starts all nodes in us-central1-b",
    ),
    (
        GOOGLE,
        ("zones/us-central1-a/diskTypes", "zones/us-central1-f/diskTypes"),
        "diskType: it is of us-central1-f, but Ray starts all nodes in us-central1-a; zones/us-c",
    ),
    (
        CHEAP,
        ("end_without_head", "nothing"),
        "node_config.UserData: its boot schedules a shutdown that nothing calls off: it ends amid",
    ),
    (CHEAP, ("LIMIT_S=1200 bash", 'END="own end" bash'), "which does, or `sudo shutdown -c`"),
    (
        HOSTS,
        ("    --labels=elastic-pool=hosts,ray.io/market-type=owned\n", ""),
        "the nodes get no label elastic-pool; ray start ... ",
    ),
    (
        HOSTS,
        ("  head_ip: REPLACE", "  # head_ip: REPLACE"),
        "Ray refuses it: Please supply a `head_ip` and list of `worker_ips`",
    ),
    (
        ONE,
        ("RAY_AUTH_MODE=token ", ""),
        "head_start_ray_commands: Ray runs the code of whoever reaches its ports",
    ),
]
WARNINGS = [
    (
        CHEAP,
        ("      IamInstanceProfile: {Name: elastic-head}", ""),
        "its default profile: all rights on EC2 and S3; IamInstanceProfile",
    ),
    (
        CHEAP,
        ("{Name: elastic-worker}", "{Name: elastic-head}"),
        "it has the head's profile: it may start instances",
    ),
    (
        CHEAP,
        ("      IamInstanceProfile: {Name: elastic-worker}", ""),
        "it has no profile: no access to checkpoints in S3",
    ),
    (
        CHEAP,
        ("      SecurityGroupIds: [sg-0REPLACE000000000]", ""),
        "opens SSH to the whole internet; SecurityGroupIds",
    ),
    (
        CHEAP,
        ("InstanceType: m7i.xlarge", "InstanceType: g5.xlarge"),
        "the head has GPUs, which are paid also while no one trains",
    ),
    (
        CHEAP,
        ("max_workers: 0", "max_workers: 1"),
        "the head's node type may have 1 worker; say max_workers: 0",
    ),
    (
        CHEAP,
        (" RAY_USAGE_STATS_ENABLED=0", ""),
        "Ray reports usage statistics; RAY_USAGE_STATS_ENABLED=0 ray start",
    ),
    (
        CHEAP,
        ("--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0"),
        "a port is bound to all interfaces (0.0.0.0)",
    ),
    (
        CHEAP,
        ("cache_stopped_nodes: false", "cache_stopped_nodes: true"),
        "released nodes are only stopped: their disks are paid",
    ),
    (
        CHEAP,
        ("end_without_head", "nothing"),
        "workers outlive a head that is gone, and are paid; start end_without_head.sh",
    ),
    (
        CHEAP,
        ('  "~/.ray/auth_token": "~/.ray/auth_token"\n', ""),
        "file_mounts: nothing brings the token to the nodes",
    ),
    (
        CHEAP,
        ("InstanceType: g5.48xlarge", "InstanceType: g5.12xlarge"),
        "the catalog has no price of its nodes: budgets would count",
    ),
    (
        FAST,
        ("      Placement: {GroupName: elastic-p5}\n", ""),
        "Placement: EFA without a placement group",
    ),
    (
        FAST,
        ("InterfaceType: efa-only", "InterfaceType: interface"),
        "a p5.48xlarge has EFA, which is not used; InterfaceType: efa-only",
    ),
    (
        GOOGLE,
        ("diskType: zones/us-central1-a/diskTypes/pd-balanced, ", ""),
        "cannot have; diskType: zones/us-central1-a/diskTypes/pd-balanced",
    ),
    (
        GOOGLE,
        ("      serviceAccounts: [{email: elastic-head@", "      labels: [{email: elastic-head@"),
        "compute.admin and storage",
    ),
]


@pytest.mark.parametrize(
    ("text", "change", "line"), ERRORS, ids=[line[:48] for _, _, line in ERRORS]
)
def test_an_error_is_one_line(
    tmp_path: Path, text: str, change: tuple[str, str], line: str
) -> None:
    assert change[0] in text
    every = change[0] in ("InterfaceType: efa-only", "subnet-0REPLACE00000000c")
    found = told(tmp_path, text.replace(*change) if every else text.replace(*change, 1))
    errors = [entry for entry in found if " error: " in entry]
    assert any(line in entry for entry in errors), found
    assert errors == found[: len(errors)]  # first the errors
    assert len(errors) <= 4, errors  # the mistake, at most once for each node type


@pytest.mark.parametrize(
    ("text", "change", "line"), WARNINGS, ids=[line[:48] for _, _, line in WARNINGS]
)
def test_a_warning_is_one_line(
    tmp_path: Path, text: str, change: tuple[str, str], line: str
) -> None:
    assert change[0] in text
    many = change[0] == "InterfaceType: efa-only"
    found = told(tmp_path, text.replace(*change) if many else text.replace(*change, 1))
    assert any(line in entry and " warning: " in entry for entry in found), found


def test_a_shutdown_at_boot_that_is_called_off_in_another_way(tmp_path: Path) -> None:
    text = CHEAP.replace("LIMIT_S=1200 bash", "sudo shutdown -c; END='own end' bash")
    assert not [line for line in told(tmp_path, text) if "shutdown" in line]


def test_a_floor_without_any_pool_to_keep(tmp_path: Path) -> None:
    text = CHEAP.replace("ray.io/market-type: on-demand", "ray.io/market-type: spot")
    assert any(
        "a floor of 1 is asked, but there is no on-demand pool; add" in line
        for line in told(tmp_path, text)
    )


def test_a_spot_head(tmp_path: Path) -> None:
    text = CHEAP.replace(
        "InstanceType: m7i.xlarge",
        "InstanceType: m7i.xlarge\n      InstanceMarketOptions: {MarketType: spot}",
    )
    assert any(
        "the head is a spot node: its reclaim ends the whole cluster; make it on-demand" in x
        for x in told(tmp_path, text)
    )


def test_a_head_without_an_image(tmp_path: Path) -> None:
    lines = [line for line in CHEAP.splitlines() if "canonical/ubuntu" not in line]
    assert any(
        "head.node_config: no ImageId: Ray's default" in line
        for line in told(tmp_path, "\n".join(lines))
    )


def test_a_reservation_whose_end_nobody_says(tmp_path: Path) -> None:
    text = FAST.replace("ray.io/market-type: spot", "ray.io/market-type: reserved", 1)
    text = text.replace(
        "MarketType: spot, SpotOptions: {SpotInstanceType: one-time}",
        "MarketType: capacity-block",
        1,
    )
    found = told(tmp_path, text)
    assert any(
        (
            "p5-spot: the end of the reservation is not known; say "
            "metadata.elastic.pools.p5-spot.ends_at"
        )
        in x
        for x in found
    )
    ended = text.replace(
        "on_demand_floor: 1", 'pools: {p5-spot: {ends_at: "2027-01-01T11:30:00Z"}}', 1
    )
    assert not any("the end of the reservation" in x for x in told(tmp_path, ended))


def test_a_job_that_cannot_run_there(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CHEAP)
    folder = tmp_path / "job"
    folder.mkdir()

    def found(keys: str, limit: str = "max_nodes: 9") -> list[str]:
        (folder / "job.yaml").write_text(f"steps: 1\nglobal_batch: 4096\n{limit}\n{keys}")
        return [line for line in api.check_cluster(file, folder).lines() if " error: " in line]

    assert found("layout: 'dp_shard=32'\non_demand_floor: 2") == []
    (small,) = found("layout: 'dp_shard=512'")
    assert "layout 'dp_shard=512' needs 512 workers; the pools give at most 74" in small
    (unlimited,) = found("", limit="")
    assert (
        "cluster.yaml:" in unlimited
        and "job.yaml: keys 'budget_usd' and 'max_nodes' are missing" in unlimited
    )
    (floor,) = found("on_demand_floor: 3")
    assert (
        "job.yaml asks for on_demand_floor: 3, the pools that are no spot give 2 nodes; add a "
        "node type" in floor
    )
    spot = CHEAP.replace("ray.io/market-type: on-demand", "ray.io/market-type: spot")
    file.write_text(spot)
    assert any(
        "asks for on_demand_floor: copy, the pools that are no spot give 0" in line
        for line in found("on_demand_floor: copy")
    )


def test_a_token_that_nobody_has_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (line,) = told(tmp_path, CHEAP)
    assert line.partition(" warning: ")[2] == (
        "file_mounts.~/.ray/auth_token: ~/.ray/auth_token is not there: `ray up` fails; `ray "
        "get-auth-token --generate` makes it, once"
    )
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert told(tmp_path, CHEAP) == []


def test_what_is_to_be_copied_to_the_nodes_and_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount's folder, then what a command on the nodes wants of it; and from another folder."""
    mounts = "\nfile_mounts: {~/w: ./w}\nsetup_commands: [pip install -c ~/w/c.txt ~/w/e-*.whl]\n"
    text = ONE[: ONE.index("\nfile_mounts:")] + mounts
    monkeypatch.chdir(tmp_path)

    def found() -> list[str]:
        (tmp_path / "cluster.yaml").write_text(text)
        lines = api.check_cluster("../" * below + "cluster.yaml").lines()
        return [line.partition(" warning: ")[2] for line in lines if "/w" in line]

    below = 0
    (folder,) = found()
    assert folder.startswith(f"file_mounts.~/w: ./w is not there, seen from {tmp_path}: `ray up`")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "e-1.whl").touch()
    (file,) = found()
    assert file.startswith("setup_commands: ~/w/c.txt is not in ./w: the command fails on each")
    (tmp_path / "w" / "c.txt").touch()
    assert found() == []
    (tmp_path / "below").mkdir()
    monkeypatch.chdir("below")
    below = 1
    (elsewhere,) = found()
    assert elsewhere.endswith(f"from where this was started; start `ray up` in {tmp_path}")


@pytest.mark.parametrize("value", ["3", "subnet-1", "{a: 1}", "true"])
def test_what_should_be_a_list_and_is_none_breaks_no_rule(tmp_path: Path, value: str) -> None:
    data = yaml.safe_load(FAST)
    for entry in data["available_node_types"].values():
        entry["node_config"] |= dict.fromkeys(
            ("SubnetIds", "NetworkInterfaces"), yaml.safe_load(value)
        )
    assert told(tmp_path, yaml.safe_dump(data))
    manifest = (ROOT / "deploy" / "kubernetes" / "raycluster.yaml").read_text()
    documents = list(yaml.safe_load_all(manifest))
    for document in documents:
        for group in (document.get("spec") or {}).get("workerGroupSpecs", ()):
            group["template"]["spec"]["containers"] = yaml.safe_load(value)
    assert told(tmp_path, yaml.safe_dump_all(documents))
