"""What a page is told of a run is what `status`, `why` and `ledger` say of it, at every moment."""

from __future__ import annotations

import gc
import gzip
import json
import time
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from support.observe import small_run
from support.observe.long_run import LongRun
from support.observe.odd_runs import two_drivers, two_phases
from support.sim.scenario import MODEL, scenario

from elastic.driver import drive
from elastic.errors import SpecError
from elastic.ledger import lease
from elastic.ledger.journal import Line, MemoryJournal, write_line
from elastic.ledger.lease import HolderWatch, Sign
from elastic.ledger.run_folder import RunFolder
from elastic.observe import run_tables
from elastic.observe.accounting.accounts import account
from elastic.observe.dashboard import run_shelf
from elastic.observe.dashboard.drawn_cluster import cluster
from elastic.observe.dashboard.finish_forecast import forecast
from elastic.observe.dashboard.followed_run import FollowedRun, PageSources
from elastic.observe.dashboard.run_shelf import RunShelf, compact, id_of
from elastic.observe.dashboard.run_summary import snapshot
from elastic.observe.dashboard.step_curve import StepCurve, Stretch, _plain
from elastic.observe.diagnosis.axis_rows import AxisRow
from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.reporting.report import worth
from elastic.observe.reporting.run_seen import seen_of
from elastic.observe.run_view import View, view_of
from elastic.policy.state.fold import changes
from elastic.sim.sim_backend import SimBackend
from elastic.storage import LocalStorage
from elastic.types import (
    AXES,
    DriverStarted,
    Job,
    Layout,
    NodeLoadSeen,
    NodeLost,
    Plan,
    PlanEntered,
    StepDone,
    WorkerId,
)
from elastic.types.grid import coordinates


def followed(folder: Path, lines: list[Line], **more: object) -> FollowedRun:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_text("".join(write_line(one) + "\n" for one in lines))
    return FollowedRun(RunFolder(LocalStorage(folder), folder), PageSources(**more))  # type: ignore[arg-type]


def curve_of(lines: list[Line]) -> StepCurve:
    curve = StepCurve()
    for change in changes(lines):
        curve.take(change)
    return curve


@pytest.mark.parametrize("seed", range(12))
def test_the_curve_holds_the_steps_that_count(seed: int) -> None:
    job, pools, faults, delays = scenario(seed)
    journal = MemoryJournal()
    start = DriverStarted("random", 1, job, pools, MODEL)
    drive(SimBackend(pools, Job.from_plain(job), faults, delays=delays), journal, start)
    kept, curve = view_of(journal.lines).curve(), curve_of(journal.lines)
    assert list(curve.steps) == [point.step for point in kept]
    assert list(curve.columns["train_loss"]) == [point.train_loss for point in kept]


def test_a_generation_whose_entering_no_line_tells_of_takes_the_place_of_its_steps() -> None:
    lines = [
        one
        for one in small_run.lines()
        if not any(
            isinstance(event, PlanEntered) and event.generation == 3 for _, event in one.events
        )
    ]
    kept, curve = view_of(lines).curve(), curve_of(lines)
    assert list(curve.steps) == [point.step for point in kept] == list(range(1, 13))
    assert list(curve.columns["at_s"]) == [point.at_s for point in kept]


def test_buckets_keep_the_least_and_the_greatest_value() -> None:
    lines = list(LongRun(2, 3000, 3).lines())
    curve = curve_of(lines)
    losses = list(curve.columns["train_loss"])
    found = curve.charted(Stretch("step", buckets=100), small_run.T0)
    loss = found["train_loss"]
    assert 90 <= len(found["x"]) == len(loss["mid"]) == len(loss["max"]) <= 100
    assert max(loss["max"]) == pytest.approx(max(losses), rel=1e-5)
    assert min(loss["min"]) == pytest.approx(min(losses), rel=1e-5)
    assert all(a <= b <= c for a, b, c in zip(loss["min"], loss["mid"], loss["max"], strict=True))
    few = curve.charted(Stretch("step", 1000, 1050, 100), small_run.T0)
    assert few["x"] == list(range(999, 1052)) and "min" not in few["train_loss"]
    assert len(compact(found)) < 15_000


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    lines = small_run.lines()[:4]
    lines.append(small_run.tick(5, StepDone(1, 1, float("nan"), 10, 0.5)))
    run = followed(tmp_path, lines)
    run.look()
    assert run.series(Stretch())["train_loss"]["mid"] == [None]
    assert json.loads(compact(snapshot(run)))["train_loss"] is None


def test_line_by_line_it_says_what_the_ledger_says(tmp_path: Path) -> None:
    lines = small_run.lines()
    for n in range(1, len(lines) + 1):
        run = followed(tmp_path / str(n), lines[:n])
        assert run.look() and not run.trouble
        found = snapshot(run)
        view, books = view_of(lines[:n]), account(lines[:n])
        assert found["step"] == view.step and found["phase"] in (view.phase, "interrupted")
        totals = found["account"]["totals"]
        assert totals["usd"] == pytest.approx(books.totals.usd)
        for one in found["account"]["categories"]:
            assert one["gpu_seconds"] == pytest.approx(books.gpu_seconds[one["name"]], abs=1e-3)
        # and asking changes nothing
        assert snapshot(run) == found


def test_it_follows_what_is_added_and_says_so(tmp_path: Path) -> None:
    lines = small_run.lines()
    run = followed(tmp_path, lines[:6], holder=lambda storage: lambda: "process 1 on here")
    assert run.look() and not run.look()
    version = run.version
    assert snapshot(run)["phase"] == "running"
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write("".join(write_line(one) + "\n" for one in lines[6:])[:-9])
    assert run.look() and run.version > version
    assert not run.view.ended  # the last line is cut
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write(write_line(lines[-1])[-8:] + "\n")
    assert run.look()
    found = snapshot(run)
    assert found["phase"] == "succeeded" and found["ended"]
    whole = view_of(lines)
    assert [one["text"] for one in run.notes()["rows"]] == [n.text for n in reversed(whole.notes)]


@pytest.mark.parametrize("off_s", [-60.0, 0.0, 1800.0])
def test_a_driver_on_another_machine_lives_while_its_signs_change(
    off_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock of that machine says; what counts is this one's own."""
    now_s = [1000.0]
    monkeypatch.setattr(lease, "_awake_or_not_s", lambda: now_s[0])
    run, phases = followed(tmp_path, small_run.lines()[:8], holder=HolderWatch), list[str]()

    def gives(n: int, epoch: int = 1, **more: object) -> None:
        at_s = time.time() + off_s
        sign = Sign(epoch, n, "elsewhere", "other-boot", 7, 1, at_s, at_s, 15.0, **more)  # type: ignore[arg-type]
        run.run.storage.put(sign.key, json.dumps(asdict(sign)).encode())

    def looks(after_s: float) -> str:
        now_s[0] += after_s
        run.look()
        return str(snapshot(run)["phase"])

    gives(1)
    looks(0.0)
    for n in range(2, 9):
        gives(n)
        phases.append(looks(5.0))
    assert set(phases) == {"running"} and run.holder == "process 7 on elsewhere"
    assert [looks(5.0) for _ in range(4)] == ["running"] * 3 + ["interrupted"]
    gives(0, epoch=2)
    assert looks(5.0) == "running", "the next driver"
    gives(1, epoch=2, released=True)
    assert looks(1.0) == "interrupted"


def test_a_driver_that_is_gone_and_comes_back(tmp_path: Path) -> None:
    lines = small_run.lines()
    drivers = ["process 1 on here", "", "process 2 on here"]
    run = followed(tmp_path, lines[:8], holder=lambda storage: lambda: drivers[0])
    run.look()
    assert snapshot(run)["phase"] == "running"
    del drivers[0]
    version = run.version
    assert run.look() and run.version > version  # although no line was added
    assert snapshot(run)["phase"] == "interrupted"
    del drivers[0]
    assert run.look()
    assert snapshot(run)["phase"] == "running"


def test_a_journal_that_is_another_one_is_read_anew(tmp_path: Path) -> None:
    lines = small_run.lines()
    run = followed(tmp_path, lines)
    run.look()
    followed(tmp_path, lines[:5])
    assert run.look()
    assert run.view.step == view_of(lines[:5]).step and len(run.curve) == 1


def test_what_cannot_be_read_is_told_and_read_when_it_can(tmp_path: Path) -> None:
    run = followed(tmp_path, small_run.lines()[:5])
    run.look()
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"v": 9, "at_s": 1}\n')
    assert run.look()
    assert "schema version 9 is newer" in snapshot(run)["trouble"]
    followed(tmp_path, small_run.lines())
    assert run.look()
    found = snapshot(run)
    assert not found["trouble"] and found["phase"] == "succeeded"


def test_search_finds_all_words_in_any_case(tmp_path: Path) -> None:
    run = followed(tmp_path, small_run.lines())
    run.look()
    found = run.notes("LOST a")
    assert found["rows"] and all("lost" in one["text"] for one in found["rows"])
    assert run.notes("nothing of the kind")["rows"] == []
    decisions = run.notes(kind="Decision")["rows"]
    assert {one["kind"] for one in decisions} == {"Decision"}
    older = run.notes(kind="Decision", before=decisions[0]["n"])["rows"]
    assert older == decisions[1:]
    assert run.notes()["kinds"]["Decision"] == len(decisions)


LAYOUTS = [Layout(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=2), Layout(dp_shard=4), Layout()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_coordinates_are_those_of_the_grid(layout: Layout) -> None:
    n = layout.world_size
    ranks = tuple(WorkerId(f"n{k // 8}", k % 8) for k in range(n))
    view = View()
    plan = Plan(1, layout, ranks, (8,) * layout.dp, (3,) * layout.pp, copies_to=((0,),) * n)
    view.state = replace(view.state, plan=plan)
    drawn = cluster(view)["plan"]
    for rank in range(n):
        at = coordinates(layout, rank)
        for axis in AXES:
            if getattr(layout, axis) > 1:
                assert drawn["coordinates"][axis][rank] == getattr(at, axis)
    assert len(drawn["stages"]) == layout.pp and drawn["copies_to"] == [[0]] * n


def test_the_cluster_says_who_holds_what(tmp_path: Path) -> None:
    lines = list(LongRun(4, 40, 4).lines())
    run = followed(tmp_path, lines[:10])
    run.look()
    found = snapshot(run)["cluster"]
    assert [one["status"] for one in found["nodes"]] == ["prepared"] * 4
    assert sorted(rank for one in found["nodes"] for rank in one["ranks"]) == list(range(32))
    assert found["plan"]["copies_to"][0] == [8]  # on the next node
    assert found["plan"]["axes"] == {"pp": 4, "tp": 8}


def test_each_node_shows_the_load_that_it_told_last(tmp_path: Path) -> None:
    lines = small_run.lines()[:5]
    gb = 10**9
    lines += [
        small_run.tick(5, NodeLoadSeen("a", 0.9, 1 * gb, 8 * gb, 10)),
        small_run.tick(6, NodeLoadSeen("b", 0.5, 7 * gb, 8 * gb, 10)),
        small_run.tick(
            7, NodeLoadSeen("a", 0.25, 6 * gb, 8 * gb, 10), NodeLoadSeen(
                "c", 0.11111, 4 * gb, 8 * gb, 20, 2, 0.9, 60 * gb, 80 * gb, 700.0)),
        small_run.tick(9.2, NodeLost("b", "it is gone")),
    ]  # fmt: skip
    assert cluster(view_of(lines[:5]))["load"] == {}, "nothing is told yet"
    found = cluster(view_of(lines))
    loads = {node["id"]: node["load"] for node in found["nodes"]}
    assert loads["a"] == {
        "cpu": 0.25,
        "memory": 2 * gb,
        "memory_of": 8 * gb,
        "worker": 10,
        "ago_s": 2,
    }
    assert loads["b"] is None, "it is lost"
    assert (loads["c"]["cpu"], loads["c"]["gpu"], loads["c"]["gpus"]) == (0.111, 0.9, 2)
    assert (loads["c"]["gpu_memory"], loads["c"]["gpu_celsius"]) == (60 * gb, None)
    assert found["load"]["cpu_share"] == 0.181 and found["load"]["memory_share_most"] == 0.5
    assert found["load"]["gpu_power_w_sum"] == 700
    later = [
        *lines,
        small_run.tick(20, DriverStarted("tiny-1", 2, small_run.JOB, small_run.POOLS, MODEL)),
    ]
    assert cluster(view_of(later))["load"] == {}, "its nodes ended with the driver before"


def test_a_forecast_holds_the_end_between_its_bounds() -> None:
    lines = list(LongRun(4, 2000, 10).lines())
    whole = curve_of(lines)
    half = [one for one in lines if one.at_s <= lines[len(lines) // 2].at_s]
    curve = curve_of(half)
    state = view_of(half).state
    found = forecast(curve, state)
    assert found is not None and state.step == curve.steps[-1]
    truth_s = whole.columns["at_s"][-1] - curve.columns["at_s"][-1]
    assert found.rest_s.low < truth_s < found.rest_s.high
    assert found.rest_s.low <= found.rest_s.mid <= found.rest_s.high
    assert found.usd.low < whole.columns["usd"][-1] < found.usd.high
    assert forecast(whole, view_of(lines).state) is None and forecast(StepCurve(), state) is None
    script = replace(state, job=replace(state.job, restarted=True))
    assert forecast(curve, script) is None


def test_hours_in_which_nothing_ran_are_no_pace() -> None:
    for gap_s in (0.0, 12 * 3600.0):
        lines = two_drivers(gap_s)
        found = forecast(curve_of(lines), view_of(lines).state)
        assert found is not None and 370 * 0.5 <= found.rest_s.mid < 370, gap_s
        assert found.rest_s.high < 3600


def test_a_driver_that_attaches_has_trained_meanwhile() -> None:
    """What the ledger books as time without anything is left out, and no more."""
    lines = small_run.lines()[:8]
    for attached, left_s in ((True, 100.0), (False, 0.0)):
        again = DriverStarted("tiny-1", 2, small_run.JOB, small_run.POOLS, MODEL, attached=attached)
        curve = curve_of([*lines, small_run.tick(106.0, again), small_run.tick(106.0)])
        not_running_s = account([*lines, small_run.tick(106.0, again)]).seconds["not_running"]
        assert curve._run_s == pytest.approx(6.0 + left_s) == pytest.approx(106.0 - not_running_s)


def test_a_step_of_another_phase_counts_as_it_asks() -> None:
    """Forty steps of ten seconds are left."""
    lines = two_phases()
    found = forecast(curve_of(lines), view_of(lines).state)
    assert found is not None and found.rest_s.mid == pytest.approx(400.0)
    assert found.n_steps == 29


def test_nobody_drives_it_so_nothing_is_paid_by_the_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where workers of a cluster may wait for the next driver still."""
    for holder, usd_per_h in (("process 1 on here", 108.0), ("", 0.0)):
        run = followed(
            tmp_path / f"h{holder}", two_drivers(60.0), holder=lambda _, h=holder: lambda: h
        )
        run.look()
        found = snapshot(run)
        assert found["usd_per_h"] == usd_per_h
        assert not [one for one in found["advice"] if one["what"] == "nodes"]
    monkeypatch.setattr(run_tables.time, "time", lambda: small_run.T0 + 600.0)
    (told,) = [one for one in snapshot(run)["advice"] if one["what"] == "nodes"]
    assert told["found"].startswith("nobody drives the run: they may be paid until ")


def test_saved_and_verdicts_are_those_of_the_report(tmp_path: Path) -> None:
    lines = list(LongRun(3, 400, 6).lines())
    run = followed(tmp_path, lines)
    run.look()
    found, seen = snapshot(run), seen_of(lines)
    worth_it = worth(seen, verdicts(seen.evidence))
    assert found["saved"]["usd"] == pytest.approx(worth_it["on_demand"]["saved_usd"])
    said = [one["what"] for one in found["advice"]]
    bounds = [one["bound"] for one in worth_it["verdicts"]]
    assert bounds and said[-len(bounds) :] == bounds


def test_communication_is_that_of_the_cost_model(tmp_path: Path) -> None:
    lines = list(LongRun(4, 40, 4).lines())
    run = followed(tmp_path, lines[:10], parts=lambda seen, plan: {"tp": 0.25, "pp": 0.0})
    run.look()
    found = snapshot(run)["communication"]
    assert found["parts"] == {"tp": 0.25} and not found["traced"]
    told = followed(tmp_path, lines[:10], traced=lambda seen, plan, storage: {"tp": 0.5})
    told.look()
    found = snapshot(told)["communication"]
    assert found["parts"] == {"tp": 0.5} and found["traced"]  # what was measured counts first
    assert found["expected_step_s"] == pytest.approx(4.08) and found["data_s"] == 0.02
    assert found["axes"] == []
    axes = followed(tmp_path, lines[:10], axes=lambda seen, plan, run: (AxisRow("tp", 2e6, 0.1),))
    axes.look()
    found = snapshot(axes)["communication"]
    done = sum(isinstance(e, StepDone) for line in lines[:10] for _, e in line.events)
    assert (found["axes"], found["n_steps"]) == ([AxisRow("tp", 2e6, 0.1).plain()], done)


def test_advice_names_a_budget_that_will_not_do(tmp_path: Path) -> None:
    lines = list(LongRun(4, 400, 2).lines())
    start = lines[0].events[0][1]
    assert isinstance(start, DriverStarted)
    start.job["budget_usd"] = 1.0
    run = followed(tmp_path, lines[:200])
    run.look()
    (found,) = [one for one in snapshot(run)["advice"] if one["what"] == "budget"]
    assert found["verdict"] == "bad" and "1.00 may be spent" in found["found"]


@pytest.mark.slow
def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = followed(tmp_path, list(LongRun(64, 1200, 12).lines()))
    run.look()
    assert len(compact(snapshot(run))) < 80_000  # 512 ranks
    assert len(compact(run.series(Stretch(buckets=700)))) < 120_000
    assert len(run.view.points) <= 20 and len(run.view.planned) <= 16


@pytest.mark.whole  # bench/page.py measures it, too
def test_what_it_keeps_does_not_grow_with_the_generations(tmp_path: Path) -> None:
    """A plan names each rank several times: those of all generations of thousands of ranks were
    hundreds of megabytes."""

    def kept(n_changes: int) -> int:
        run = followed(tmp_path / str(n_changes), list(LongRun(32, 400, n_changes).lines()))
        tracemalloc.start()
        try:
            run.look()
            assert len(run.generations.rows) > n_changes
            gc.collect()  # what is left in circles is not kept
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    few, many = kept(50), kept(90)
    assert many - few < 40 * 10_000, f"{few} and {many} bytes"


def test_nothing_to_show_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="its journal is empty"):
        followed(tmp_path, []).check()
    (tmp_path / "journal.jsonl").write_text('{"v": 9, "at_s": 1}\n')
    with pytest.raises(SpecError, match="schema version 9 is newer"):
        followed_as_is(tmp_path).check()
    followed(tmp_path, small_run.lines()).check()


def followed_as_is(folder: Path) -> FollowedRun:
    return FollowedRun(RunFolder(LocalStorage(folder), folder))


def test_a_folder_of_runs_reads_the_newest_and_others_when_asked(tmp_path: Path) -> None:
    for name in ("one", "two"):
        followed(tmp_path / name, small_run.lines())
    shelf = RunShelf((), PageSources(), str(tmp_path))
    assert {one["name"] for one in shelf.listed()} == {"one", "two"} and len(shelf.runs) == 1
    other = next(one for one in shelf.listed() if one["id"] not in shelf.versions)
    assert shelf.followed(other["id"]).name == other["name"]
    assert shelf.look() and all(one["read"] for one in shelf.listed())
    with pytest.raises(KeyError):
        shelf.followed("no such run")
    assert id_of(shelf.runs[0].run) in shelf.versions


def test_numbers_of_a_chart_are_as_short_as_it_shows_them() -> None:
    made = [sign * 10**power * 1.23456789 for sign in (1, -1) for power in range(-14, 15)]
    values = np.array([*made, 0.0, 0.1 + 0.2, 1e22, np.nan, np.inf])
    assert _plain(values)[:-2] == [float(f"{value:.6g}") for value in values[:-2]]
    assert _plain(values)[-2:] == [None, None]


def test_an_answer_is_made_anew_when_there_is_time_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = small_run.lines()
    place = followed(tmp_path, lines[:6]).run
    shelf = RunShelf((place,), PageSources())
    shelf.look()
    (key,), asked = shelf.versions, Stretch()
    told = [shelf.answer(key), shelf.answer(key, asked)]
    assert told[0] != told[1] and shelf.answer(key, Stretch("step")) != told[1]
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write("".join(write_line(one) + "\n" for one in lines[6:]))
    assert shelf.followed(key).look()
    monkeypatch.setattr(run_shelf.time, "monotonic", lambda: 0.0)
    assert [shelf.answer(key), shelf.answer(key, asked)] == told
    monkeypatch.setattr(run_shelf.time, "monotonic", lambda: 1e9)
    found = json.loads(gzip.decompress(shelf.answer(key, asked)))
    assert found["version"] == shelf.versions[key] > json.loads(gzip.decompress(told[1]))["version"]
    assert json.loads(gzip.decompress(shelf.answer(key)))["step"] == 12
