"""Pools of GPUs where this machine is all there is: with its GPUs, with CPU processes, or refused in
one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from support.places import PROGRAMS, ROOT

from elastic.api import ElasticTrainer
from elastic.api.running.local_pools import adapted, here
from elastic.api.running.options import Options
from elastic.cli.command_line import main
from elastic.config.job import JobSpec, PoolSpec, job_of
from elastic.config.pool_checks import check_fit
from elastic.errors import SpecError

SPOT = PoolSpec(
    name="spot", accelerator_type="L40S", gpus_per_node=8, market_type="spot", usd_per_node_h=9.0,
    min_nodes=4, max_nodes=6, instance_type="g6e.48xlarge", cloud="aws", memory_bytes_per_gpu=48 << 30,
)  # fmt: skip
STEADY = PoolSpec(name="steady", accelerator_type="L40S", gpus_per_node=8, max_nodes=1)


def job(**keys: Any) -> JobSpec:
    return job_of({"steps": 1, "global_batch": 64, **keys}, Path("/nowhere/program.py"))


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, [(2, 2), (1, 2)]),
        ({"min_workers": 6}, [(2, 2), (1, 2)]),
        ({"min_workers": 10}, [(4, 2), (1, 2)]),
        ({"layout": "dp_shard=2,tp=4"}, [(2, 4), (1, 4)]),
        ({"layout": {"32": "dp_shard=8,tp=4", "4": "dp_shard=2,pp=2"}}, [(2, 2), (1, 2)]),
        ({"layout": "dp_shard=16"}, [(2, 8), (1, 8)]),
        ({"min_workers": 50}, [(6, 8), (1, 8)]),
    ],
)
def test_processes_play_the_nodes_as_few_as_the_job_allows(
    keys: dict[str, Any], sizes: list[tuple[int, int]]
) -> None:
    asked = job(**keys)
    found, said = here(asked, [SPOT, STEADY], 0, local=True)
    assert [(pool.max_nodes, pool.gpus_per_node) for pool in found] == sizes
    check_fit(asked, [pool.pool() for pool in found])
    spot = found[0]
    assert (spot.name, spot.market_type, spot.usd_per_node_h) == ("spot", "spot", 9.0)
    assert spot.min_nodes <= spot.max_nodes
    assert (spot.accelerator_type, spot.instance_type, spot.cloud) == ("CPU", "", "")
    assert (
        "spot has nodes of 8 L40S, steady has nodes of 8 L40S, but this machine has no GPUs" in said
    )
    assert f"CPU processes play them (spot {spot.max_nodes} x {spot.gpus_per_node} + " in said


def test_gpus_that_are_here_are_used() -> None:
    small = SPOT.model_copy(update={"gpus_per_node": 2})
    assert here(job(), [small, STEADY], 2, local=True) == ([small, STEADY], "")
    with pytest.raises(SpecError, match="but this machine has 2 GPUs; name smaller nodes"):
        here(job(), [SPOT], 2, local=True)


def test_without_local_nothing_is_played() -> None:
    with pytest.raises(SpecError, match="no Ray cluster: submit the run to one .*: --local"):
        here(job(), [SPOT], 0, local=False)


CLUSTER = """
cluster_name: mine
max_workers: 3
provider: {type: aws, region: us-east-1, availability_zone: us-east-1a}
head_node_type: head
available_node_types:
  head: {resources: {CPU: 0}, node_config: {InstanceType: m5.large}}
  spot:
    {max_workers: 2, labels: {ray.io/market-type: spot}, resources: {GPU: 8}, node_config: {InstanceType: g6e.48xlarge}}
"""


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("no_gpus")
def test_a_run_says_who_plays_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    out = io.StringIO()
    options = Options(cluster=tmp_path / "mine.yaml", local=True, stream=out)
    (pool,) = adapted(job(), options, None).pools
    assert (pool.accelerator_type, pool.gpus_per_node, pool.max_nodes) == ("CPU", 2, 2)
    assert out.getvalue().startswith("spot has nodes of 8 L40S, but this machine has no GPUs: CPU")


def test_on_a_cluster_a_drill_is_carried_out_where_it_is_asked_for_and_named_where_not(
    tmp_path: Path,
) -> None:
    drilled, out = job(drill=[{"at_step": 1, "kill": "any"}]), io.StringIO()
    assert adapted(drilled, Options(stream=out), "10.0.0.1:6379").drill == []
    assert out.getvalue().startswith("note: the job's drill (1 event) is left out on a Ray cluster")
    asked = Options(stream=out, own_drill=True)
    for options, address in ((asked, "10.0.0.1:6379"), (Options(stream=out), None)):
        assert adapted(drilled, options, address).drill == drilled.drill
    file = tmp_path / "drill.yaml"
    file.write_text("- {at_step: 2, notice: any}\n")
    (other,) = adapted(drilled, Options(drill=file, stream=out), "10.0.0.1:6379").drill
    assert (other.at_step, other.notice) == (2, "any") and out.getvalue().count("\n") == 1


def test_a_drill_beside_a_trainer_is_for_the_cluster_that_it_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes workers there, and leaves the nodes alone."""

    class Asked(BaseException):
        pass

    def run_job(spec: JobSpec, options: Options) -> None:
        raise Asked(len(spec.drill), options.own_drill, options.spared)

    monkeypatch.setattr("elastic.api.trainer.run_job", run_job)
    (tmp_path / "job.yaml").write_text(f"program: {PROGRAMS}/tiny.py\n")
    keys = {"steps": 1, "global_batch": 8, "storage": str(tmp_path)}
    for drill, found in (
        ([{"at_step": 1, "kill": "any"}], (1, True, True)),
        (None, (0, False, True)),
    ):
        given = keys | ({"drill": drill} if drill else {})
        with pytest.raises(Asked) as asked:
            ElasticTrainer(tmp_path, job=given).fit()
        assert asked.value.args == found


@pytest.mark.usefixtures("no_gpus")
def test_a_job_on_gpus_without_a_cluster_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would wait for capacity for ever."""
    pools = "[{name: gpus, accelerator_type: H100, gpus_per_node: 8}]"
    words = [str(ROOT / "jobs" / "quickstart"), "--set", f"pools={pools}", "--set", "drill=[]"]
    code = main(["run", *words, "--storage", str(tmp_path)])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1
    assert (
        "gpus has nodes of 8 H100, but this machine has no GPUs, and this process is on no" in err
    )


@pytest.mark.e2e
@pytest.mark.usefixtures("no_gpus")
def test_a_cluster_file_of_gpus_is_tried_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    words = ["--cluster", str(tmp_path / "mine.yaml"), "--local", "--storage", str(tmp_path)]
    (tmp_path / "job.yaml").write_text(
        f"program: {PROGRAMS}/tiny.py\nsteps: 4\nglobal_batch: 8\nbudget_usd: 20\n"
        "layout: {2: dp_shard=2}\n"
    )
    assert main(["run", str(tmp_path), *words]) == 0
    out = capsys.readouterr().out
    assert "CPU processes play them (spot 2 x 2), at the pools' prices" in out
    assert "succeeded" in out


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpus")
def test_a_trainer_that_asks_for_gpus_is_refused_at_once(tmp_path: Path) -> None:
    train = pytest.importorskip("ray.train")
    program = (ROOT / "jobs" / "quickstart" / "program.py").read_text()
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "job.yaml").write_text("steps: 1\nglobal_batch: 8\n")
    scaling = train.ScalingConfig(num_workers=2, use_gpu=True)
    with pytest.raises(SpecError, match="nodes of 1 GPU, but this machine has no GPUs, .*use_gpu"):
        ElasticTrainer(tmp_path, scaling_config=scaling).fit()
