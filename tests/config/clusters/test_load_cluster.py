"""Cluster files -> pools: what is read where, and what is said where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.places import ROOT

from elastic.api.running.local_pools import adapted
from elastic.api.running.options import Options
from elastic.catalog import PRICES_AT
from elastic.config.clusters import load_cluster, read_cluster
from elastic.config.clusters.load_cluster import lines_of
from elastic.config.job import JobSpec, job_of
from elastic.errors import SpecError

AWS = """
cluster_name: train
max_workers: 6
provider: {type: aws, region: us-east-1, availability_zone: "us-east-1a"}
head_node_type: head
metadata:
  elastic:
    on_demand_floor: 1
    pools:
      block: {usd_per_node_h: 31.5, ends_at: "2026-12-01T11:30:00Z"}
available_node_types:
  head: {resources: {CPU: 0}, node_config: {InstanceType: m7i.xlarge}}
  spot:
    labels: {ray.io/market-type: spot, ray.io/accelerator-type: H100}
    resources: {GPU: 8}
    max_workers: 9
    node_config: {InstanceType: p5.48xlarge, InstanceMarketOptions: {MarketType: spot}}
  steady:
    min_workers: 1
    max_workers: 2
    labels: {ray.io/availability-zone: us-east-1b, ray.io/availability-region: us-east-1}
    resources: {}
    node_config: {InstanceType: p4d.24xlarge}
  block:
    max_workers: 1
    resources: {GPU: 8}
    node_config: {InstanceType: p5en.48xlarge, InstanceMarketOptions: {MarketType: capacity-block}}
  unused: {resources: {}, max_workers: 0, node_config: {InstanceType: g5.48xlarge}}
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_node_types_are_pools(tmp_path: Path) -> None:
    spec = load_cluster(written(tmp_path, AWS))
    assert (spec.name, spec.provider, spec.region, spec.zones) == (
        "train",
        "aws",
        "us-east-1",
        ("us-east-1a",),
    )
    assert spec.head is not None
    assert (spec.head.instance_type, spec.head.max_nodes, spec.on_demand_floor) == (
        "m7i.xlarge",
        0,
        1,
    )
    spot, steady, block = spec.pools
    assert (spot.name, spot.instance_type, spot.cloud, spot.accelerator_type) == (
        "spot",
        "p5.48xlarge",
        "aws",
        "H100",
    )
    assert (spot.market_type, spot.gpus_per_node, spot.notice_s, spot.usd_per_node_h) == (
        "spot",
        8,
        120.0,
        23.45,
    )
    assert (spot.region, spot.zone, spot.min_nodes, spot.max_nodes) == (
        "us-east-1",
        "us-east-1a",
        0,
        6,
    )
    assert (spot.memory_bytes_per_gpu, spot.host_memory_bytes) == (80 * 2**30, 2**41)
    assert (steady.market_type, steady.gpus_per_node, steady.accelerator_type) == (
        "on-demand",
        8,
        "A100",
    )
    assert (steady.usd_per_node_h, steady.zone, steady.min_nodes, steady.max_nodes) == (
        21.957642,
        "us-east-1b",
        1,
        2,
    )
    assert (block.market_type, block.usd_per_node_h, block.ends_at_s) == (
        "reserved",
        31.5,
        1796124600.0,
    )
    assert spec.prices_of == dict.fromkeys(("spot", "steady"), f"table of {PRICES_AT}") | {
        "block": "this file"
    }


def test_a_price_of_another_region_says_so(tmp_path: Path) -> None:
    spec = load_cluster(written(tmp_path, AWS.replace("us-east-1", "eu-west-1")))
    assert spec.pools[0].usd_per_node_h == 23.45
    assert spec.prices_of["spot"] == f"table of {PRICES_AT} of us-east-1"


GCP = """
cluster_name: g
max_workers: 4
provider: {type: gcp, region: us-central1, availability_zone: us-central1-a, project_id: p}
head_node_type: head
available_node_types:
  head: {resources: {}, node_config: {machineType: n2-standard-4}}
  listed: {resources: {}, node_config: {machineType: a3-highgpu-8g, scheduling: [{preemptible: true}]}}
  named: {resources: {}, node_config: {machineType: a2-highgpu-1g, scheduling: {provisioningModel: SPOT}}}
  steady: {resources: {}, node_config: {machineType: a2-highgpu-1g}}
"""


def test_google_cloud_spot_in_both_spellings(tmp_path: Path) -> None:
    listed, named, steady = load_cluster(written(tmp_path, GCP)).pools
    assert (listed.market_type, listed.gpus_per_node, listed.notice_s, listed.usd_per_node_h) == (
        "spot",
        8,
        30.0,
        35.593,
    )
    assert (named.market_type, named.zone, named.accelerator_type) == (
        "spot",
        "us-central1-a",
        "A100",
    )
    assert (steady.market_type, steady.usd_per_node_h) == ("on-demand", 3.67339)
    sources = load_cluster(written(tmp_path, GCP)).prices_of
    assert set(sources.values()) == {"table of 2024-11-07"}  # of these prices, not of the newest


def test_hosts_of_ones_own(tmp_path: Path) -> None:
    text = """
cluster_name: own
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
metadata: {elastic: {pools: {hosts: {gpus_per_node: 8, accelerator_type: H100, usd_per_node_h: 4.0}}}}
"""
    (pool,) = load_cluster(written(tmp_path, text)).pools
    assert (pool.name, pool.market_type, pool.gpus_per_node, pool.max_nodes) == (
        "hosts",
        "owned",
        8,
        2,
    )
    assert (pool.accelerator_type, pool.usd_per_node_h, pool.cloud) == ("H100", 4.0, "")
    alone = load_cluster(written(tmp_path, text.replace("[10.0.0.2, 10.0.0.3]", "[]")))
    assert [found.max_nodes for found in alone.pools] == [1]


def test_nodes_without_gpus_are_pools_of_processes(tmp_path: Path) -> None:
    text = """
cluster_name: fake
max_workers: 3
provider: {type: external, module: x.Y}
head_node_type: head
available_node_types:
  head: {resources: {CPU: 1}, node_config: {}}
  spot: {labels: {ray.io/market-type: spot}, resources: {CPU: 2}, node_config: {}}
"""
    (pool,) = load_cluster(written(tmp_path, text)).pools
    assert (pool.accelerator_type, pool.gpus_per_node, pool.market_type, pool.max_nodes) == (
        "CPU",
        2,
        "spot",
        3,
    )


KUBERNETES = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: x}
---
apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: kube}
spec:
  headGroupSpec: {}
  workerGroupSpecs:
    - groupName: spot
      maxReplicas: 4
      labels: {ray.io/market-type: spot, ray.io/accelerator-type: H100}
      template:
        metadata: {annotations: {elastic/usd-per-node-h: "17.5"}}
        spec:
          nodeSelector: {node.kubernetes.io/instance-type: p5.48xlarge, karpenter.sh/capacity-type: spot}
          containers: [{name: w, resources: {limits: {cpu: "100", nvidia.com/gpu: "8"}}}]
    - groupName: cpu
      minReplicas: 1
      maxReplicas: 2
      template: {spec: {containers: [{name: w, resources: {limits: {cpu: 3500m}}}]}}
"""


def test_worker_groups_of_kuberay_are_pools(tmp_path: Path) -> None:
    spec = load_cluster(written(tmp_path, KUBERNETES))
    spot, cpu = spec.pools
    assert (spec.provider, spec.name, spot.name, spot.market_type) == (
        "kubernetes",
        "kube",
        "spot",
        "spot",
    )
    assert (spot.gpus_per_node, spot.usd_per_node_h, spot.max_nodes, spot.cloud) == (
        8,
        17.5,
        4,
        "kubernetes",
    )
    assert (spot.instance_type, spot.memory_bytes_per_gpu) == ("p5.48xlarge", 80 * 2**30)
    assert (cpu.market_type, cpu.accelerator_type, cpu.gpus_per_node, cpu.min_nodes) == (
        "on-demand",
        "CPU",
        3,
        1,
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            ("p5.48xlarge", "p5.48xlareg"),
            ":17: error: available_node_types.spot.node_config.InstanceType: unknown instance type",
        ),
        (
            ("market-type: spot,", "market-type: sport,"),
            "no market type 'sport'; it is one of spot, on-demand",
        ),
        (
            ("      block: {", "      blok: {"),
            ":10: error: metadata.elastic.pools.blok: there is no such pool; pools are spot, "
            "steady",
        ),
        (
            ('"2026-12-01T11:30:00Z"', "2026-12-01T11:30:00Z"),
            "ends_at: wrong kind of value; must be quoted",
        ),
        (('"2026-12-01T11:30:00Z"', "tomorrow"), "must be a time with its zone"),
        (
            ("usd_per_node_h: 31.5", "usd: 31.5"),
            "metadata.elastic.pools.block.usd: unknown key; keys are market_type",
        ),
        (
            ("on_demand_floor: 1", "on_demand_floor: -1"),
            "it is -1; input should be greater than or equal to 0",
        ),
        (
            ("available_node_types:", "available_node_typs:"),
            "block: there is no such pool; pools are none",
        ),
        (
            ("node_config: {InstanceType: p4d.24xlarge}", "node_config: p4d.24xlarge"),
            "it is 'p4d.24xlarge'; it must hold keys",
        ),
        (("provider:", "provder:"), "no cluster file: it has no key 'provider'"),
        (("max_workers: 6", "max_workers: [6"), "not YAML"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    assert change[0] in AWS
    file = written(tmp_path, AWS.replace(*change))
    with pytest.raises(SpecError) as caught:
        load_cluster(file)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_cluster(tmp_path / "none.yaml")


def test_what_cannot_be_known_is_a_problem_and_the_rest_is_read(tmp_path: Path) -> None:
    text = AWS.replace("InstanceType: p4d.24xlarge", "InstanceType: p9.24xlarge")
    spec, problems = read_cluster(written(tmp_path, text))
    assert [pool.name for pool in spec.pools] == ["spot", "block"]
    assert [problem.place[1] for problem in problems] == ["steady"]


def test_lines_are_those_of_the_keys() -> None:
    found = lines_of("a: 1\nb:\n  - {c: 2}\n  - d: 3\n---\ne: 4\n")
    assert found == {
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 0, "c"): 3,
        ("b", 1): 4,
        ("b", 1, "d"): 4,
        ("e",): 6,
    }


def test_the_heads_price(tmp_path: Path) -> None:
    job = job_of({"steps": 1, "global_batch": 1}, tmp_path / "program.py")

    def of(text: str, job: JobSpec = job) -> float:
        return adapted(
            job, Options(cluster=written(tmp_path, text)), "10.0.0.1:6379"
        ).head_usd_per_h

    said = AWS.replace("on_demand_floor: 1", "head_usd_per_h: 0.15")
    assert (of(AWS), of(said), of(AWS.replace("m7i.xlarge", "m1.unheard"))) == (0.2016, 0.15, 0.0)
    assert (
        of(
            said,
            job_of({"steps": 1, "global_batch": 1, "head_usd_per_h": 0.5}, tmp_path / "program.py"),
        )
        == 0.5
    )
    kuberay = (ROOT / "deploy" / "kubernetes" / "raycluster.yaml").read_text()
    assert of(kuberay) == 0.0
    of_head = "annotations: {"
    assert of(kuberay.replace(of_head, f'{of_head}elastic/usd-per-node-h: "0.4", ', 1)) == 0.4


def test_a_run_takes_the_pools_of_the_file(tmp_path: Path) -> None:
    job = job_of({"steps": 1, "global_batch": 1}, tmp_path / "program.py")
    file = written(tmp_path, AWS)
    made = adapted(job, Options(cluster=file), "10.0.0.1:6379")
    assert tuple(pool.pool() for pool in made.pools) == load_cluster(file).pools
    here = adapted(job, Options(cluster=file, local=True, show=False), None)
    for found in (made, here):
        assert found.on_demand_floor == 1  # as the file says
        assert [pool.name for pool in found.pools] == ["spot", "steady", "block"]
    own = job_of({"steps": 1, "global_batch": 1, "on_demand_floor": 0}, tmp_path / "program.py")
    # as the job says
    assert adapted(own, Options(cluster=file, local=True), None).on_demand_floor == 0
    with pytest.raises(SpecError, match="on no Ray cluster; start that one"):
        adapted(job, Options(cluster=file), None)


def test_a_file_without_workers_has_no_pool(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="it has no pool: no worker node type"):
        load_cluster(written(tmp_path, "provider: {type: aws, region: us-east-1}\n"))
