"""Watchers of many nodes are asked in few rounds. No Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from support.waiting import until

from elastic.cluster.notices import notice_watchers
from elastic.cluster.notices.notice_watchers import NoticeWatchers
from elastic.cluster.notices.sources.watch import NoticeReport


class MadeUpRay:
    """Each node's watcher has one piece of news, when it is asked first; then none."""

    def __init__(self) -> None:
        self.rounds = 0
        self.killed: list[str] = []

    def remote(self, _: Any) -> Any:
        return SimpleNamespace(options=self.options)

    def options(self, scheduling_strategy: Any, **_: Any) -> Any:
        node_id = scheduling_strategy.node_id
        news = SimpleNamespace(remote=lambda seen, wait_s: (node_id, seen))
        return SimpleNamespace(remote=lambda: SimpleNamespace(news=news, node_id=node_id))

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], Any]:
        self.rounds += 1
        there = [ref for ref in refs if ref[1] == 0]
        if not there and timeout:
            threading.Event().wait(0.02)  # sleeps: as ray.wait does
        return there[:num_returns], []

    def get(self, ref: Any) -> NoticeReport:
        return NoticeReport(1)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.node_id)


def test_answers_are_taken_together_and_nodes_are_placed_where_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray, nodes = MadeUpRay(), {f"n{k}": f"{k:056x}" for k in range(300)}
    monkeypatch.setattr(notice_watchers, "kill", ray.kill)
    with patch.object(notice_watchers, "ray", ray):
        watchers = NoticeWatchers()
        try:
            watchers.keep(nodes)
            told: list[str] = []

            def all_told() -> bool:
                told.extend(node_id for node_id, _ in watchers.take())
                return len(told) == len(nodes)

            until(all_told, "all have told", 30.0)
            assert sorted(told) == sorted(nodes) and ray.rounds < 30
            wanted = watchers._wanted
            watchers.keep(dict(nodes))
            assert watchers._wanted is wanted is watchers._placed, "nothing is looked through"
            del nodes["n7"]
            watchers.keep(nodes)
            until(lambda: ray.killed == [f"{7:056x}"], "that of n7 has ended", 30.0)
        finally:
            watchers.close()
