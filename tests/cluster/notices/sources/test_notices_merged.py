"""Notices from several tellers become one per node: the earliest counts, and it is withdrawn when
nobody gives it any more."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from elastic.cluster.backend.cloud_feed import CloudFeed
from elastic.cluster.notices.merged_notices import DRILL, RAY, RESERVATION, Notices
from elastic.cluster.notices.notice_watchers import NoticeWatchers
from elastic.cluster.notices.sources.metadata_request import Finding
from elastic.cluster.notices.sources.watch import NoticeReport
from elastic.cluster.prices.market import Ticker
from elastic.types import Node, NodeWarned, Notice, NoticeWithdrawn, Pool, PriceSeen

AWS = "AWS: spot instance-action terminate at 2026-01-01T00:02:00Z"


def said(**findings: Finding) -> NoticeReport:
    """Each source says one thing."""
    return NoticeReport(
        1, tuple(findings), (), {source: (finding,) for source, finding in findings.items()}
    )


def test_draining_is_told_once_and_withdrawn() -> None:
    notices = Notices(usual_s=120.0)
    notices.drains({"a": 500.0, "b": 0.0}, 100.0)
    assert notices.news() == [Notice("a", 500.0, RAY), Notice("b", 220.0, RAY)]
    notices.drains({"a": 500.5, "b": 0.0}, 101.0)
    assert notices.news() == []
    notices.drains({"a": 400.0, "b": 0.0}, 102.0)
    assert notices.news() == [Notice("a", 400.0, RAY)]
    notices.forget("a")
    notices.drains({}, 103.0)
    assert notices.news() == [NoticeWithdrawn("b")]
    assert notices.deadline_s("a") is None and notices.deadline_s("b") is None


def test_the_earliest_counts_and_all_must_be_gone_before_it_is_withdrawn() -> None:
    notices = Notices()
    notices.heard("a", said(AWS=Finding(AWS, 120.0)), 1000.0)
    assert notices.news() == [Notice("a", 1120.0, AWS)]
    notices.drains({"a": 1100.0}, 1001.0)
    assert notices.news() == [Notice("a", 1100.0, RAY)]
    notices.drains({"a": 1100.0}, 1002.0)
    notices.heard("a", NoticeReport(2, ("AWS",), (), {"AWS": ()}), 1003.0)
    assert notices.news() == [], "Ray still drains it"
    notices.heard("a", said(AWS=Finding(AWS, 90.0)), 1003.0)
    assert notices.news() == [Notice("a", 1093.0, AWS)]
    notices.heard("a", NoticeReport(4, ("AWS",), (), {"AWS": ()}), 1004.0)
    assert notices.news() == [Notice("a", 1100.0, RAY)], "later again, by the one that is left"
    notices.drains({}, 1005.0)
    assert notices.news() == [NoticeWithdrawn("a")]


def test_what_is_said_again_keeps_its_deadline_whatever_the_clocks_do() -> None:
    notices = Notices()
    notices.heard("a", said(GCP=Finding("GCP: instance/preempted", 30.0)), 1000.0)
    assert notices.news() == [Notice("a", 1030.0, "GCP: instance/preempted")]
    # of a watcher that was started over
    notices.heard("a", said(GCP=Finding("GCP: instance/preempted", 30.0)), 1020.0)
    assert notices.news() == []


def test_a_source_that_has_not_answered_withdraws_nothing() -> None:
    notices = Notices()
    notices.heard("a", said(AWS=Finding(AWS, 120.0)), 1000.0)
    notices.news()
    # a watcher that was started over, before its first answer
    notices.heard("a", NoticeReport(1, ("AWS",)), 1010.0)
    assert notices.news() == []


def test_a_warning_is_told_once_and_is_no_notice() -> None:
    notices = Notices()
    risk, pause = Finding("AWS: rebalance recommendation", risk=True), Finding("Azure: Freeze")
    assert notices.heard("a", said(AWS=risk), 1.0) == [NodeWarned("a", risk.what, True)]
    assert notices.heard("a", said(AWS=risk, Azure=pause), 2.0) == [
        NodeWarned("a", pause.what, False)
    ]
    assert notices.news() == []
    notices.forget("a")
    assert notices.heard("a", said(AWS=risk), 3.0) == [NodeWarned("a", risk.what, True)], (
        "another node of that name"
    )


def test_a_node_that_the_policy_leaves_is_left() -> None:
    """Ray drains it because this run says so: no notice comes of it, and the cloud's is not
    withdrawn any more."""
    notices = Notices()
    notices.heard("a", said(AWS=Finding(AWS, 120.0)), 1000.0)
    notices.news()
    for node_id in ("a", "b"):
        notices.left(node_id)
    notices.drains({"a": 1060.0, "b": 1060.0}, 1001.0)
    notices.heard("a", NoticeReport(2, ("AWS",), (), {"AWS": ()}), 1002.0)
    assert notices.news() == []
    notices.forget("b")
    notices.drains({"b": 1060.0}, 1003.0)
    assert notices.news() == [Notice("b", 1060.0, RAY)], "another node of that name"


def test_a_drill_is_one_teller_among_others() -> None:
    notices = Notices()
    notices.also(Notice("a", 1050.0, "drill"))
    assert notices.news() == [] and notices.deadline_s("a") == 1050.0
    notices.drains({"a": 1120.0}, 1001.0)  # ours: the policy leaves the node
    assert notices.news() == []
    notices.drains({"a": 1040.0}, 1002.0)
    assert notices.news() == [Notice("a", 1040.0, RAY)]


def test_the_end_of_a_reservation_is_told_ten_minutes_ahead() -> None:
    pools = (Pool("r", market_type="reserved", ends_at_s=10_000.0), Pool("s", market_type="spot"))
    nodes = (Node("r-1", "r"), Node("s-1", "s"))
    notices = Notices()
    notices.ends(nodes, pools, 9_399.0)
    assert notices.news() == []
    notices.ends(nodes, pools, 9_400.0)
    assert notices.news() == [Notice("r-1", 10_000.0, RESERVATION)]
    notices.ends(nodes, pools, 9_401.0)
    assert notices.news() == []


class Quiet(NoticeWatchers):
    """NoticeWatchers that were told what to say."""

    def __init__(self, reports: list[tuple[str, NoticeReport]]) -> None:
        self.reports, self.kept = reports, dict[str, str]()

    def keep(self, nodes: Mapping[str, str]) -> None:
        self.kept = dict(nodes)

    def take(self) -> list[tuple[str, NoticeReport]]:
        taken, self.reports = self.reports, []
        return taken


def test_that_a_pool_hears_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pools = (Pool("spot", market_type="spot"), Pool("ours", market_type="owned"))
    nodes = {name: Node(name, name.partition("-")[0]) for name in ("spot-1", "spot-2", "ours-1")}
    note = "Kubernetes: the service account may not read pod a/b (HTTP 403)"
    quiet = Quiet(
        [
            ("spot-1", NoticeReport(1)),
            ("spot-2", NoticeReport(1, (), (note,))),
            ("ours-1", NoticeReport(1)),
            ("gone", NoticeReport(1)),
        ]
    )
    ticker = Ticker(())
    ticker._news.put(PriceSeen("spot", 2.0))
    cloud_feed = CloudFeed(pools, quiet, ticker)
    with caplog.at_level(logging.WARNING):
        heard = cloud_feed.news(nodes, {"spot-1": "x"}, {"x": 50.0, "y": 60.0}, now_s=10.0)
    assert heard == [Notice("spot-1", 50.0, RAY), PriceSeen("spot", 2.0)]
    assert quiet.kept == {"spot-1": "x"}
    assert [
        record.getMessage().split(" (")[0].removeprefix("notices: ") for record in caplog.records
    ] == [
        "nodes of pool spot are told nothing of their end",
        "Kubernetes: the service account may not read pod a/b",
    ]


def test_a_drill_announces_nothing() -> None:
    """A node may be led out of the cluster for good only where somebody can take it."""
    notices = Notices()
    notices.also(Notice("a", 1030.0, DRILL))
    assert (
        notices.deadline_s("a") == 1030
        and notices.announced_s("a") is None
        and notices.announced_s("b") is None
    )
    notices.drains({"a": 1060.0}, 1000.0)
    assert notices.announced_s("a") == 1060
