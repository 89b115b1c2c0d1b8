"""Every cluster file of this repository: what Ray asks of it, what we ask, and what it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from elastic import api
from elastic.cli import command_line
from elastic.config.clusters import load_cluster

FILES = sorted((ROOT / "cluster_configs").glob("*.yaml"))
CLOUD = [file for file in FILES if file.name.startswith(("aws", "gcp"))]
name = Path.as_posix


def commands(data: Any, key: str) -> str:
    return " ".join(data[key])


def test_there_is_a_file_for_each_kind_of_place() -> None:
    assert {load_cluster(file).provider for file in FILES} == {"aws", "gcp", "local", "external"}
    assert len(CLOUD) >= 4


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_wrong_but_what_only_the_user_knows(file: Path) -> None:
    found = api.check_cluster(file)
    assert [line for line in found.lines() if "placeholders; put in your own" not in line] == []
    assert found.ok
    assert found.spec.pools


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_a_file_says_of_itself_is_its_name(file: Path) -> None:
    """So that the commands in it can be copied."""
    for line in file.read_text().splitlines():
        if line.startswith("#") and "ray up cluster_configs/" in line:
            assert f"cluster_configs/{file.name}" in line


@pytest.mark.parametrize("file", CLOUD, ids=lambda file: file.name)
def test_files_for_clouds_leave_nothing_open_and_nothing_behind(file: Path) -> None:
    spec = load_cluster(file)
    assert spec.head is not None
    assert (spec.head.market_type, spec.head.resources, spec.head.max_nodes) == (
        "on-demand",
        {"CPU": 0},
        0,
    )
    assert spec.on_demand_floor >= 1
    assert any(pool.market_type == "on-demand" for pool in spec.pools)
    assert any(pool.market_type == "spot" for pool in spec.pools)
    assert all(
        pool.usd_per_node_h > 0 and pool.zone and pool.accelerator_type for pool in spec.pools
    )
    assert spec.data["provider"]["cache_stopped_nodes"] is False
    assert "~/.ray/auth_token" in spec.data["file_mounts"]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        # else `ray job stop` kills the driver after 3 s
        saves = " RAY_JOB_STOP_WAIT_TIME_S=120" * key.startswith("head")
        assert f"RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0{saves} ray start" in commands(
            spec.data, key
        )
        assert "0.0.0.0" not in commands(spec.data, key)
    assert "LIMIT_S=1200 bash ~/elastic/deploy/end_without_head.sh" in commands(
        spec.data, "worker_start_ray_commands"
    )
    head = commands(spec.data, "head_start_ray_commands")
    health = json.loads(head.split("--system-config='")[1].split("'")[0])
    assert health["health_check_period_ms"] == health["health_check_timeout_ms"] == 1000


@pytest.mark.parametrize("file", CLOUD, ids=lambda file: file.name)
def test_a_machine_that_never_joins_shuts_itself_down(file: Path) -> None:
    """Its head has died while it was installed: the watch has not begun. end_without_head.sh calls
    the shutdown off: tests/deploy/test_end_without_head.py."""
    spec = load_cluster(file)
    script = "#!/bin/sh\nshutdown -h +60\n"
    for worker in spec.workers:
        if spec.provider == "aws":
            assert worker.node_config["UserData"] == script
            assert worker.node_config["InstanceInitiatedShutdownBehavior"] == "terminate"
        else:
            assert worker.node_config["metadata"]["items"] == [
                {"key": "startup-script", "value": script}
            ]
    assert spec.head is not None and "shutdown" not in json.dumps(spec.head.node_config)


def test_what_is_mounted_is_there_and_installs_the_package() -> None:
    for file in FILES:
        mounts = load_cluster(file).data["file_mounts"]
        for remote, local in mounts.items():
            assert "auth_token" in local or (ROOT / local).exists(), f"{file.name}: {remote}"
        if mounts:
            setup = commands(load_cluster(file).data, "setup_commands")
            assert "make venv VENV=$HOME/venv EXTRAS=" in setup


def test_network_cards_of_the_fast_types_are_all_there() -> None:
    spec = load_cluster(ROOT / "cluster_configs" / "aws_p5_p4d_spot.yaml")
    cards = {worker.name: worker.node_config["NetworkInterfaces"] for worker in spec.workers}
    for kind, n_efa in (("p5-spot", 32), ("p4d-spot", 4), ("p4d-on-demand", 4)):
        efa = [card for card in cards[kind] if card["InterfaceType"] == "efa-only"]
        assert (
            len({(card["NetworkCardIndex"], card["DeviceIndex"]) for card in cards[kind]})
            == n_efa + 1
        )
        assert sorted(card["NetworkCardIndex"] for card in efa) == list(range(n_efa))


def test_the_command_prints_pools_and_problems(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "cluster_configs" / "aws_g6e_g5_cheap.yaml")
    assert command_line.main(["cluster", "check", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{file}: 0 errors, 1 warning"
    row = next(line.split() for line in lines if line.startswith("g5-spot"))
    assert row[:8] == ["g5-spot", "g5.48xlarge", "spot", "0-4", "8", "A10G", "5.87", "0.733"]
    assert command_line.main(["cluster", "check", file, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["provider"], data["head"]["usd_per_h"]) == (True, "aws", 0.2016)
    assert [pool["name"] for pool in data["pools"]] == [
        "g6e-spot",
        "g6e-small-spot",
        "g5-spot",
        "g6e-small-on-demand",
    ]
    assert [problem["severity"] for problem in data["problems"]] == ["warning"]


def test_a_price_that_nobody_knows_is_no_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "deploy" / "kubernetes" / "raycluster.yaml").read_text()
    file = tmp_path / "manifest.yaml"
    file.write_text(text.replace("p5.48xlarge", "own-machine", 1))
    assert command_line.main(["cluster", "check", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    spot, steady = (line.split() for line in lines if line.startswith("p5-"))
    assert spot[6:8] == ["-", "-"] and spot[-2:] == ["not", "known"] and steady[6] == "55.04"
    assert command_line.main(["cluster", "check", str(file), "--json"]) == 0
    pools = json.loads(capsys.readouterr().out)["pools"]
    assert [pool["usd_per_node_h"] for pool in pools] == [None, 55.04]
    assert [pool["usd_per_gpu_h"] for pool in pools] == [None, 6.88]


def test_errors_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "cluster_configs" / "aws_g6e_g5_cheap.yaml").read_text()
    file = tmp_path / "wrong.yaml"
    file.write_text(text.replace("HttpTokens: required", "HttpTokens: optional", 1))
    assert command_line.main(["cluster", "check", str(file)]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        f"{file}:{1 + text[: text.index('HttpTokens')].count(chr(10))}: error: "
        "available_node_types.head."
    )
    assert command_line.main(["cluster", "check", str(tmp_path / "none.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_laptops_file_and_its_script_name_the_same_port() -> None:
    assert "port=${PORT:-6399}" in (ROOT / "deploy" / "laptop_cluster.sh").read_text()
    assert (
        load_cluster(ROOT / "cluster_configs" / "laptop.yaml").data["provider"]["gcs_address"]
        == "127.0.0.1:6399"
    )


def test_two_files_for_one_cluster_name_are_warned_of(tmp_path: Path) -> None:
    text = (ROOT / "cluster_configs" / "gcp_a3_a2_spot.yaml").read_text()
    name = load_cluster(ROOT / "cluster_configs" / "gcp_a3_a2_spot.yaml").name
    for file in ("mine.yaml", "old.yaml"):
        (tmp_path / file).write_text(text)
    (tmp_path / "other.yaml").write_text(
        text.replace(f"cluster_name: {name}", f"cluster_name: {name}-2")
    )
    told = [
        line
        for line in api.check_cluster(tmp_path / "mine.yaml").lines()
        if "the same name" in line
    ]
    assert len(told) == 1 and "old.yaml beside this file has the same name" in told[0]
    assert not [
        line
        for line in api.check_cluster(tmp_path / "other.yaml").lines()
        if "the same name" in line
    ]


@pytest.mark.parametrize(
    "keys", ["script: train.py\n", "script: train.py\nepochs: 3\n", "name: restarted\n"]
)
def test_a_script_says_steps_and_batch_itself(tmp_path: Path, keys: str) -> None:
    (tmp_path / "cluster.yaml").write_text(
        (ROOT / "cluster_configs" / "aws_g6e_g5_cheap.yaml").read_text()
    )
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text("")
    (folder / "job.yaml").write_text(f"{keys}layout: 'dp_shard=512'\nmax_nodes: 9\n")
    found = [
        x for x in api.check_cluster(tmp_path / "cluster.yaml", folder).lines() if "error" in x
    ]
    assert len(found) == 1 and "layout 'dp_shard=512' needs 512 workers" in found[0]


def test_own_hosts_are_not_switched_off(tmp_path: Path) -> None:
    end = 'END="$HOME/venv/bin/ray stop --force" '
    hosts = (ROOT / "cluster_configs" / "on_premises.yaml").read_text()
    file = tmp_path / "cluster.yaml"
    file.write_text(hosts.replace(end, "LIMIT_S=1200 "))
    (line,) = (x for x in api.check_cluster(file).lines() if "hosts of your own switch" in x)
    assert "error: worker_start_ray_commands: hosts of your own switch themselves off" in line
    assert end.strip() + " in front of end_without_head.sh" in line
    assert end in hosts
    file.write_text(hosts)
    assert not any("hosts of your own switch" in x for x in api.check_cluster(file).lines())


@pytest.mark.parametrize("name", ["on_premises", "one_machine"])
def test_other_users_of_own_hosts_are_kept_out_of_rays_folder(tmp_path: Path, name: str) -> None:
    text = (ROOT / "cluster_configs" / f"{name}.yaml").read_text()
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert not any("opens its folder" in x for x in api.check_cluster(file).lines())
    file.write_text(text.replace("--temp-dir=$RAY_TMPDIR/ray", ""))
    found = [x for x in api.check_cluster(file).lines() if "opens its folder, /tmp/ray" in x]
    assert len(found) == text.count("ray start -") > 0
    assert all("warning: " in x and "_start_ray_commands: " in x for x in found)
