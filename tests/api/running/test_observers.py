"""Who reads a run's journal along, all of them together: none of them waits for another."""

from __future__ import annotations

import threading
import urllib.request
from pathlib import Path

import pytest
from support.observe.small_run import lines
from support.waiting import WITHIN_S, until

from elastic.api.running import observers
from elastic.api.running.observers import Observers
from elastic.config.job import job_of
from elastic.ledger.journal import Journal
from elastic.ledger.run_folder import RunFolder
from elastic.observe.trackers.tracker_link import TrackerLink
from elastic.storage import open_storage


def test_prometheus_has_the_whole_run_while_a_tracker_takes_nothing_of_earlier_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never less of its totals: that is a counter that was reset, and counts twice."""
    release, asked = threading.Event(), list[bool]()

    def put(self: TrackerLink, point: object, live: bool) -> None:
        asked.append(live)
        release.wait(2 * WITHIN_S)

    monkeypatch.setattr(observers, "check_installed", lambda chosen, where: None)
    monkeypatch.setattr(TrackerLink, "_work", lambda self: None)
    monkeypatch.setattr(TrackerLink, "put", put)
    place, said, given = RunFolder.of(open_storage(tmp_path / "r")), list[str](), lines()
    journal = Journal(place.journal, epoch=1)
    for line in given:
        journal.append(line.at_s, line.events, line.decision)
    journal.close()
    keys = {"name": "tiny", "steps": 12, "global_batch": 8, "trackers": ["wandb"]}
    spec = job_of(keys, Path("/jobs/tiny/program.py"))
    both = Observers(place, spec, None, port=0, say=said.append, ray=False)
    monkeypatch.setattr("elastic.observe.trackers.tracking.CLOSE_MOST_S", 0.0)
    totals = set[str]()

    def has_the_run() -> bool:
        with urllib.request.urlopen(said[0].split()[-1], timeout=WITHIN_S) as answer:
            text = answer.read().decode().splitlines()
        totals.update(one for one in text if one.startswith("elastic_steps_total{"))
        return bool(totals)

    try:
        both.start(given[-2:], 2)
        until(lambda: asked and has_the_run(), "numbers of the run")
        assert asked == [False], "the tracker's reading is held up"
        assert [float(one.split()[-1]) for one in totals] == [14]  # two were done again
    finally:
        release.set()
        both.close()
