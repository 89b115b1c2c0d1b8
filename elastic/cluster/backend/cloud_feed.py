"""Notices and prices as events of the backend: which of a run's nodes will be preempted, and what
its pools cost now."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.cluster.notices.merged_notices import Notices
from elastic.cluster.notices.notice_watchers import LocalNoticeWatcher, NoticeWatchers
from elastic.cluster.notices.sources.watch import NoticeReport
from elastic.cluster.prices.market import Ticker
from elastic.types import Event, Node, Pool

log = logging.getLogger(__name__)

DEAF = (
    "nodes of pool {} are told nothing of their end (no metadata service, no pod, no "
    "$ELASTIC_NOTICE_FILE there): a reclaim is noticed when it happens"
)


@dataclass
class CloudFeed:
    """`pools`: of the run."""

    pools: Sequence[Pool]
    notice_watchers: NoticeWatchers | LocalNoticeWatcher
    ticker: Ticker
    notices: Notices = field(default_factory=Notices)
    _said: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, pools: Sequence[Pool], embedded: bool) -> CloudFeed:
        """Of an embedded cluster nothing is looked up: its pools are made up, and all its nodes are
        this machine."""
        if embedded:
            return cls(pools, LocalNoticeWatcher(), Ticker(()))
        return cls(pools, NoticeWatchers(), Ticker(pools))

    def news(
        self,
        nodes: Mapping[str, Node],
        ray_ids: Mapping[str, str],
        draining: Mapping[str, float],
        *,
        now_s: float,
    ) -> list[Event]:
        """`nodes`: those that stand; `ray_ids`: node id -> Ray's. `draining`: Ray id -> deadline, 0
        = not known."""
        self.notice_watchers.keep(ray_ids)
        events: list[Event] = []
        for node_id, report in self.notice_watchers.take():
            if node_id in nodes:
                self._say(nodes[node_id], report)
                events += self.notices.heard(node_id, report, now_s)
        self.notices.drains({n: draining[r] for n, r in ray_ids.items() if r in draining}, now_s)
        self.notices.ends(nodes.values(), self.pools, now_s)
        return [*events, *self.notices.news(), *self.ticker.take()]

    def forget(self, node_id: str) -> None:
        self.notices.forget(node_id)

    def close(self) -> None:
        self.notice_watchers.close()
        self.ticker.close()

    def _say(self, node: Node, report: NoticeReport) -> None:
        """What a person should know of it, each once per run."""
        texts = [*report.notes]
        on_cluster = isinstance(self.notice_watchers, NoticeWatchers)
        if on_cluster and report.version and not report.sources:
            spot = any(p.market_type == "spot" for p in self.pools if p.name == node.pool)
            texts = [DEAF.format(node.pool), *texts] if spot else texts
        for text in texts:
            if text not in self._said:
                self._said.add(text)
                log.warning("notices: %s", text)
