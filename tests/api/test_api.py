"""What is checked before a run starts and counted when it has ended; no cluster."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.api.tiny_job import MODEL, START, prepared, steps
from support.places import PROGRAMS, ROOT

import elastic
from elastic import api, version
from elastic.api import Options
from elastic.api.checkpoint_actions import checkpoints, export
from elastic.api.running import run as running
from elastic.api.running import sample_check
from elastic.api.running.program_file import job_given
from elastic.api.running.restarted_script import FILLED, _ScriptRun
from elastic.cli.command_line import main
from elastic.cluster.nodes.demand import LEAVE_MOST_S
from elastic.config.job import job_data, job_of
from elastic.config.pool_checks import check_budget
from elastic.driver import LINE_EVERY_S, restored
from elastic.errors import JournalDamaged, ProgramError, SpecError, StateLost
from elastic.ledger.journal import Journal, Line, built, plain, read
from elastic.ledger.lease import Lease
from elastic.ledger.run_folder import JOURNAL, JournalCut, RunFolder
from elastic.ledger.segments import StoredJournal
from elastic.observe import find_runs
from elastic.observe.run_view import view_of
from elastic.policy.state.fold import State, fold
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import (
    Copy,
    CopyStored,
    Decision,
    DriverStarted,
    Evaluated,
    Layout,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    Pool,
    Stop,
    TensorSpec,
    WorkerFailed,
    WorkerId,
)
from elastic.worker.checkpoint import checkpoint_verbs
from elastic.worker.checkpoint.checkpoint_format import Marker, encode_marker
from elastic.worker.hosting import resume_checks


def test_names_and_places(folder: Path) -> None:
    one = prepared(folder, run_name="mine")
    assert one.storage.root == folder.parent / "elastic_runs" / "mine"
    assert prepared(folder).name.startswith("tiny-20")
    with pytest.raises(SpecError, match="run name 'a/b'"):
        prepared(folder, run_name="a/b")


def test_the_ray_address_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(folder).address is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert prepared(folder).address == "10.0.0.1:6379"
    assert prepared(folder, local=True).address is None


def test_the_backend_knows_whether_anybody_has_said_what_the_nodes_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.cluster.backend.ray_backend.RayBackend", lambda run, *_, **__: run)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    def default() -> bool:
        lease: Any = None
        run: Any = prepared(folder)._backend(START, None, None, lease=lease)
        return bool(run.default_pools)

    assert default()
    (folder / "job.yaml").write_text("steps: 4\nglobal_batch: 8\npools: [{name: a}]\n")
    assert not default()


def test_the_backend_knows_how_long_the_datasets_were_unless_they_may_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.cluster.backend.ray_backend.RayBackend", lambda run, *_, **__: run)
    event = NodePrepared("a", n_samples=1000)
    nodes = {"a": Node("a", "spot")}
    state = fold(replace(fold(State(), START, 0.0), nodes=nodes), event, 1.0)
    again = fold(replace(state, step=5), replace(START, epoch=2), 2.0)

    def told(before: State | None, **options: Any) -> tuple[Any, bool]:
        lease: Any = None
        run: Any = prepared(folder, **options)._backend(START, before, None, lease=lease)
        return run.lengths, run.may_change

    assert told(None) == ((), False)
    assert told(state) == told(again) == ((1000,), False)
    assert told(state, allow_changed=True) == ((1000,), True)
    failed = replace(state, phase="failed")
    assert told(failed) == ((1000,), True) and told(replace(failed, step=5)) == ((1000,), False)


def test_the_backend_knows_since_when_a_person_means_the_run_to_train(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.cluster.backend.ray_backend.RayBackend", lambda run, *_, **__: run)
    lease: Any = None
    for again in (False, True):
        one = prepared(folder, supervised=True, started_again=again)
        told: Any = one._backend(START, None, None, lease=lease)
        assert told.begun_at_s == (None if again else one.launched_at_s)


def test_workers_import_from_a_checkout_and_not_from_the_packages_of_the_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these, torch would be the driver's too, wherever that path exists."""

    def paths() -> tuple[str, ...]:
        lease: Any = None
        run: Any = prepared(folder)._backend(START, None, None, lease=lease)
        return tuple(run.python_path)

    monkeypatch.setattr("elastic.cluster.backend.ray_backend.RayBackend", lambda run, *_, **__: run)
    assert paths() == (str(folder), str(ROOT))
    for name in ("site-packages", "dist-packages"):
        monkeypatch.setattr(version, "PACKAGE", Path("/nfs/venv/lib/python3.11", name, "elastic"))
        assert paths() == (str(folder), "")


def test_a_submitted_job_keeps_its_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert (
        prepared(folder, run_name="mine").storage.root
        == tmp_path / "home" / "elastic_runs" / "mine"
    )
    assert prepared(folder).address == "auto"
    mine = RunFolder.of(open_storage("~/elastic_runs/mine"))
    mine.storage.put(JOURNAL, b"")
    assert find_runs.storage_uri(None) == mine.storage.uri.removesuffix("/mine")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")  # a shell on the head
    assert find_runs.open_run("mine").uri == mine.uri
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("ELASTIC_STORAGE", str(tmp_path / "shared"))
    assert prepared(folder, run_name="mine").storage.root == tmp_path / "shared" / "mine"


def test_a_short_name_is_that_of_a_run_here_before_one_of_a_submitted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`elastic stop gpt` stops no other run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    submitted, here = (
        RunFolder.of(open_storage(place))
        for place in ("~/elastic_runs/gpt", "elastic_runs/gpt-20261201-101010")
    )
    submitted.storage.put(JOURNAL, b"")
    assert find_runs.open_run("gpt").uri == submitted.uri
    here.storage.put(JOURNAL, b"")
    assert find_runs.open_run("gpt").uri == here.uri
    assert find_runs.open_run("gpt", exact=True).uri == submitted.uri
    monkeypatch.setenv("ELASTIC_STORAGE", str(tmp_path / "shared"))
    with pytest.raises(SpecError, match="no run 'gpt' here or in .*shared"):
        find_runs.open_run("gpt")


def test_a_cluster_is_drilled_only_when_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.yaml").write_text(
        "steps: 4\nglobal_batch: 8\ndrill: [{at_step: 1, kill: any}]\n"
    )
    (tmp_path / "drill.yaml").write_text("[{at_step: 2, hang: any}]")
    asked = str(tmp_path / "drill.yaml")
    assert [entry.kill for entry in prepared(folder).spec.drill] == ["any"]
    assert [entry.hang for entry in prepared(folder, drill=asked).spec.drill] == ["any"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert prepared(folder).spec.drill == []
    assert [entry.hang for entry in prepared(folder, drill=asked).spec.drill] == ["any"]


def test_a_program_is_found_by_its_file(folder: Path) -> None:
    program = load_program(folder / "program.py")
    job = job_given(program, {"steps": 2, "global_batch": 4}, api.Options())
    assert (job.program, job.steps) == (str(folder / "program.py"), 2)
    job = job_given(program, folder, api.Options(overrides=("steps=9",)))
    assert (job.program, job.steps) == (str(folder / "program.py"), 9)
    with pytest.raises(SpecError, match="give job="):
        job_given(program, None, api.Options())
    with pytest.raises(SpecError, match="a job folder has its own job.yaml"):
        job_given(folder, {"steps": 2}, api.Options())
    nowhere = Program(eval("lambda: None"), program.optimizer, program.dataset, program.loss)
    with pytest.raises(SpecError, match="in a file"):
        elastic.run(nowhere, {"steps": 2, "global_batch": 4})


def test_a_run_that_is_done_is_not_run_again(folder: Path) -> None:
    one = prepared(folder, run_name="done")
    journal = Journal(one.journal_path, 1)
    journal.append(0.0, [(0.0, START)], None)
    journal.close()
    assert len(one._before()[0]) == 1
    journal = Journal(one.journal_path, 2)
    stored = Copy(20, "durable", 1, Layout(), uri=str(folder))
    journal.append(8.0, [(8.0, CopyStored(stored))], None)
    journal.append(9.0, [], Decision((Stop("succeeded", "done"),), "done"))
    journal.close()
    one.spec = one.spec.model_copy(update={"steps": 20})
    with pytest.raises(
        SpecError,
        match=r"run 'done' is done \(20 steps\); --set steps=N with more of them lets it continue",
    ):
        one._before()
    one.spec = one.spec.model_copy(update={"steps": 21})
    assert len(one._before()[0]) == 3


def test_a_marker_that_cannot_be_read_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.yaml").write_text(
        f"steps: 4\nglobal_batch: 8\nprogram: {PROGRAMS / 'tiny.py'}\n"
    )
    one = prepared(folder, run_name="marked")
    for step in (2, 3, 4):
        marker = encode_marker(Marker(step, 1, 1, 1, {}, ()))
        one.storage.put(
            f"checkpoints/step-{step:08d}.g0001/commit.json", marker[: -9 if step == 4 else None]
        )
    folds: list[int] = []
    monkeypatch.setattr(running, "restored", lambda lines, seen: folds.append(len(lines)))
    before, _, state = one._before()
    assert [copy.step for copy in one._start(1, before, state).durable] == [3, 2]
    assert folds == [0]  # a journal of weeks takes minutes
    uri = one.storage.uri_of("checkpoints/step-00000004.g0001")
    (event,) = one._found.damaged
    assert event.uri == uri and event.reason.startswith(f"{uri}/commit.json: not readable (")
    view = view_of([Line(0.0, 1, ((0.0, START), (0.0, event)))])
    assert f"a checkpoint cannot be read: {event.reason}" in [note.text for note in view.notes]


def test_a_checkpoint_that_the_journal_knows_and_storage_has_not_is_told(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        f"steps: 9\nglobal_batch: 8\nprogram: {PROGRAMS / 'tiny.py'}\n"
    )
    one = prepared(folder, run_name="missing")
    uris = [one.storage.uri_of(f"checkpoints/step-{step:08d}.g0001") for step in (5, 2)]
    marker = "checkpoints/step-00000002.g0001/commit.json"
    one.storage.put(marker, encode_marker(Marker(2, 1, 1, 1, {}, ())))
    known = State(durable=tuple(Copy(5, "durable", 1, Layout(), uri=uri) for uri in uris))
    assert [copy.step for copy in one._start(1, [], known).durable] == [2]
    (event,) = one._found.damaged
    assert event.uri == uris[0] and "/commit.json: missing; the journal says" in event.reason
    assert one._found.known == {*uris}
    one.storage.delete(marker)
    with pytest.raises(StateLost, match="bring it back, or start over with another --run-name"):
        one._start(1, [], known)


def test_the_best_checkpoint_is_marked_where_a_loss_is_not_finite(folder: Path) -> None:
    place = prepared(folder, run_name="scored").place
    journal = Journal(place.journal, 1)
    for step, loss in ((2, 3.0), (3, 2.0), (4, math.nan)):
        evaluated = Evaluated(1, step, {"validation_loss": loss})
        journal.append(float(step), [(float(step), evaluated)], None)
        marker = encode_marker(Marker(step, 1, 1, 1, {}, ()))
        place.storage.put(f"checkpoints/step-{step:08d}.g0001/commit.json", marker)
    journal.close()
    rows, problems = checkpoints(place.storage)
    assert [(row["step"], row["best"]) for row in rows] == [(4, False), (3, True), (2, False)]
    assert problems == []


def test_the_best_checkpoint_is_exported_by_its_validation_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, asked = prepared(folder, run_name="scored").place, list[int]()
    marker = encode_marker(Marker(4, 1, 1, 1, {}, ()))
    place.storage.put("checkpoints/step-00000004.g0001/commit.json", marker)
    to = str(folder / "weights")
    with pytest.raises(SpecError, match=r"scored: --step best: .* no validation .* there: 4$"):
        export(place.storage, "best", to)
    journal = Journal(place.journal, 1)
    for step, loss in ((2, 3.0), (3, 2.0), (4, math.nan)):
        evaluated = Evaluated(1, step, {"validation_loss": loss})
        journal.append(float(step), [(float(step), evaluated)], None)
    journal.close()
    with pytest.raises(SpecError, match=r"there were 3 validations, the last one of step 4 \(keep"):
        export(place.storage, "best", to)
    for step in (2, 3):
        marker = encode_marker(Marker(step, 1, 1, 1, {}, ()))
        place.storage.put(f"checkpoints/step-{step:08d}.g0001/commit.json", marker)

    def written(run: object, step: int, to: object, **_: object) -> dict[str, Any]:
        asked.append(step)
        return {}

    monkeypatch.setattr(checkpoint_verbs, "export", written)
    export(place.storage, "best", to)
    assert asked == [3]


def test_a_run_with_a_damaged_journal_goes_on_from_its_newest_copy(folder: Path) -> None:
    place = prepared(folder, run_name="hurt").place
    journal = Journal(place.journal, 1)
    for at_s, event in ((0.0, START), (1.0, NodeLost("a")), (2.0, NodeLost("b"))):
        journal.append(at_s, [(at_s, event)], None)
    journal.close()
    with pytest.raises(SpecError, match="its journal is whole; leave --from-checkpoint out"):
        prepared(folder, run_name="hurt", from_checkpoint=True)._before()
    whole = place.journal.read_bytes()
    place.journal.write_bytes(whole.replace(b'"node_id":"a"', b'"node_id":"c"'))
    with pytest.raises(
        JournalDamaged,
        match=r"hurt/journal\.jsonl, line 2: it was altered .* --from-checkpoint sets",
    ):
        prepared(folder, run_name="hurt")._before()
    one = prepared(folder, run_name="hurt", from_checkpoint=True)
    before = one._before()[0]
    assert [event for line in before for _, event in line.events] == [START]
    assert one._cut is not None and {file.name for file in place.folder.iterdir()} == {
        "journal.jsonl"
    }  # nothing is written yet
    start = replace(START, epoch=2, cut=one._cut.said)
    journal = place.open_journal(2, StoredJournal(), one._cut)
    journal.append(3.0, [(3.0, start)], None)
    journal.close()
    aside = place.folder / "journal-damaged-1.jsonl"
    assert aside.read_bytes() == whole.replace(b'"node_id":"a"', b'"node_id":"c"')
    assert str(aside) in start.cut and len(prepared(folder, run_name="hurt")._before()[0]) == 2
    (note,) = [note.text for note in view_of(read(place.journal)).notes if str(aside) in note.text]
    assert note.endswith(
        f"its journal was damaged: 1 lines before that count, the whole text is in {aside}"
    )
    assert (
        sample_check.exact(
            [Line(0.0, 2, ((0.0, start),)), Line(9.0, 2, tuple(steps([3, 4])))], one.spec
        )
        is None
    )


def test_without_a_part_of_the_journal_nobody_is_attached_to(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        f"steps: 4\nglobal_batch: 8\nprogram: {PROGRAMS / 'tiny.py'}\n"
    )
    one = prepared(folder, run_name="cut")
    first = one._start(1, [])
    one.address = "auto"
    before, state = [Line(0.0, 1, ((0.0, first),))], fold(State(), first, 0.0)
    assert one._start(2, before, state).attached
    one._cut = JournalCut("some lines are missing", "", b"", b"")
    again = one._start(2, before, state)
    assert (again.attached, again.cut) == (False, "some lines are missing")


def test_the_journal_is_gone_through_once_and_of_a_state_in_it_only_parts_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        Line(0.0, 1, ((0.0, START), (0.5, NodePrepared("a", (1,), 100)))),
        Line(9.0, 1, tuple(steps([1, 2, 3, 4]))),
    ]
    assert sample_check.exact(iter(lines), prepared(folder).spec) is True
    start = DriverStarted("state", 1, {"steps": 4, "global_batch": 8, "seed": 1}, (), MODEL)
    later = Line(5.0, 1, state=plain(fold(State(), start, 0.0)))
    # no whole State
    monkeypatch.setattr(
        resume_checks, "built", lambda kind, data: {ModelProfile: built}[kind](kind, data)
    )
    resume_checks.check_same([later], start, {})
    with pytest.raises(SpecError, match="was started with other values: seed"):
        resume_checks.check_same([later], replace(start, job={**start.job, "seed": 9}), {})
    with pytest.raises(SpecError, match="was started with another model: w was"):
        resume_checks.check_same(
            [later],
            replace(start, model=ModelProfile(1, 4, (TensorSpec("w", (2, 3), "float32"),))),
            {},
        )


def test_the_holder_is_named_while_it_lives(tmp_path: Path) -> None:
    run = open_storage(tmp_path)
    assert api.holder(run) == ""
    lease = Lease(run, "one")
    assert api.holder(run).startswith("process ")
    lease.release()
    assert api.holder(run) == ""


PAID = (
    "steps: 4\nglobal_batch: 8\npools: [{name: p5, market_type: spot, usd_per_node_h: 98.0, "
    "max_nodes: 4}, {name: ours}]\n"
)


def test_paid_pools_need_a_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(PAID)
    assert main(["run", "tiny"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "elastic: tiny/job.yaml: keys 'budget_usd' and 'max_nodes' are missing, and nodes are "
        "paid for: "
    )
    assert "up to $392.00 an hour (p5 4 x $98.00/h) until the run ends; give budget_usd" in said
    assert said.count("\n") == 1
    assert prepared(folder, no_budget=True).spec.budget_usd is None
    for more in ("budget_usd: 50\n", "max_nodes: 2\n"):
        (folder / "job.yaml").write_text(PAID + more)
        prepared(folder)
    (folder / "job.yaml").write_text(PAID + "budget_usd: 50\n")
    with pytest.raises(
        SpecError, match=r"tiny/job.yaml: key 'budget_usd' is 50, and --no-budget says none"
    ):
        prepared(folder, no_budget=True)


def test_a_script_that_is_restarted_needs_a_limit_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "program.py").unlink()
    (folder / "train.py").write_text("print('plain')\n")
    (folder / "job.yaml").write_text("".join(PAID.splitlines(keepends=True)[2:]))
    assert main(["run", "tiny", "--script", "tiny/train.py"]) == 2
    assert "tiny/job.yaml: keys 'budget_usd' and 'max_nodes' are missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pool", "paid"),
    [
        (Pool("a"), False),
        # of the embedded cluster, as a job without pools has them
        (Pool("a", market_type="spot"), False),
        (Pool("a", usd_per_node_h=0.01), True),
        # whose price nobody knows
        (Pool("a", market_type="spot", instance_type="p5.48xlarge", cloud="aws"), True),
        (Pool("a", market_type="owned", cloud="kubernetes"), False),
    ],
)
def test_which_pools_are_paid(pool: Pool, paid: bool) -> None:
    assert pool.paid == paid


@pytest.mark.parametrize(
    "job", sorted(path.parent.name for path in (ROOT / "jobs").glob("*/job.yaml"))
)
def test_the_jobs_that_come_with_this_have_a_limit(job: str) -> None:
    data, where = job_data(ROOT / "jobs" / job)
    spec = job_of(FILLED | data, ROOT / "jobs" / job / "program.py", where)
    check_budget(spec, [pool.pool() for pool in spec.pools])


def test_what_the_program_has_ended_is_begun_again_by_a_person_alone(folder: Path) -> None:
    (folder / "program.py").write_text((PROGRAMS / "tiny.py").read_text())
    by_hand, started = (
        prepared(folder, run_name="r"),
        prepared(folder, run_name="r", supervised=True),
    )
    changed = prepared(folder, run_name="r", supervised=True, allow_changed=True)
    begun = by_hand._start(1, [])
    before = [Line(0.0, 1, ((0.0, begun),))]
    failed = replace(
        fold(State(), begun, 0.0),
        phase="failed",
        fatal="the program raised on spot-1/0: KeyError: 'x'",
    )
    with pytest.raises(
        ProgramError,
        match="failed by its program, which is the same: the program raised on spot-1/0",
    ):
        started._start(2, before, failed)
    assert by_hand._start(2, before, failed).epoch == changed._start(2, before, failed).epoch == 2
    for going_on in (replace(failed, fatal=""), replace(failed, phase="stopped")):  # not its fault
        assert started._start(2, before, going_on).epoch == 2
    again = prepared(folder, run_name="r", supervised=True, started_again=True)
    runs = {run: run._start(2, before, replace(failed, fatal="")) for run in (started, again)}
    assert [start.supervised for start in runs.values()] == [False, True]
    (folder / "program.py").write_text((PROGRAMS / "tiny.py").read_text() + "CHANGED = 1\n")
    with pytest.raises(SpecError, match=r"other values: the code of its program\.py"):
        prepared(folder, run_name="r", supervised=True)._start(2, before, failed)


def test_so_is_a_script_that_is_restarted(folder: Path) -> None:
    file = folder / "train.py"
    file.write_text("print('step 1: loss 1.0')")
    spec = job_of({"name": "tiny", **FILLED}, file, "--set")
    job = {"script": str(file), "args": [], "restarted": True}
    begun = DriverStarted("r", 1, job, (), ModelProfile(0, 0, ()))
    failed = WorkerFailed(
        WorkerId("spot-1", 0), 1, "program", "rank 0 (exit code 1): KeyError: 'x'"
    )
    stop = Decision((Stop("failed", "the script itself failed on rank 0"),), "")
    before = [Line(0.0, 1, ((0.0, begun),)), Line(9.0, 1, ((9.0, failed),), stop)]
    for options in (
        Options(run_name="r"),
        Options(run_name="r", supervised=True, allow_changed=True),
    ):
        for again in (False, True):
            run = _ScriptRun(file, (), spec, options=replace(options, started_again=again))
            start = run._start(2, before, restored(before))
            assert start.job["restarted"] and start.supervised == again
    started = _ScriptRun(file, (), spec, options=Options(run_name="r", supervised=True))
    with pytest.raises(
        ProgramError,
        match="failed by its program, which is the same: rank 0 .exit code 1.: KeyError",
    ):
        started._start(2, before, restored(before))
    assert started._start(2, before[:1], restored(before[:1])).job["script"] == str(file)


def test_a_driver_that_attaches_says_until_when_nodes_may_have_been_paid_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "program.py").write_text((PROGRAMS / "tiny.py").read_text())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run = prepared(folder, run_name="r")
    first = run._start(1, [])
    assert first.paid_until_s is None and not first.attached
    now_s = time.time()
    begun = replace(first, job={**first.job, "orphan_lease_s": 100.0})
    before = [Line(now_s - 9.0, 1, ((now_s - 9.0, begun),))]
    again = run._start(2, before, restored(before))
    assert (
        again.attached and again.paid_until_s == now_s - 9.0 + LINE_EVERY_S + 100.0 + LEAVE_MOST_S
    )
    assert "clock" not in caplog.text
    run._start(2, [Line(now_s + 3600.0, 1, ((now_s + 3600.0, begun),))])
    assert (
        caplog.text.count("clock is 36") == 1
        and "behind the newest line of the run's journal" in caplog.text
    )
