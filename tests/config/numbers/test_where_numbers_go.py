"""`trackers` and `metrics_port`: by name, by list, by map; one line where they are wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.places import ROOT

from elastic.config.job import job_of
from elastic.config.numbers import trackers as trackers_module
from elastic.config.numbers.metrics_port import MetricsPort
from elastic.config.numbers.trackers import check_installed
from elastic.errors import SpecError

KEYS = {"name": "j", "steps": 2, "global_batch": 2}


def job(**more: Any) -> Any:
    return job_of(KEYS | more, Path("/j/program.py"), "job.yaml")


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (None, {}),
        ([], {}),
        ("wandb", {"wandb": {"tags": []}}),
        (["mlflow", "trackio"], {"mlflow": {}, "trackio": {}}),
        ({"wandb": {"project": "x", "tags": ["a"]}, "mlflow": None},
         {"wandb": {"project": "x", "tags": ["a"]}, "mlflow": {}}),
    ],
)  # fmt: skip
def test_trackers_are_chosen_by_name_or_with_settings(given: Any, chosen: Any) -> None:
    assert job(trackers=given).trackers.chosen() == chosen


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["wandbb"], "job.yaml: unknown key 'trackers.wandbb'; did you mean 'wandb'?"),
        (
            {"wandb": {"projct": "x"}},
            "unknown key 'trackers.wandb.projct'; did you mean 'project'?",
        ),
        ({"mlflow": {"project": "x"}}, "unknown key 'trackers.mlflow.project'"),
        (["tensorboard"], "unknown key 'trackers.tensorboard'"),
        ([3], "key 'trackers'"),
        (3, "key 'trackers'"),
        ({"wandb": {"project": ""}}, "key 'trackers.wandb.project'"),
    ],
)
def test_a_tracker_that_is_none_is_one_line(given: Any, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(trackers=given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (9500, MetricsPort("127.0.0.1", 9500)),
        ("9500", MetricsPort("127.0.0.1", 9500)),
        (0, MetricsPort("127.0.0.1", 0)),
        ("0.0.0.0:9500", MetricsPort("0.0.0.0", 9500)),
        ("[::1]:9500", MetricsPort("::1", 9500)),
        ("ray", MetricsPort("127.0.0.1", None)),
    ],
)
def test_a_port_is_on_this_machine_alone_unless_it_says_so(given: Any, where: MetricsPort) -> None:
    assert MetricsPort.of(given) == where and job(metrics_port=given).metrics_port == given


@pytest.mark.parametrize("given", [-1, 65536, "x", "host:", ":9500", "host", "1.5", True, [1]])
def test_what_is_no_port_is_one_line(given: Any) -> None:
    with pytest.raises(SpecError) as caught:
        job(metrics_port=given)
    assert str(caught.value).startswith("job.yaml: key 'metrics_port': ")
    assert "\n" not in str(caught.value)


def test_a_library_that_is_missing_is_said_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"wandb"}
    monkeypatch.setattr(trackers_module, "find_spec", lambda name: name in there or None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    check_installed({"wandb": {}}, "job.yaml")
    with pytest.raises(SpecError) as caught:
        check_installed({"wandb": {}, "mlflow": {}}, "job.yaml")
    assert str(caught.value) == (
        "job.yaml: trackers: mlflow is not installed where the driver runs; "
        'pip install "elastic-ray[mlflow]"'
    )
    there.add("mlflow")
    for uri, said in (("", "without an address"), ("sqlite:///a.db", "'sqlite:' needs")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(SpecError, match=said):
            check_installed({"mlflow": {}}, "job.yaml")
    check_installed({"mlflow": {"tracking_uri": "file:/runs"}}, "job.yaml")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://there")
    check_installed({"mlflow": {}}, "job.yaml")


def test_the_jobs_of_the_page_are_read() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    found = [job(**yaml.safe_load(text)) for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    assert [[*one.trackers.chosen()] for one in found] == [
        ["wandb", "mlflow"],
        ["wandb", "mlflow", "trackio"],
    ]
    assert found[1].trackers.chosen()["wandb"]["group"] == "ablation"
