"""The numbers of a run where Ray's own exporter is scraped."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.places import ROOT

from elastic.api.running.observers import _through_ray
from elastic.cluster.ray import ray_metrics
from elastic.observe.metrics.run_numbers import Sample

SCRIPT = """
import re, sys, time, urllib.request, ray
from elastic.api.running.observers import _through_ray
from elastic.observe.metrics.run_numbers import Sample
ray.init(num_cpus=1, include_dashboard=False, _system_config={"metrics_report_interval_ms": 500})
tell = _through_ray()
for step in (5, 7):
    tell("r", [Sample("elastic_step", step), Sample("elastic_steps_total", step),
               Sample("elastic_nodes", 2, ("spot", "prepared"))])
url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
last = [re.compile(rf"^ray_elastic_{name}\\{{.* {value}\\.0$", re.M)
        for name, value in (("step", 7), ("steps_total", 7), ("nodes", 2))]
for _ in range(600):
    try:
        text = urllib.request.urlopen(url, timeout=60).read().decode()
    except OSError:
        text = ""
    if all(one.search(text) for one in last):
        break
    time.sleep(0.5)
print(text)
ray.shutdown()
"""


class _Told:
    made: list[Any] = []

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.keys, self.values = name, tag_keys, list[tuple[float, dict[str, str]]]()
        self.made.append(self)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((value, tags))

    inc = set


def test_each_driver_tells_the_totals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps the counters of a driver that is gone, beside those of the next one."""
    gauge, counter = type("Gauge", (_Told,), {"made": []}), type("Counter", (_Told,), {"made": []})
    monkeypatch.setattr(ray_metrics, "Gauge", gauge)
    monkeypatch.setattr(ray_metrics, "Counter", counter, raising=False)
    labels = {"run": "r", "pool": "spot"}
    for totals in ((0.0, 3.0, 3.0, 5.0), (5.0, 6.0)):
        gauge.made.clear()
        tell = _through_ray()
        for n in totals:
            tell("r", [Sample("elastic_step", n), Sample("elastic_notices_total", n, ("spot",))])
        step, notices = gauge.made
        assert step.values == [(n, {"run": "r"}) for n in totals] and step.keys == ("run",)
        assert notices.values == [(n, labels) for n in totals] and notices.keys == ("run", "pool")
    assert counter.made == []


@pytest.mark.e2e
def test_rays_exporter_has_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout[done.stdout.index("# HELP") :]
    found = {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ray_elastic_")
    }
    assert found["ray_elastic_step"][0] == 7 and found["ray_elastic_step"][1]["run"] == "r"
    assert found["ray_elastic_steps_total"][0] == 7
    value, labels = found["ray_elastic_nodes"]
    assert value == 2 and labels["pool"] == "spot" and labels["status"] == "prepared"
