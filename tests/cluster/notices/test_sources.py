"""What nodes learn of their own end, against a metadata server on loopback that follows the clouds'
documents."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.child import child
from support.cluster.metadata_server import MetadataServer, iso
from support.places import ROOT
from support.waiting import until

from elastic.cluster.notices.merged_notices import Notices
from elastic.cluster.notices.sources import detect, gcp, notice_file
from elastic.cluster.notices.sources import metadata_request as ask_module
from elastic.cluster.notices.sources.aws import Aws
from elastic.cluster.notices.sources.azure import Azure
from elastic.cluster.notices.sources.detect import ProbedMachine, Sources, cloud_of, sources_of
from elastic.cluster.notices.sources.gcp import Gcp
from elastic.cluster.notices.sources.kubernetes import Kubernetes
from elastic.cluster.notices.sources.metadata_request import Finding, NoticeSource, ask
from elastic.cluster.notices.sources.notice_file import NoticeFile
from elastic.cluster.notices.sources.watch import NoticeReport, Watch
from elastic.types import Notice

MINUTE = 60.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """With more patience than the product has: the machine may be busy."""
    monkeypatch.setattr(ask_module, "WAIT_S", 30.0)
    monkeypatch.setattr(detect, "MOST_S", 30.0)
    with MetadataServer() as started:
        yield started


def only(source: NoticeSource) -> Finding:
    (found,) = source.read()
    return found


# ------------------------------------------------------------------------------------------ AWS


def test_aws_says_nothing_then_the_notice(server: MetadataServer) -> None:
    source = Aws(server.endpoint())
    source.greet()
    assert list(source.read()) == []
    server.interrupt(in_s=120)
    found = only(source)
    assert found.in_s is not None and 115 < found.in_s <= 120
    at = server.node().aws["spot/instance-action"]["time"]
    assert found.what == f"AWS: spot instance-action terminate at {at}"


def test_aws_without_a_token_is_refused_so_the_probe_fetches_one_and_renews_it(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(f"{server.endpoint()}/latest/meta-data/spot/instance-action").status == 401
    now_s = [1000.0]
    monkeypatch.setattr(
        "elastic.cluster.notices.sources.aws.time", SimpleNamespace(monotonic=lambda: now_s[0])
    )
    source = Aws(server.endpoint(), token_s=100)
    list(source.read())
    first = set(server.tokens)
    for token in first:
        server.tokens[token] = 0.0  # it has run out before its time
    assert list(source.read()) == []
    now_s[0] += 49.0
    list(source.read())
    assert len(set(server.tokens) - first) == 1
    now_s[0] += 1.0  # half of its time
    list(source.read())
    assert len(set(server.tokens) - first) == 2


def test_aws_a_rebalance_recommendation_is_a_warning(server: MetadataServer) -> None:
    server.node().aws["events/recommendations/rebalance"] = {"noticeTime": iso(server.now_s())}
    found = only(Aws(server.endpoint()))
    assert found.in_s is None and found.risk


@pytest.mark.parametrize("off_s", [-MINUTE, MINUTE])
@pytest.mark.parametrize("says_date", [True, False])
def test_clocks_that_disagree_by_a_minute(
    server: MetadataServer, off_s: float, says_date: bool
) -> None:
    """With the server's own clock the rest is right; without it, never more than AWS gives at the
    most."""
    server.clock_off_s, server.says_date = off_s, says_date
    server.interrupt(in_s=100)
    in_s = only(Aws(server.endpoint())).in_s
    assert in_s is not None
    if says_date:
        assert 95 < in_s <= 100
    else:
        assert in_s <= 120 and abs(in_s - min(120, 100 + off_s)) < 5


@pytest.mark.parametrize(
    "text", ["", "[]", '{"action": "stop"}', '{"action": "stop", "time": "soon"}']
)
def test_aws_a_notice_that_cannot_be_read_is_still_one(server: MetadataServer, text: str) -> None:
    server.node().aws["spot/instance-action"] = text
    assert only(Aws(server.endpoint())).in_s == 120.0


def test_aws_trouble_of_the_server_says_nothing(server: MetadataServer) -> None:
    source = Aws(server.endpoint())
    source.greet()
    server.broken = 500
    with pytest.raises(OSError, match="HTTP 500"):
        source.read()


# --------------------------------------------------------------------------------------- GCP, Azure


def test_gcp(server: MetadataServer) -> None:
    source, said = Gcp(server.endpoint(), gpus=False), server.node().gcp
    source.greet()
    assert list(source.read()) == []
    said["instance/preempted"] = "TRUE"
    assert only(source) == Finding("GCP: instance/preempted", 30.0)
    said |= {
        "instance/preempted": "FALSE",
        "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE",
    }
    assert only(source).in_s == 60.0 and only(Gcp(server.endpoint(), gpus=True)).in_s == 3600.0
    said["instance/maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert only(source).in_s is None and not only(source).risk
    server.broken = 503
    with pytest.raises(OSError):
        source.read()


def test_gcp_maintenance_that_has_a_time(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days ahead it is a warning, within the hour a notice; by the clock of the server that named
    the time."""
    monkeypatch.setattr(gcp, "UPCOMING_EVERY_S", 0.0)
    server.clock_off_s = -MINUTE
    source, said = Gcp(server.endpoint(), gpus=True), server.node().gcp
    assert list(source.read()) == [], "{ } where nothing is planned"
    server.plan_maintenance(in_s=2 * 86400)
    warning = only(source)
    assert (
        warning.in_s is None
        and not warning.risk
        and "maintenance is planned for 20" in warning.what
    )
    server.plan_maintenance(in_s=1800)
    notice = only(source)
    assert notice.in_s is not None and 1790 < notice.in_s <= 1800 and notice.what != warning.what
    server.plan_maintenance(in_s=-60, status="ONGOING")
    assert only(source).in_s == 0.0
    said["instance/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert "maintenance-event TERMINATE" in only(source).what, "one notice of it is enough"
    said["instance/maintenance-event"] = "NONE"
    server.plan_maintenance(status="COMPLETE")
    assert list(source.read()) == []
    for text in (
        "",
        "[]",
        '{"window_start_time": 5}',
        '{"error": "no notifications have been received yet"}',
    ):
        said["instance/upcoming-maintenance"] = text
        assert list(source.read()) == []
    server.plan_maintenance(in_s=1800)
    assert list(Gcp(server.endpoint(), gpus=False).read()) == [], "asked only where there are GPUs"


def test_gcp_is_asked_for_what_is_planned_every_half_minute(server: MetadataServer) -> None:
    source = Gcp(server.endpoint(), gpus=True)
    for _ in range(3):
        source.read()
    assert [path for path in server.asked if "upcoming" in path] == [
        "GET /computeMetadata/v1/instance/upcoming-maintenance?alt=json"
    ]
    assert sum("instance/preempted" in path for path in server.asked) == 3


def azure_event(
    kind: str, in_s: float | None, names: tuple[str, ...] = ("vm_0",)
) -> dict[str, object]:
    at = "" if in_s is None else formatdate(time.time() + in_s, usegmt=True)
    return {
        "EventId": f"id-{kind}", "EventType": kind, "ResourceType": "VirtualMachine",
        "Resources": list(names), "EventStatus": "Started" if in_s is None else "Scheduled",
        "NotBefore": at, "Description": "", "DurationInSeconds": -1,
    }  # fmt: skip


def test_azure(server: MetadataServer) -> None:
    source, said = Azure(server.endpoint()), server.node()
    source.greet()
    assert list(source.read()) == []
    said.azure = [
        azure_event("Preempt", 30, ("vm_1",)),
        azure_event("Reboot", 900, ("vm_1", "vm_0")),
    ]
    found = only(source)
    assert "Reboot" in found.what and found.in_s is not None and 890 < found.in_s <= 900
    said.azure = [azure_event("Preempt", None)]
    assert only(source).in_s == 0.0 and "started" in only(source).what
    said.azure = [azure_event("Freeze", 900)]
    assert only(source).in_s is None
    said.azure = [azure_event("SomethingNew", 900)]
    assert list(source.read()) == []


# --------------------------------------------------------------------------------- Kubernetes, file


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("a-token\n")
    (tmp_path / "namespace").write_text("train")
    return tmp_path


def pod_environment(server: MetadataServer) -> dict[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.port),
        "HOSTNAME": "worker-7",
    }


def test_a_pod_that_is_deleted(server: MetadataServer, account: Path) -> None:
    source = Kubernetes(pod_environment(server), account, scheme="http")
    server.node().pod = {"metadata": {"name": "worker-7"}}
    assert list(source.read()) == []
    assert server.asked[-1] == "GET /api/v1/namespaces/train/pods/worker-7"
    server.clock_off_s = -MINUTE
    server.node().pod = {
        "metadata": {
            "deletionTimestamp": iso(server.now_s() + 30),
            "deletionGracePeriodSeconds": 30,
        }
    }
    found = only(source)
    assert found.in_s is not None and 25 < found.in_s <= 30
    assert found.what.startswith("Kubernetes: pod train/worker-7 is deleted at")


def test_a_service_account_without_the_right_is_said_and_not_asked_on(
    server: MetadataServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        detect.kubernetes, "Kubernetes", lambda environ, folder: Kubernetes(environ, folder, "http")
    )
    place = ProbedMachine(pod_environment(server), account / "none", account)
    found = sources_of(place)
    assert [source.name for source in found.found if source.name == "Kubernetes"] == []
    assert (
        "Kubernetes: the service account may not read pod train/worker-7 (HTTP 403)" in found.notes
    )
    server.node().pod = {"metadata": {}}
    assert "Kubernetes" in [source.name for source in sources_of(place).found]


def test_a_file_counts_its_age_and_is_withdrawn_with_it(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    source = NoticeFile(str(file))
    assert list(source.read()) == []
    file.write_text("25\n")
    found = only(source)
    assert found.in_s is not None and 20 < found.in_s <= 25
    file.write_text("")
    assert 25 < (only(source).in_s or 0) <= 30
    file.unlink()
    assert list(source.read()) == []


@pytest.mark.slow
def test_a_trap_on_sigterm_writes_the_file(tmp_path: Path) -> None:
    """As docs/notices.md has it for a container without a preStop hook."""
    file = tmp_path / "notice"
    page = (ROOT / "docs" / "notices.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("trap ")]
    script = f"ray() {{ exec sleep 60; }}\n{line}\nray start --block & echo ready; wait $!"
    environment = {"ELASTIC_NOTICE_FILE": str(file), "PATH": "/usr/bin:/bin", "GRACE_S": "1"}
    with child(["bash", "-c", script], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.terminate()
        until(
            lambda: "(1 s)" in [finding.what[-5:] for finding in NoticeFile(str(file)).read()],
            "a notice in the file",
        )
        began_s = time.monotonic()
        process.wait(60)
        assert time.monotonic() - began_s > 0.5, "Ray keeps the rest of the grace period"


@pytest.mark.parametrize("off_s", [-MINUTE, MINUTE])
def test_a_node_whose_clock_is_off_gives_the_driver_the_right_deadline(
    server: MetadataServer, account: Path, off_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks of cloud and driver are right, the node's is not: what goes from it to the driver
    are seconds from now."""
    shifted = SimpleNamespace(time=lambda: time.time() + off_s, monotonic=time.monotonic)
    for module in (ask_module, notice_file):
        monkeypatch.setattr(module, "time", shifted)
    server.interrupt(in_s=100)
    server.node().azure = [azure_event("Preempt", 100)]
    server.node().pod = {
        "metadata": {
            "deletionTimestamp": iso(server.now_s() + 100),
            "deletionGracePeriodSeconds": 100,
        }
    }
    server.plan_maintenance(in_s=100)
    file = account / "notice"
    file.write_text("100")
    written_s = time.time() + off_s  # a file of that node has its clock's time
    os.utime(file, (written_s, written_s))
    sources: list[NoticeSource] = [
        Aws(server.endpoint()), Azure(server.endpoint()), Gcp(server.endpoint(), gpus=True),
        NoticeFile(str(file)), Kubernetes(pod_environment(server), account, scheme="http"),
    ]  # fmt: skip
    for source in sources:
        watch, notices = Watch(lambda source=source: Sources((source,))), Notices()  # type: ignore[misc]
        report = NoticeReport(0)
        while not report.said:
            report = watch.news(report.version, 60.0)
        watch.close()
        now_s = time.time()
        notices.heard("n", report, now_s)
        (notice,) = notices.news()
        assert isinstance(notice, Notice) and 80 < notice.deadline_s - now_s <= 100, source.name


# ---------------------------------------------------------------------------- which of them is here


def firmware(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text + "\n")
    return folder


def test_the_firmware_names_the_cloud(tmp_path: Path) -> None:
    assert cloud_of(tmp_path / "none") is None
    assert (
        cloud_of(firmware(tmp_path / "a", sys_vendor="Amazon EC2", product_name="p5.48xlarge"))
        == "AWS"
    )
    assert (
        cloud_of(
            firmware(
                tmp_path / "x",
                sys_vendor="Xen",
                product_name="HVM domU",
                bios_version="4.11.amazon",
            )
        )
        == "AWS"
    )
    assert (
        cloud_of(
            firmware(tmp_path / "g", sys_vendor="Google", product_name="Google Compute Engine")
        )
        == "GCP"
    )
    azure = firmware(
        tmp_path / "z", sys_vendor="Microsoft Corporation", chassis_asset_tag=detect.AZURE_CHASSIS
    )
    assert cloud_of(azure) == "Azure"
    assert (
        cloud_of(
            firmware(tmp_path / "h", sys_vendor="Microsoft Corporation", chassis_asset_tag="1234")
        )
        == ""
    )
    assert (
        cloud_of(firmware(tmp_path / "d", sys_vendor="Dell Inc.", product_name="PowerEdge XE9680"))
        == ""
    )


def names(found: Sources) -> list[str]:
    return [source.name for source in found.found]


def test_variables_of_the_sdks_name_where_to_ask(server: MetadataServer, tmp_path: Path) -> None:
    none = tmp_path / "none"
    aws = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint("a")}
    server.node("a")
    assert names(sources_of(ProbedMachine(aws, none, none, named_only=True))) == ["AWS"]
    assert names(
        sources_of(ProbedMachine({"GCE_METADATA_HOST": f"127.0.0.1:{server.port}"}, none, none))
    ) == ["GCP"]
    assert names(
        sources_of(
            ProbedMachine({"ELASTIC_AZURE_METADATA_ENDPOINT": server.endpoint()}, none, none)
        )
    ) == ["Azure"]
    assert (
        names(sources_of(ProbedMachine(aws | {"AWS_EC2_METADATA_DISABLED": "true"}, none, none)))
        == []
    )
    assert not [text for text in server.asked if "computeMetadata" in text and "/a/" in text]


def test_without_a_cloud_nothing_is_asked(tmp_path: Path) -> None:
    ours = firmware(tmp_path / "d", sys_vendor="Dell Inc.")
    assert sources_of(ProbedMachine({}, ours, tmp_path)) == Sources()
    assert sources_of(ProbedMachine({}, tmp_path / "none", tmp_path, named_only=True)) == Sources()


def test_an_address_that_hangs_costs_about_a_second(
    server: MetadataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked in parallel, all three clouds; nothing of it is left behind as a source."""
    monkeypatch.setattr(ask_module, "WAIT_S", 0.9)
    monkeypatch.setattr(detect, "MOST_S", 1.0)
    server.hang.set()
    for cloud in (detect.gcp, detect.azure):
        monkeypatch.setattr(cloud, "endpoint_of", lambda environ: server.endpoint())
    monkeypatch.setattr(detect.aws, "endpoint_of", lambda environ: server.endpoint())
    began_s = time.monotonic()
    assert sources_of(ProbedMachine({}, tmp_path / "none", tmp_path)) == Sources()
    assert time.monotonic() - began_s < 20.0  # the server keeps silent for 60 s
    assert len(server.asked) == 3


def test_a_named_cloud_that_does_not_answer_yet_is_asked_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    found = sources_of(
        ProbedMachine(
            {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}"}, tmp_path, tmp_path
        )
    )
    assert names(found) == ["AWS"]
    assert (
        len(found.notes) == 1
        and found.notes[0].startswith("AWS: ")
        and found.notes[0].endswith("asked again")
    )


# ------------------------------------------------------------------------------ the watch of a node


class Scripted:
    """A source that says what it is told to."""

    name, every_s = "scripted", 0.01

    def __init__(self) -> None:
        self.says: list[Finding] | Exception = []
        self.n_asked = 0

    def greet(self) -> None:
        return

    def read(self) -> list[Finding]:
        self.n_asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def after(watch: Watch, seen: NoticeReport) -> NoticeReport:
    report = watch.news(seen.version, 60)
    assert report.version > seen.version
    return report


def test_a_notice_keeps_the_end_that_was_seen_first_and_goes_when_it_is_said_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(
        "elastic.cluster.notices.sources.watch.time", SimpleNamespace(monotonic=lambda: now_s[0])
    )
    source = Scripted()
    watch = Watch(lambda: Sources((source,), ("a note",)))
    known = after(watch, NoticeReport(0))
    assert (known.sources, known.notes) == (("scripted",), ("a note",))
    while not known.said:  # its first answer
        known = after(watch, known)
    assert known.said == {"scripted": ()}
    source.says = [Finding("taken", 30.0)]
    known = after(watch, known)
    now_s[0] += 5.0
    source.says = [Finding("taken", 30.0), Finding("risk", risk=True)]
    told = after(watch, known)
    in_s = {finding.what: finding.in_s for finding in told.said["scripted"]}
    assert in_s == {"taken": 25.0, "risk": None}, "seen first five seconds ago"
    source.says = ConnectionError("no answer")
    asked = source.n_asked
    until(lambda: source.n_asked > asked + 1, "a question without an answer")
    now_s[0] += 5.0
    later = watch.news(0, 0)
    assert later.version == told.version, "no answer changes nothing"
    taken = next(finding for finding in later.said["scripted"] if finding.what == "taken")
    assert taken.in_s == 20.0, "counted from now"
    source.says = []
    assert after(watch, later).said == {"scripted": ()}
    watch.close()


def test_a_source_that_falls_silent_is_named_and_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.cluster.notices.sources.watch.DEAF_S", 0.1)
    source = Scripted()
    watch = Watch(lambda: Sources((source,)))
    known = after(watch, NoticeReport(0))
    while not known.said:
        known = after(watch, known)
    source.says = AttributeError("a document of another form")
    deaf = after(watch, known)
    assert len(deaf.notes) == 1 and "a document of another form" in deaf.notes[0]
    source.says = [Finding("taken", 30.0)]
    heard = after(watch, deaf)
    while not heard.said["scripted"]:
        heard = after(watch, heard)
    assert heard.notes == ()
    watch.close()
    assert watch.news(heard.version, 60).version == heard.version, "a closed watch does not wait"
