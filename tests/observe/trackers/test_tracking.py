"""Real libraries, offline: a run with a notice, a loss and other drivers is one run there, with each
step once. And libraries that raise, hang and die: said once, and the run goes on."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.observe.read_trackers import WHERE, needed, read_back
from support.observe.small_run import lines
from support.places import ROOT
from support.shadowing_modules import make_modules
from support.waiting import WITHIN_S, until

from elastic.config.job import JobSpec, job_of
from elastic.ledger.journal import Journal, Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.live_numbers import LiveNumbers
from elastic.observe.trackers import tracker_link, tracker_process, tracking
from elastic.observe.trackers.tracker_link import TrackerLink
from elastic.observe.trackers.tracker_points import TrackerPoint
from elastic.observe.trackers.tracker_process import marked, serve
from elastic.observe.trackers.tracker_run import TrackedRun
from elastic.observe.trackers.tracking import Tracking, key_of_run
from elastic.policy.state.fold import changes
from elastic.storage import open_storage
from elastic.types import DriverStarted

FOREVER_S = 30.0  # it would take for ever: far above what a busy machine makes of a moment
RUN = TrackedRun("tiny-1-0000", "tiny-1", "tiny", {}, {"steps": "12"})


def spec(trackers: object) -> JobSpec:
    keys = {"name": "tiny", "steps": 12, "global_batch": 8, "trackers": trackers}
    return job_of(keys, Path("/jobs/tiny/program.py"))


def driver(folder: Path, trackers: object, before: list[Line], new: list[Line]) -> None:
    """Writes these lines as one driver would, while the trackers read along."""
    place, job = RunFolder.of(open_storage(folder)), spec(trackers)
    track = Tracking(place, job, job.trackers.chosen())
    live = LiveNumbers(place, (), (track,))
    journal = Journal(place.journal, epoch=new[0].epoch)
    live.start(before, new[0].epoch)
    for line in new:
        journal.append(line.at_s, line.events, line.decision)
        live.hear(line)
    journal.close()
    live.close()
    track.close()


def attached(given: list[Line], at: int) -> list[Line]:
    """The lines from there on as another driver writes them."""
    start = given[0].events[0][1]
    assert isinstance(start, DriverStarted)
    here = given[at - 1].at_s
    first = Line(here, 2, ((here, replace(start, epoch=2, attached=True)),))
    return [first, *(replace(line, epoch=2) for line in given[at:])]


@pytest.mark.e2e
@pytest.mark.parametrize("library", [pytest.param(name, marks=needed(name)) for name in WHERE])
def test_a_run_of_two_drivers_is_one_run_with_each_step_once(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attaches before the loss by which two steps are done again."""
    store = tmp_path / "store"
    store.mkdir()
    for name, value in WHERE[library](store).items():
        monkeypatch.setenv(name, value)
    given = lines()
    at = next(i for i, line in enumerate(given) if line.at_s > 1008.5)
    later = attached(given, at)
    keys = {library: {"experiment" if library == "mlflow" else "project": "ours"}}
    driver(tmp_path / "run", keys, [], given[:at])
    driver(tmp_path / "run", keys, given[:at], later)
    (told,) = read_back(library, store, "ours").values()
    assert told["train/train_loss"] == [
        (step, pytest.approx(6.0 - 0.1 * step)) for step in range(1, 13)
    ]
    assert [step for step, _ in told["elastic/nodes"]] == list(range(1, 13))
    assert [step for step, _ in told["elastic/transition/pause_s"]] == [1, 5, 9]
    assert told["evaluated/validation_loss"] == [(12, 4.9)]


@pytest.mark.e2e
@pytest.mark.parametrize("library", [pytest.param("mlflow", marks=needed("mlflow"))])
def test_a_tracker_that_is_added_later_has_the_whole_run(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WHERE[library](tmp_path / "store").items():
        monkeypatch.setenv(name, value)
    given = lines()
    driver(tmp_path / "run", [], [], given[:8])
    later = attached(given, 8)
    driver(tmp_path / "run", [library], given[:8], later)
    (told,) = read_back(library, tmp_path / "store", "tiny").values()
    assert [step for step, _ in told["train/train_loss"]] == list(range(1, 13))


def test_the_same_run_has_one_key_and_another_of_its_name_another_one() -> None:
    keys = []
    for given in (lines(), lines()[:5]):
        *_, last = changes(given)
        keys.append(key_of_run(last.after))
    assert keys[0] == keys[1] and keys[0].startswith("tiny-1-")
    shifted = [
        Line(line.at_s + 1, 1, tuple((at_s + 1, e) for at_s, e in line.events), line.decision)
        for line in lines()
    ]
    *_, last = changes(shifted)
    assert key_of_run(last.after) != keys[0]


# ------------------------------------------------------------------------- libraries that are unwell


class Unwell:
    """Raises the first `n` times that it is asked for anything."""

    def __init__(self, n: int, has: int | None = None) -> None:
        self.n, self.has, self.steps, self.outcome = n, has, list[int](), ""

    def _ask(self) -> None:
        self.n -= 1
        if self.n >= 0:
            raise ConnectionError("its server\n is away")

    def open(self, run: TrackedRun) -> int | None:
        self._ask()
        return self.has

    def log(self, points: Any) -> None:
        self._ask()
        self.steps += [point.step for point in points]

    def end(self, outcome: str) -> None:
        self._ask()
        self.outcome = outcome


def words(*steps: int, end: str = "succeeded") -> io.StringIO:
    points = [{"step": step, "at_s": 1.0, "numbers": {"a": 1.0}} for step in steps]
    told = [RUN.plain(), *points, *([{"end": end}] if end else [])]
    return io.StringIO("".join(json.dumps(one) + "\n" for one in told))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "AGAIN_S", 0.01)


def test_what_a_library_raises_is_said_and_tried_again(tmp_path: Path) -> None:
    library, said = Unwell(3), list[dict[str, Any]]()
    serve(library, tmp_path / "mark.json", words(1, 2, 3), say=lambda **one: said.append(one))
    assert library.steps == [1, 2, 3] and library.outcome == "succeeded"
    assert said[0] == {"failed": "ConnectionError: its server is away"}
    assert said[-2:] == [{"told": 3}, {"ended": True}]
    assert marked(tmp_path / "mark.json", RUN.key) == 3
    assert marked(tmp_path / "mark.json", "another") == 0


@pytest.mark.parametrize(("mark", "has"), [(2, None), (0, 2), (1, 2), (2, 0)])
def test_what_it_has_is_not_told_again(tmp_path: Path, mark: int, has: int | None) -> None:
    file, library = tmp_path / "mark.json", Unwell(0, has)
    tracker_process.write_mark(file, RUN.key, mark)
    serve(library, file, words(1, 2, 3, 4, end=""), say=lambda **one: None)
    assert library.steps == [3, 4] and library.outcome == "", "the run may go on"


@pytest.fixture
def link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[TrackerLink]:
    monkeypatch.setattr(tracker_link, "MODULE", "support.observe.unwell_tracker")
    monkeypatch.setattr(tracker_link, "BEGIN_AGAIN_S", 0.1)
    monkeypatch.setattr(tracker_link, "SILENT_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    made = TrackerLink(request.param, RUN, mark=tmp_path / "mark.json", output=tmp_path / "out.log")
    yield made
    made.close(time.monotonic())  # else a test that failed would leave it
    made._thread.join()


@pytest.mark.e2e
@pytest.mark.parametrize("link", ["hangs", "hangs-full", "dies"], indirect=True)
def test_a_tracker_that_hangs_or_dies_holds_nobody_up_and_is_said_once(
    link: TrackerLink, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes nothing, or too little for what is in the pipe, or ends at each start."""
    caplog.set_level(logging.WARNING)
    took_s = 0.0
    for step in range(1, 3001):
        began_s = time.monotonic()
        link.put(TrackerPoint(step, 1.0, {"a" * 80: float(step)}))
        took_s = max(took_s, time.monotonic() - began_s)
        if step % 1000 == 0:
            time.sleep(0.3)  # sleeps: as long as a step takes
    assert took_s < FOREVER_S, "nobody waits for it"
    began_s = time.monotonic()
    link.end("succeeded")
    link.close(time.monotonic() + 1.0)
    assert time.monotonic() - began_s < FOREVER_S
    assert len(caplog.records) == 1 and "training continues" in caplog.text


@pytest.mark.e2e
@pytest.mark.parametrize("link", ["dies-later"], indirect=True)
def test_a_tracker_that_dies_is_started_again_and_told_the_rest(
    link: TrackerLink, tmp_path: Path
) -> None:
    for step in range(1, 21):
        link.put(TrackerPoint(step, 1.0, {"a": 1.0}))
    link.end("succeeded")
    link.close(time.monotonic() + WITHIN_S)
    told = [int(line) for line in (tmp_path / "mark.told").read_text().split()]
    assert told == list(range(1, 21))


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_modules(tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("link", ["well"], indirect=True)
def test_its_process_imports_nothing_from_where_the_user_stands(
    imported: Path, link: TrackerLink, tmp_path: Path
) -> None:
    link.put(TrackerPoint(1, 1.0, {"a": 1.0}))
    link.end("succeeded")
    link.close(time.monotonic() + WITHIN_S)
    assert (tmp_path / "mark.told").read_text() == "1\n", (tmp_path / "out.log").read_text()
    assert not imported.exists()


def test_one_that_does_not_keep_up_has_the_rest_from_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows no step behind those that it has not, also once it answers again: a later driver
    reads them, and sends each once."""
    monkeypatch.setattr(tracker_link, "WAITING_MOST", 5)
    monkeypatch.setattr(TrackerLink, "_work", lambda self: None)
    mark, took = tmp_path / "mark.json", list[int]()

    def driver_of(*steps: int) -> TrackerLink:
        link = TrackerLink("wandb", RUN, mark=mark, output=tmp_path / "out.log")
        link._said = True  # that it does not answer
        for step in steps:
            link.put(TrackerPoint(step, 1.0, {}))
        return link

    def answers(link: TrackerLink) -> None:
        took.extend(one.step for one in link._points)
        link._hear(SimpleNamespace(stdout=[json.dumps({"told": took[-1]})]))  # type: ignore[arg-type]
        tracker_process.write_mark(mark, RUN.key, took[-1])

    link = driver_of(*range(1, 9))
    assert [one.step for one in link._points] == [1, 2, 3, 4, 5]
    answers(link)
    link.put(TrackerPoint(9, 1.0, {}))
    assert link.known == 5 and not link._points
    assert len(caplog.records) == 1 and "steps from 6 on are not sent" in caplog.text
    answers(driver_of(*range(1, 11)))
    assert took == [*range(1, 11)]


def test_a_journal_is_read_no_faster_than_the_library_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens later than all of it could be read, and has every step from this driver."""
    monkeypatch.setattr(tracker_link, "WAITING_MOST", 8)
    monkeypatch.setattr(TrackerLink, "_work", lambda self: None)
    link, took = TrackerLink("wandb", RUN, mark=tmp_path / "m", output=tmp_path / "o"), list[int]()

    def library() -> None:
        time.sleep(0.3)  # sleeps: as long as it opens
        while not took or took[-1] < 53:
            with link._changed:
                assert link._changed.wait_for(lambda: link._points, WITHIN_S)
                took.extend(one.step for one in link._points)
            answer = [json.dumps({"told": took[-1]})]
            link._hear(SimpleNamespace(stdout=answer))  # type: ignore[arg-type]

    thread = threading.Thread(target=library, daemon=True)
    thread.start()
    for step in range(1, 54):
        link.put(TrackerPoint(step, 1.0, {}), live=step > 50)
    assert not caplog.records, "none is refused"
    thread.join(WITHIN_S)
    assert took == [*range(1, 54)]


def test_only_steps_of_earlier_drivers_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_MOST_S", 0.0)
    monkeypatch.setattr(TrackerLink, "_work", lambda self: None)
    put = dict[int, bool]()
    monkeypatch.setattr(
        TrackerLink, "put", lambda self, point, live: put.setdefault(point.step, live)
    )
    given = lines()
    driver(tmp_path / "run", [], [], given[:8])
    driver(tmp_path / "run", ["wandb"], given[:8], attached(given, 8))
    assert [*put] == [*range(1, 13)] and not put[1] and put[12]
    assert [*put.values()] == sorted(put.values())


@pytest.mark.parametrize("ended", [False, True])
def test_a_library_that_takes_nothing_holds_the_reading_up_once(
    ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all where the run ends."""
    monkeypatch.setattr(tracker_link, "WAITING_MOST", 8)
    monkeypatch.setattr(tracker_link, "SILENT_S", 2 * FOREVER_S if ended else 0.2)
    monkeypatch.setattr(TrackerLink, "_work", lambda self: None)
    link = TrackerLink("wandb", RUN, mark=tmp_path / "mark.json", output=tmp_path / "out.log")
    if ended:
        threading.Timer(0.2, link.end, ("stopped",)).start()
    began_s = time.monotonic()
    for step in range(1, 1000):
        link.put(TrackerPoint(step, 1.0, {}), live=False)
    assert 0.15 < time.monotonic() - began_s < FOREVER_S
    assert [one.step for one in link._points] == [1, 2, 3, 4], "the next driver sends the rest"


def test_points_are_sent_in_batches_but_the_first_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrackerLink, "_work", lambda self: None)
    link = TrackerLink("wandb", RUN, mark=tmp_path / "mark.json", output=tmp_path / "out.log")
    link._opened = True

    def sent(*steps: int) -> list[int]:
        for step in steps:
            link.put(TrackerPoint(step, 1.0, {}))
        return [one["step"] for one in link._next() or ()]

    monkeypatch.setattr(tracker_link, "SEND_EVERY_S", 0.1)
    assert sent(1) == [1], "a run that begins is seen there"
    began_s = time.monotonic()
    assert sent(2, 3) == [2, 3] and time.monotonic() - began_s > 0.08
    monkeypatch.setattr(tracker_link, "SEND_EVERY_S", 2 * FOREVER_S)
    assert sent(4) == [4]
    began_s = time.monotonic()
    many = range(5, 5 + tracker_link.SEND_MOST)
    assert sent(*many) == [*many], "an earlier driver's steps are not waited for"
    link.end("succeeded")
    assert sent(1000) == [1000] and link._next() is None
    assert time.monotonic() - began_s < FOREVER_S


def test_all_trackers_are_waited_for_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_MOST_S", 0.2)

    release, returned = threading.Event(), list[bool]()

    def hang(self: TrackerLink) -> None:
        returned.append(release.wait(WITHIN_S))

    monkeypatch.setattr(TrackerLink, "_work", hang)
    driver(tmp_path / "run", ["wandb", "mlflow", "trackio"], [], lines())
    assert not returned
    release.set()
    until(lambda: len(returned) == 3, "the end of their threads")
