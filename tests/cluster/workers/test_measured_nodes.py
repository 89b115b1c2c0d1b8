"""`elastic profile` on a Ray cluster: which nodes measure themselves, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.places import ROOT

from elastic.api.profiling import profile_hardware
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.ray._ray_private import read_environment_again
from elastic.cluster.workers import measured_nodes
from elastic.cluster.workers.measured_nodes import _chosen, measured
from elastic.config.hardware import PLACE, read_hardware
from elastic.config.job import load_job
from elastic.errors import InternalError, NoCapacity, SpecError
from elastic.types import ModelProfile
from elastic.types.nouns import ACCELERATOR_LABEL
from elastic.worker.profile.measure import MeasureRequest

WANTED = MeasureRequest(ModelProfile(1, 1, ()), seconds=1.0, sizes=(1,))


def node(name: str, gpus: int, kind: str = "") -> RayNode:
    return RayNode(name, "10.0.0.1", 1, {ACCELERATOR_LABEL: kind} if kind else {}, 8, gpus, False)


def test_one_node_of_each_kind_is_measured() -> None:
    nodes = [node("head", 0), node("a", 1, "H100"), node("b", 8, "H100"), node("c", 2, "A100")]
    assert {kind: one.ray_id for kind, one in _chosen(nodes, ()).items()} == {
        "H100": "b",
        "A100": "c",
    }
    assert list(_chosen(nodes, ["A100", "CPU"])) == ["A100"]
    # the job's pools are elsewhere: all that is here
    assert list(_chosen(nodes, ["L4"])) == ["H100", "A100"]
    assert {kind: one.ray_id for kind, one in _chosen(nodes[:1], ["H100"]).items()} == {
        "CPU": "head"
    }
    with pytest.raises(NoCapacity, match="no node"):
        _chosen([], ())


def test_a_file_for_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))
    spec = load_job(ROOT / "jobs" / "quickstart")
    found: dict[str, Any] = {
        "flop_per_s": {"float32": 4e10}, "products": [], "op_bytes_per_s": 6e9, "launch_s": 4e-6,
        "memory_bytes_per_s": 1e10, "copy_bytes_per_s": {"to_device": 7e9}, "crowded": [],
        "collectives": [],
    }  # fmt: skip
    for kind in ("H100", "A100"):
        profile_hardware._kept(
            profile_hardware._path(profile_hardware.ProfileRequest(), kind),
            kind,
            found | {"host": kind},
            spec=spec,
            uri="s3://b/runs",
        )
    assert {file.name for file in tmp_path.iterdir()} == {"H100.json", "A100.json"}
    assert read_hardware(tmp_path / "A100.json").accelerator_type == "A100"


def test_an_address_where_nothing_answers() -> None:
    with pytest.raises(SpecError, match="cannot be reached"):
        measured("127.0.0.1:1", WANTED)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[str]:
    """As somebody starts one in Python: Ray then sets its token mode in this process's environment,
    and a token in HOME."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        patch.setenv("RAY_AUTH_MODE", "token")
        read_environment_again()
        context: Any = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield context.address_info["gcs_address"]
        ray.shutdown()
    read_environment_again()


@pytest.mark.whole
def test_a_node_measures_itself(own_cluster: str) -> None:
    ((kind, found),) = measured(own_cluster, WANTED).items()
    assert (
        kind == "CPU"
        and found["host"]
        and found["flop_per_s"]["float32"] > 1e8
        and found["crowded"]
    )


@pytest.mark.e2e
def test_what_goes_wrong_there_is_told_here(
    own_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(wanted: MeasureRequest) -> Any:
        raise InternalError("measuring process 0 ended with 1: no memory")

    monkeypatch.setattr(measured_nodes, "_measure", broken)
    with pytest.raises(InternalError, match="ended with 1: no memory"):
        measured(own_cluster, WANTED)
