"""deploy/monitoring: only metrics that exist, and what Prometheus's own tools and server say of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.observe.small_run import lines
from support.places import ROOT
from support.waiting import until

from elastic.cluster.ray.processes import free_port
from elastic.config.numbers.metrics_port import MetricsPort
from elastic.observe.metrics.metric_names import BY_NAME, METRICS
from elastic.observe.metrics.prometheus_endpoint import PrometheusEndpoint
from elastic.observe.metrics.run_numbers import (
    CAUSES,
    COPY_RESULTS,
    PHASE_WORDS,
    RunNumbers,
    Sample,
)
from elastic.policy.state.fold import changes

FOLDER = ROOT / "deploy" / "monitoring"
NAME = re.compile(r"\b(?:ray_)?(elastic_\w+)")
# a metric with the matchers of its labels
SELECTED = re.compile(r"\b(elastic_\w+)\s*\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
WORDS = {  # of a label, as they may stand in an expression
    "phase": set(PHASE_WORDS), "cause": set(CAUSES), "result": set(COPY_RESULTS),
    "kind": {"peer", "durable"},
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    shown = [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())
    ]
    marked = [one["expr"] for one in dashboard()["annotations"]["list"]]
    asked = [one["definition"] for one in dashboard()["templating"]["list"] if "definition" in one]
    return [*shown, *marked, *asked, *(rule["expr"] for rule in rules())]


def test_rules_and_dashboard_use_only_metrics_that_exist_with_labels_that_they_have() -> None:
    found = expressions()
    used = {name for text in found for name in NAME.findall(text)}
    assert len(found) > 40 and used <= BY_NAME.keys()
    for text in found:
        for name, matchers in SELECTED.findall(text):
            for label, value in MATCHER.findall(matchers):
                assert label in ("run", "instance", *BY_NAME[name].labels), (label, text)
                for word in value.split("|") if label in WORDS else ():
                    assert word in WORDS[label], (word, text)
    shown = {name for panel in dashboard()["panels"] for target in panel.get("targets", ())
             for name in NAME.findall(target["expr"])}  # fmt: skip
    behind = {"elastic_generation", "elastic_steps_total", "elastic_gpu_seconds_total",
              "elastic_copy_seconds_total", "elastic_guard_trips_total", "elastic_storage_away",
              "elastic_journal_timestamp_seconds"}  # fmt: skip
    assert {metric.name for metric in METRICS} - shown == behind, "a panel for each of the others"


def test_alerts_are_those_that_the_page_names_and_say_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    tested = (FOLDER / "alerts_test.yml").read_text()
    for rule in rules():
        assert f"alertname: {rule['alert']}," in tested
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "$labels.run" in rule["annotations"]["summary"] and rule["annotations"]["next"]
    for need in ("Stalled", "GoodputLow", "BudgetNear", "CheckpointsLate", "FaultyNode"):
        assert f"Elastic{need}" in names


def test_the_dashboard_is_whole() -> None:
    """Numbers of panels, places that do not overlap, a data source that is chosen at import."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}" and "$run" in target["expr"]


def test_grafanas_own_types_read_the_dashboard_without_loss() -> None:
    """Grafana itself is not to be had from Debian, PyPI or npm; its SDK is."""
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="pip install grafana-foundation-sdk"
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    read = models.Dashboard.from_json(dashboard())
    again = json.loads(JSONEncoder().encode(read))
    assert [panel["title"] for panel in again["panels"]] == [
        panel["title"] for panel in dashboard()["panels"]
    ]


# ------------------------------------------------------------------------- Prometheus, where it is there


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return found


@pytest.mark.whole
@pytest.mark.parametrize(
    "words",
    [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml"),
     ("test", "rules", "alerts_test.yml")],
    ids=" ".join,
)  # fmt: skip
def test_promtool_says_yes(words: tuple[str, ...]) -> None:
    *verb, file = words
    done = subprocess.run(
        [tool("promtool"), *verb, str(FOLDER / file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.whole
def test_promtool_finds_nothing_to_say_of_the_names() -> None:
    endpoint = _told()
    try:
        with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
            text = answer.read()
    finally:
        endpoint.close()
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()


def _told() -> PrometheusEndpoint:
    endpoint = PrometheusEndpoint(MetricsPort(port=0))
    endpoint.tell("tiny-1", _samples())
    return endpoint


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """With the scrape configuration of deploy/, for this target."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    shutil.copy(FOLDER / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}",
         f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def asked(server: str, expression: str) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{server}/api/v1/query?{query}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
            return found
    except OSError:
        return []


@pytest.mark.whole
def test_a_real_prometheus_scrapes_every_metric_and_evaluates_every_expression(
    tmp_path: Path,
) -> None:
    endpoint = _told()
    try:
        with prometheus(tmp_path, endpoint.url.split("/")[2]) as server:
            until(lambda: bool(asked(server, "elastic_step")), "the first scrape")
            (step,) = asked(server, "elastic_step")
            assert step["metric"]["run"] == "tiny-1" and float(step["value"][1]) == 12
            names = '{__name__=~"elastic_.+"}'
            there = {
                one["metric"]["__name__"] for one in asked(server, f"count by (__name__) ({names})")
            }
            known = {sample.name for sample in _samples()}
            assert there == known
            for text in expressions():
                if not text.startswith("label_values"):
                    text = text.replace("$__rate_interval", "1m").replace("$run", ".*")
                    query = urllib.parse.urlencode({"query": text})
                    with urllib.request.urlopen(f"{server}/api/v1/query?{query}") as answer:
                        assert json.loads(answer.read())["status"] == "success", text
            with urllib.request.urlopen(f"{server}/api/v1/rules") as answer:
                groups = json.loads(answer.read())["data"]["groups"]
            assert [rule["health"] for rule in groups[0]["rules"]].count("err") == 0
    finally:
        endpoint.close()


def _samples() -> list[Sample]:
    numbers = RunNumbers()
    for change in changes(lines()):
        numbers.take(change)
    return numbers.samples()
