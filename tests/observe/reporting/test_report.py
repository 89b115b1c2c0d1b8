"""The report says what the journal says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from support.observe.small_run import lines

from elastic.ledger.journal import Journal, Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.accounting.accounts import account
from elastic.observe.reporting import report
from elastic.observe.run_view import view_of
from elastic.storage import open_storage
from elastic.types import DriverStarted, Event, ModelProfile, StepDone

LINE_KEYS = {
    "run", "steps", "final_loss", "tokens", "wall_s", "tokens_per_s", "goodput", "usd",
    "launch_to_first_step_s", "samples_exact", "transitions",
}  # fmt: skip
TRANSITION_KEYS = {
    "generation", "cause", "at_step", "steps_lost", "pause_s", "phases_s", "from_layout",
    "to_layout", "source", "bytes_moved", "digest_ok", "loss_equal", "probe_s",
}  # fmt: skip


def stored(folder: Path) -> RunFolder:
    journal = Journal(folder / find_runs.JOURNAL, 1)
    for line in lines():
        journal.append(line.at_s, line.events, line.decision)
    journal.close()
    return RunFolder.of(open_storage(folder))


def test_report(tmp_path: Path) -> None:
    run = stored(tmp_path)
    data, shown = report.write(
        run, {"samples_exact": True, "sample": "def f():\n  pass", "launch_to_first_step_s": 7.5}
    )
    assert set(data) >= LINE_KEYS
    assert all(set(transition) == TRANSITION_KEYS for transition in data["transitions"])
    assert (data["steps"], data["validation_loss"], data["samples_exact"]) == (12, 4.9, True)
    assert [(t["cause"], t["at_step"], t["steps_lost"],
        t["source"]) for t in data["transitions"]] == [
        ("start", 0, 0, "fresh"), ("notice", 4, 0, "live"), ("loss", 6, 2, "peer"),
    ]  # fmt: skip
    text = "\n".join(shown)
    assert "12, 12,288 tokens" in text
    assert "train_loss  4.8000   validation 4.9000" in text
    assert "every step trained on exactly its own samples" in text
    assert "wasted_progress" in text
    assert "  def f():\n    pass" in text
    words = f"{tmp_path.name} --storage {tmp_path.parent} --to FOLDER"
    assert shown[-1] == f"model: elastic checkpoint export {words}"
    assert (tmp_path / "loss.png").is_file()
    written = json.loads((tmp_path / "report.json").read_text())
    assert {k: v for k, v in written.items() if k != "ledger"} == json.loads(json.dumps(data))


def test_what_was_filled_up_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path / find_runs.JOURNAL, 1)
    for line in lines():
        events = [
            replace(e, pad_share=0.1 + 0.1 * (e.step % 2), imbalance=1.25)
            if isinstance(e, StepDone)
            else e
            for _, e in line.events
        ]
        journal.append(
            line.at_s,
            [(at_s, e) for (at_s, _), e in zip(line.events, events, strict=True)],
            line.decision,
        )
    journal.close()
    data, shown = report.write(RunFolder.of(open_storage(tmp_path)), {})
    assert (data["pad_share"], data["token_imbalance"]) == (0.15, 1.25)
    text = "\n".join(shown)
    assert (
        "15.0 % of the places of the micro-batches held no token" in text
        and "25 % more tokens per sample" in text
    )
    (tmp_path / "plain").mkdir()
    assert report.write(stored(tmp_path / "plain"), {})[0]["pad_share"] is None


def test_a_report_that_is_written_again_keeps_what_only_the_driver_knew(tmp_path: Path) -> None:
    run = stored(tmp_path)
    report.write(
        run,
        {
            "samples_exact": True,
            "sample": "words",
            "launch_to_first_step_s": 7.5,
            "run": "not this",
        },
    )
    data, shown = report.write(run)
    assert (data["samples_exact"], data["sample"], data["launch_to_first_step_s"], data["run"]) == (
        True,
        "words",
        7.5,
        "tiny-1",
    )
    assert "  words" in shown


def test_categories_sum_to_the_paid_time() -> None:
    plain = report.ledger(lines())[0]
    paid = sum(category["gpu_seconds"] for category in plain["categories"].values())
    assert abs(paid - plain["totals"]["gpu_seconds"]) < 1e-9
    assert any(
        line.startswith(("waiting_for_capacity", "productive"))
        for line in report.ledger(lines())[1]
    )


def priced(event: Event) -> Event:
    if not isinstance(event, DriverStarted):
        return event
    return replace(event, pools=tuple(replace(p, usd_per_node_h=360.0) for p in event.pools))


def test_where_no_pool_has_a_price_no_dollars_are_told(tmp_path: Path) -> None:
    shown = report.write(stored(tmp_path), {})[1]
    assert any(line.endswith("were productive; its pools have no price") for line in shown)
    cells = [row.split()[-1] for row in report.spent(account(lines()))[1:]]
    assert cells and set(cells) == {"-"}
    paid = [
        replace(line, events=tuple((at_s, priced(event)) for at_s, event in line.events))
        for line in lines()
    ]
    usd = account(paid).usd
    assert report.spent(account(paid))[-1].split()[-1] == f"{sum(usd.values()):.4f}" != "0.0000"


def test_runs_are_found_by_name_folder_and_storage(tmp_path: Path, monkeypatch) -> None:
    stored(tmp_path / "elastic_runs" / "one")
    monkeypatch.chdir(tmp_path)
    assert (
        find_runs.open_run("one").uri
        == find_runs.open_run(str(tmp_path / "elastic_runs" / "one")).uri
    )
    assert [name for name, _ in find_runs.all_runs()] == ["one"]
    monkeypatch.setenv("ELASTIC_STORAGE", str(tmp_path / "elsewhere"))
    assert find_runs.all_runs() == []
    assert find_runs.open_run("one", str(tmp_path / "elastic_runs")).name == "one"


def test_orders_lie_in_the_inbox_in_their_order(tmp_path: Path) -> None:
    run = stored(tmp_path)
    for n in range(5):
        find_runs.order(run.storage, {"stop": str(n)})
    assert [json.loads(run.storage.get(key))["stop"] for key in run.storage.list("inbox/")] == [
        "0",
        "1",
        "2",
        "3",
        "4",
    ]


def test_a_drill_that_never_came_is_named_at_the_end_alone() -> None:
    drill = [{"at_step": 3, "kill": "any"}, {"at_step": 90, "notice": "any"}]
    found = [
        replace(
            line,
            events=tuple(
                (at_s, replace(e, job={**e.job, "drill": drill}))
                if isinstance(e, DriverStarted)
                else (at_s, e)
                for at_s, e in line.events
            ),
        )
        for line in lines()
    ]
    view, books = view_of(found), account(found)
    said = report.text(view, books, report.summary(view, books))
    (row,) = [line for line in said if line.startswith("drill")]
    assert row.split(maxsplit=1)[1] == (
        "never carried out: notice any (at step 90); the last step was 12"
    )
    view.state = replace(view.state, phase="running")
    assert report.summary(view, books)["drill_left"] == []


def test_a_script_that_told_no_steps_is_not_said_to_have_done_none() -> None:
    job = {"restarted": True, "script": "t.py"}
    found = [Line(0.0, 1, ((0.0, DriverStarted("r", 1, job, (), ModelProfile(0, 0, ()))),))]
    view, books = view_of(found), account(found)
    said = "\n".join(report.text(view, books, report.summary(view, books)))
    assert f"not known, in 0.0 s: {report.NO_STEPS}" in said


def test_of_a_run_that_is_going_on_the_table_is_left_to_its_driver(tmp_path: Path) -> None:
    run = RunFolder.of(open_storage(tmp_path / "tiny-1"))
    for n, there in ((8, False), (None, True)):
        run.journal.unlink(missing_ok=True)
        run.folder.mkdir(exist_ok=True)
        journal = Journal(run.journal, 1)
        for line in lines()[:n]:
            journal.append(line.at_s, line.events, line.decision)
        journal.close()
        report.write(run)
        assert (run.folder / "metrics.csv").is_file() == there
