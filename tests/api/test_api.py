"""What is checked before a run starts and counted when it has ended; no cluster."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.places import PROGRAMS, ROOT

import elastic
from elastic import api
from elastic.api import Options
from elastic.api.running import run as running
from elastic.api.running import sample_check, start_checks
from elastic.api.running.restarted_script import FILLED, _ScriptRun
from elastic.cli.command_line import main
from elastic.cluster.nodes.demand import LEAVE_MOST_S
from elastic.config.fingerprint import fingerprint
from elastic.config.job import drill_entry, job_data, job_of
from elastic.config.pool_checks import check_budget
from elastic.data.order import digest, digest_text, sample_ids
from elastic.data.streams import N_POSITIONS
from elastic.driver import LINE_EVERY_S, restored
from elastic.errors import JournalDamaged, ProgramError, SpecError
from elastic.ledger.journal import Journal, Line, built, plain, read
from elastic.ledger.lease import Lease
from elastic.ledger.run_folder import JournalCut
from elastic.ledger.segments import StoredJournal
from elastic.observe.run_view import view_of
from elastic.policy.state.event_handlers import digested
from elastic.policy.state.fold import State, fold
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import (
    Copy,
    CopyStored,
    Decision,
    DriverStarted,
    EnterPlan,
    Job,
    Layout,
    ModelProfile,
    NodeLost,
    NodePrepared,
    Plan,
    PlanEntered,
    Pool,
    Resume,
    StepDone,
    Stop,
    TensorSpec,
    WorkerFailed,
    WorkerId,
    parse_layout,
)
from elastic.worker.checkpoint.checkpoint_format import Marker, encode_marker

PROGRAM = """
import elastic
program = elastic.Program(model=lambda: None, optimizer=lambda named: None, dataset=lambda: range(100), loss=lambda o, b: 0)
"""
MODEL = ModelProfile(1, 4, (TensorSpec("w", (2, 2), "float32"),))
START = DriverStarted("tiny-1", 1, {"steps": 4, "global_batch": 8, "seed": 3}, (), MODEL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "tiny"
    job.mkdir()
    (job / "program.py").write_text(PROGRAM)
    (job / "job.yaml").write_text("steps: 4\nglobal_batch: 8\nseed: 3\n")
    return job


def prepared(folder: Path, **options: object) -> running._Run:
    return running._Run(running.job_given(folder, None, api.Options()), api.Options(**options))  # type: ignore[arg-type]


def steps(
    numbers: list[int], n_samples: int = 100, generation: int = 1
) -> list[tuple[float, StepDone]]:
    ids = {k: digest_text(digest(sample_ids(n_samples, 8, 3, step=k - 1))) for k in numbers}
    return [(float(k), StepDone(generation, k, 1.0, 8, 0.1, digest=ids[k])) for k in numbers]


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
    monkeypatch.setenv("ELASTIC_STORAGE", str(tmp_path / "shared"))
    assert prepared(folder, run_name="mine").storage.root == tmp_path / "shared" / "mine"


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
    job = running.job_given(program, {"steps": 2, "global_batch": 4}, api.Options())
    assert (job.program, job.steps) == (str(folder / "program.py"), 2)
    job = running.job_given(program, folder, api.Options(overrides=("steps=9",)))
    assert (job.program, job.steps) == (str(folder / "program.py"), 9)
    with pytest.raises(SpecError, match="give job="):
        running.job_given(program, None, api.Options())
    with pytest.raises(SpecError, match="a job folder has its own job.yaml"):
        running.job_given(folder, {"steps": 2}, api.Options())
    nowhere = Program(eval("lambda: None"), program.optimizer, program.dataset, program.loss)
    with pytest.raises(SpecError, match="in a file"):
        elastic.run(nowhere, {"steps": 2, "global_batch": 4})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"kill": "spot-3"},
            "the drill, at_step 5: there is never a node 'spot-3'; nodes here are spot-1 to "
            "spot-2, od-1; or give",
        ),
        ({"notice": ["any", "spot"]}, "there is never a node 'spot'"),
        ({"hang": "od-1-1"}, "there is never a node 'od-1-1'"),
        ({"kill": "rank:3"}, "'rank:3', but there are at most 3 workers, rank:0 to rank:2"),
    ],
)
def test_a_drill_names_nodes_that_there_can_be(entry: dict[str, object], said: str) -> None:
    spot, on_demand = (
        Pool("spot", "CPU", 1, "spot", max_nodes=2),
        Pool("od", "CPU", 1, "on-demand", max_nodes=1),
    )
    wrong = drill_entry({"at_step": 5, **entry})
    good = drill_entry(
        {"at_step": 1, "kill": ["spot-2", "od-1", "any-spot", "partner", "rank:2", "any"]}
    )
    with pytest.raises(SpecError, match=said):
        start_checks.check_drill([good, wrong], (spot, on_demand), embedded=True)
    start_checks.check_drill([good], (spot, on_demand), embedded=True)
    if "rank" not in said:
        start_checks.check_drill([wrong], (spot, on_demand), embedded=False)
    with pytest.raises(
        SpecError,
        match=r"'any-spot', but no pool is of the spot market \(od is on-demand\); take any",
    ):
        start_checks.check_drill(
            [drill_entry({"at_step": 1, "kill": "any-spot"})], (on_demand,), embedded=False
        )
    more = [
        drill_entry({"at_step": 1, "add": "spot"}),
        drill_entry({"at_step": 2, "kill": "spot-3"}),
    ]
    start_checks.check_drill(more, (spot, on_demand), embedded=True)


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
    monkeypatch.setattr(running, "restored", lambda lines: folds.append(len(lines)))
    before, _, state = one._before()
    assert [copy.step for copy in one._start(1, before, state).durable] == [3, 2]
    assert folds == [0]  # a journal of weeks takes minutes
    uri = one.storage.uri_of("checkpoints/step-00000004.g0001")
    (event,) = one._damaged
    assert event.uri == uri and event.reason.startswith(f"{uri}/commit.json: not readable (")
    view = view_of([Line(0.0, 1, ((0.0, START), (0.0, event)))])
    assert f"a checkpoint cannot be read: {event.reason}" in [note.text for note in view.notes]


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


def test_steps_that_a_killed_driver_did_not_write_down_are_unknown_also_where_they_are_the_last(
    folder: Path,
) -> None:
    one = prepared(folder, run_name="last")
    n = one.spec.steps
    before = Line(9.0, 1, ((0.0, START), *steps(list(range(1, n - 1)))))
    after = Line(20.0, 2, ((20.0, PlanEntered(2, n)),))
    assert sample_check.exact([before, after], one.spec) is None


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"job": {**START.job, "global_batch": 4}},
            "was started with global_batch=8, the job says 4: .* change it back",
        ),
        ({"job": {**START.job, "seed": 4}}, r"started with other values: seed \(3, now 4\)"),
        (
            {"model": replace(MODEL, specs=(TensorSpec("w", (2, 3), "float32"),))},
            r"w was \[2, 2\], it is \[2, 3\]",
        ),
        (
            {"model": replace(MODEL, specs=(*MODEL.specs, TensorSpec("b", (2,), "float32")))},
            r"b was not there, it is \[2\]",
        ),
    ],
)
def test_a_run_goes_on_as_it_began(change: dict[str, object], said: str) -> None:
    before = [Line(0.0, 1, ((0.0, START),))]
    start_checks.check_same(before, replace(START, epoch=2, job={**START.job, "steps": 9}), {})
    start_checks.check_same([], replace(START, **change), {})
    with pytest.raises(SpecError, match=said):
        start_checks.check_same(before, replace(START, **change), {})


def test_a_changed_program_is_refused_unless_it_is_accepted() -> None:
    def started(code: str) -> DriverStarted:
        return replace(START, job={**START.job, "fingerprint": {"program": code, "seed": 3}})

    before = [Line(0.0, 1, ((0.0, started("a")),))]
    start_checks.check_same(before, started("a"), {})
    with pytest.raises(
        SpecError, match=r"other values: the code of its program\.py; .* --allow-changed"
    ):
        start_checks.check_same(before, started("b"), {})
    start_checks.check_same(before, started("b"), {}, allow_changed=True)
    accepted = [*before, Line(1.0, 2, ((1.0, started("b")),))]
    start_checks.check_same(accepted, started("b"), {})
    # without a journal, its newest checkpoint knows
    with pytest.raises(SpecError, match="program"):
        start_checks.check_same([], started("b"), {"fingerprint": {"program": "a"}})


def test_a_run_over_a_file_of_tokens_and_with_secret_arguments_is_resumed(folder: Path) -> None:
    def started(*args: str, tokens: str = "/data/x.bin") -> DriverStarted:
        data = {"train": {"tokens": tokens, "end_token": "<end>", "seq": 8}}
        job: dict[str, Any] = {**START.job, "args": [*args], "data": data}
        return replace(
            START,
            job=job
            | {
                "fingerprint": fingerprint(
                    folder / "program.py", Job.from_plain(job), MODEL, n_samples=9
                )
            },
        )

    journal = Journal(folder / "journal.jsonl", 1)
    journal.append(0.0, [(0.0, started("--hf-token", "hf_1", "--lr", "3"))], None)
    journal.close()
    before = read(folder / "journal.jsonl")
    for meta in (
        {},
        {"fingerprint": started("--hf-token", "hf_1", "--lr", "3").job["fingerprint"]},
    ):
        start_checks.check_same(before, started("--hf-token", "hf_1", "--lr", "3"), meta)
        start_checks.check_same([], started("--hf-token", "hf_1", "--lr", "3"), meta)
    for other in (
        started("--hf-token", "hf_2", "--lr", "3"),
        started("--hf-token", "hf_1", "--lr", "4"),
    ):
        with pytest.raises(SpecError, match="was started with other values: args"):
            start_checks.check_same(before, other, {})
    with pytest.raises(SpecError, match=r"data\.train .*/data/x\.bin.*/data/y\.bin"):
        start_checks.check_same(
            before, started("--hf-token", "hf_1", "--lr", "3", tokens="/data/y.bin"), {}
        )


def test_samples_are_counted_over_the_steps_that_stayed(folder: Path) -> None:
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)  # what the nodes have read need not be here

    def exact(
        *events: tuple[float, object], told: int = 100, start: DriverStarted = START
    ) -> bool | None:
        ready = Line(0.0, 1, ((0.0, start), (0.5, NodePrepared("a", (1,), told))))
        return sample_check.exact([ready, Line(9.0, 1, tuple(events))], one.spec)  # type: ignore[arg-type]

    assert exact(*steps([1, 2, 3, 4])) is True
    assert exact(*steps([1, 2, 3]), (3.5, PlanEntered(2, 2)), *steps([3, 4], generation=2)) is True
    assert exact(*steps([1, 2, 4])) is False
    assert exact(*steps([1, 2, 3])) is False
    assert exact(*steps([1, 2, 3]), *steps([4], n_samples=90)) is False
    imported = replace(START, durable=(Copy(2, "durable", 0, Layout()),))
    assert exact(*steps([3, 4]), start=imported) is True
    assert (
        exact(*steps([1, 2, 3, 4]), told=0) is None
        and exact(*steps([1, 2, 3, 4]), told=N_POSITIONS) is None
    )


def test_of_steps_that_a_killed_driver_had_not_written_down_nobody_knows(folder: Path) -> None:
    """Their copy was there all the same, and the next driver continued from it."""
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)

    def exact(before: list[int], after: list[int], n_samples: int = 100) -> bool | None:
        ready = Line(0.0, 1, ((0.0, START), (0.5, NodePrepared("a", (1,), 100)), *steps(before)))  # type: ignore[arg-type]
        again = (
            (9.0, PlanEntered(2, after[0] - 1)),
            *steps(after, generation=2, n_samples=n_samples),
        )
        return sample_check.exact([ready, Line(9.0, 2, again)], one.spec)  # type: ignore[arg-type]

    assert exact([1, 2], [3, 4]) is True and exact([1, 2], [2, 3, 4]) is True
    assert exact([1, 2], [4]) is None and exact([], [3, 4]) is None
    assert exact([1, 2], [4], n_samples=90) is False
    assert exact([1, 3], [4]) is False, "within a driver all are written down"


def test_a_checkpoints_running_digest_tells_of_steps_that_no_line_tells_of(folder: Path) -> None:
    """Its driver was killed before it wrote them down, or the journal's end is gone."""
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)

    def stored(step: int, n_samples: int = 100) -> Copy:
        state = State()
        for _, event in steps(list(range(1, step + 1)), n_samples=n_samples):
            state = replace(state, digests=digested(state.digests, event))
        return Copy(step, "durable", 1, Layout(), samples=state.digests[step])

    def exact(
        found: Copy, after: list[int], cut: str = "", before: tuple[int, ...] = (1,)
    ) -> bool | None:
        ready = Line(
            0.0, 1, ((0.0, START), (0.5, NodePrepared("a", (1,), 100)), *steps(list(before)))
        )
        again = replace(START, epoch=2, durable=(found,), cut=cut)
        entered = ((9.0, again), (9.0, PlanEntered(2, after[0] - 1)), *steps(after, generation=2))
        lines = [
            *([ready] if before else []),
            Line(9.0, 2, ((8.9, NodePrepared("a", (1,), 100)), *entered)),
        ]
        return sample_check.exact(lines, one.spec)

    assert exact(stored(3), [4]) is True and exact(replace(stored(3), samples=""), [4]) is None
    assert exact(stored(3, n_samples=90), [4]) is False, "they were others"
    assert exact(stored(2), [4]) is None, "of step 3 it does not tell"
    for before in ((), (1,), (1, 2)):
        assert exact(stored(3), [4], cut="its journal was damaged", before=before) is True
    assert exact(replace(stored(3), samples=""), [4], cut="its journal was damaged") is None


def test_steps_that_were_rolled_back_are_not_those_that_a_killed_driver_did_not_write_down(
    folder: Path,
) -> None:
    """The first driver went back to step 0 and did three steps again, of which it wrote down one: 2
    and 3 of those are known to nobody, though steps of these numbers had been written down
    before."""
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)
    ready = ((0.0, START), (0.5, NodePrepared("a", (1,), 100)))
    undone, redone = steps([1, 2, 3]), ((5.0, PlanEntered(2, 0)), *steps([1], generation=2))
    after = ((9.0, PlanEntered(3, 3)), *steps([4], generation=3))
    first, second, third = (
        Decision(
            (EnterPlan(Plan(k, Layout(), (WorkerId("a", 0),), (8,), (1,), resume=resume)),), "why"
        )
        for k, resume in ((1, Resume()), (2, Resume()), (3, Resume("peer", 3, 2)))
    )
    lines = [
        Line(0.5, 1, ready, first), Line(4.0, 1, ((0.6, PlanEntered(1, 0)), *undone), second),
        Line(8.0, 1, redone), Line(8.5, 2, (), third), Line(9.0, 2, after),
    ]  # fmt: skip
    assert (
        sample_check.Unwritten.of(lines).steps == {2, 3}
        and sample_check.exact(lines, one.spec) is None
    )


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
        start_checks, "built", lambda kind, data: {ModelProfile: built}[kind](kind, data)
    )
    start_checks.check_same([later], start, {})
    with pytest.raises(SpecError, match="was started with other values: seed"):
        start_checks.check_same([later], replace(start, job={**start.job, "seed": 9}), {})
    with pytest.raises(SpecError, match="was started with another model: w was"):
        start_checks.check_same(
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


def test_a_layout_that_the_model_cannot_be_cut_into_is_wrong_input() -> None:
    def check(layout: str, profile: ModelProfile) -> None:
        spec: Any = SimpleNamespace(least_layouts=lambda: [parse_layout(layout)], script="")
        start_checks.check_layouts(spec, profile)

    plain = ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=1)
    with pytest.raises(
        SpecError, match="tp=2, but tp must divide 1 for this model; give Program.tp"
    ):
        check("tp=2", plain)
    with pytest.raises(SpecError, match="pp=4, but Program.blocks matches only 2"):
        check("pp=4", plain)
    check("dp_shard=2,pp=2", plain)
    check("tp=4", ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=8))
    with pytest.raises(SpecError, match="take a tp that divides it"):
        check("tp=3", ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=8))


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
        _ScriptRun(file, (), spec, options=options)._check_same(before, view_of(before))
    started = _ScriptRun(file, (), spec, options=Options(run_name="r", supervised=True))
    with pytest.raises(
        ProgramError,
        match="failed by its program, which is the same: rank 0 .exit code 1.: KeyError",
    ):
        started._check_same(before, view_of(before))
    started._check_same(before[:1], view_of(before[:1]))


# ------------------------------------------------------------------------------------------------
# clocks


@pytest.mark.parametrize(
    ("off_s", "told"),
    [(3600.0, "3600 s behind that of"), (-3600.0, "3600 s ahead of that of"), (2.0, "")],
)
def test_a_clock_that_is_not_the_storages_is_told(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    off_s: float,
    told: str,
) -> None:
    """Ahead of the true time it would spend the deadline unseen."""
    storage = open_storage(str(folder / "runs"))
    monkeypatch.setattr(storage, "modified_s", lambda key: time.time() + off_s)
    start_checks.taken(storage, "r").release()
    assert (told in caplog.text) if told else ("clock" not in caplog.text)


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
