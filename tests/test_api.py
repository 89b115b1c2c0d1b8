"""What is checked before a run starts and counted when it has ended; no cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import elastic
from elastic import api
from elastic.api import checks, running
from elastic.data.order import digest, digest_text, sample_ids
from elastic.data.streams import N_POSITIONS
from elastic.errors import SpecError
from elastic.ledger.journal import Journal, Line
from elastic.ledger.lease import Lease
from elastic.program import Program, load_program
from elastic.spec import drill_entry
from elastic.storage import open_storage
from elastic.types import (
    Copy,
    CopyStored,
    Decision,
    DriverStarted,
    Layout,
    ModelProfile,
    NodePrepared,
    PlanEntered,
    Pool,
    StepDone,
    Stop,
    TensorSpec,
    parse_layout,
)

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
    return running._Run(running._job(folder, None, api.Options()), api.Options(**options))  # type: ignore[arg-type]


def steps(numbers: list[int], n_samples: int = 100, generation: int = 1) -> list[tuple[float, StepDone]]:
    ids = {k: digest_text(digest(sample_ids(n_samples, 8, 3, k - 1))) for k in numbers}
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


def test_a_submitted_job_keeps_its_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert prepared(folder, run_name="mine").storage.root == tmp_path / "home" / "elastic_runs" / "mine"
    assert prepared(folder).address == "auto"
    monkeypatch.setenv("ELASTIC_STORAGE", str(tmp_path / "shared"))
    assert prepared(folder, run_name="mine").storage.root == tmp_path / "shared" / "mine"


def test_a_cluster_is_drilled_only_when_asked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "job.yaml").write_text("steps: 4\nglobal_batch: 8\ndrill: [{at_step: 1, kill: any}]\n")
    (tmp_path / "drill.yaml").write_text("[{at_step: 2, hang: any}]")
    asked = str(tmp_path / "drill.yaml")
    assert [entry.kill for entry in prepared(folder).spec.drill] == ["any"]
    assert [entry.hang for entry in prepared(folder, drill=asked).spec.drill] == ["any"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert prepared(folder).spec.drill == []
    assert [entry.hang for entry in prepared(folder, drill=asked).spec.drill] == ["any"]


def test_a_program_is_found_by_its_file(folder: Path) -> None:
    program = load_program(folder / "program.py")
    job = running._job(program, {"steps": 2, "global_batch": 4}, api.Options())
    assert (job.program, job.steps) == (str(folder / "program.py"), 2)
    job = running._job(program, folder, api.Options(overrides=("steps=9",)))
    assert (job.program, job.steps) == (str(folder / "program.py"), 9)
    with pytest.raises(SpecError, match="give job="):
        running._job(program, None, api.Options())
    with pytest.raises(SpecError, match="a job folder has its own job.yaml"):
        running._job(folder, {"steps": 2}, api.Options())
    nowhere = Program(eval("lambda: None"), program.optimizer, program.dataset, program.loss)
    with pytest.raises(SpecError, match="in a file"):
        elastic.run(nowhere, {"steps": 2, "global_batch": 4})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"kill": "spot-3"},
            "the drill, at_step 5: there is never a node 'spot-3'; nodes here are spot-1 to spot-2, od-1; or give",
        ),
        ({"notice": ["any", "spot"]}, "there is never a node 'spot'"),
        ({"hang": "od-1-1"}, "there is never a node 'od-1-1'"),
        ({"kill": "rank:3"}, "'rank:3', but there are at most 3 workers, rank:0 to rank:2"),
    ],
)
def test_a_drill_names_nodes_that_there_can_be(entry: dict[str, object], said: str) -> None:
    spot, on_demand = Pool("spot", "CPU", 1, "spot", max_nodes=2), Pool("od", "CPU", 1, "on-demand", max_nodes=1)
    wrong = drill_entry({"at_step": 5, **entry})
    good = drill_entry({"at_step": 1, "kill": ["spot-2", "od-1", "any-spot", "partner", "rank:2", "any"]})
    with pytest.raises(SpecError, match=said):
        checks.check_drill([good, wrong], (spot, on_demand), embedded=True)
    checks.check_drill([good], (spot, on_demand), embedded=True)
    if "rank" not in said:
        checks.check_drill([wrong], (spot, on_demand), embedded=False)
    with pytest.raises(SpecError, match=r"'any-spot', but no pool is of the spot market \(od is on-demand\); take any"):
        checks.check_drill([drill_entry({"at_step": 1, "kill": "any-spot"})], (on_demand,), embedded=False)
    more = [drill_entry({"at_step": 1, "add": "spot"}), drill_entry({"at_step": 2, "kill": "spot-3"})]
    checks.check_drill(more, (spot, on_demand), embedded=True)


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
    with pytest.raises(SpecError, match=r"run 'done' is done \(20 steps\); --set steps=N with more of them lets it go on"):
        one._before()
    one.spec = one.spec.model_copy(update={"steps": 21})
    assert len(one._before()[0]) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"job": {**START.job, "global_batch": 4}}, "was started with global_batch=8, the job says 4: .* change it back"),
        ({"job": {**START.job, "seed": 4}}, r"started with other values: seed \(3, now 4\)"),
        ({"model": replace(MODEL, specs=(TensorSpec("w", (2, 3), "float32"),))}, r"w was \[2, 2\], it is \[2, 3\]"),
        ({"model": replace(MODEL, specs=(*MODEL.specs, TensorSpec("b", (2,), "float32")))}, r"b was not there, it is \[2\]"),
    ],
)
def test_a_run_goes_on_as_it_began(change: dict[str, object], said: str) -> None:
    before = [Line(0.0, 1, ((0.0, START),))]
    checks.check_same(before, replace(START, epoch=2, job={**START.job, "steps": 9}), {})
    checks.check_same([], replace(START, **change), {})
    with pytest.raises(SpecError, match=said):
        checks.check_same(before, replace(START, **change), {})


def test_a_changed_program_is_refused_unless_it_is_accepted() -> None:
    def started(code: str) -> DriverStarted:
        return replace(START, job={**START.job, "fingerprint": {"program": code, "seed": 3}})

    before = [Line(0.0, 1, ((0.0, started("a")),))]
    checks.check_same(before, started("a"), {})
    with pytest.raises(SpecError, match=r"other values: the code of its program\.py; .* --allow-changed"):
        checks.check_same(before, started("b"), {})
    checks.check_same(before, started("b"), {}, allow_changed=True)
    accepted = [*before, Line(1.0, 2, ((1.0, started("b")),))]
    checks.check_same(accepted, started("b"), {})
    with pytest.raises(SpecError, match="program"):  # without a journal, its newest checkpoint knows
        checks.check_same([], started("b"), {"fingerprint": {"program": "a"}})


def test_samples_are_counted_over_the_steps_that_stayed(folder: Path) -> None:
    one = prepared(folder)
    one.program = replace(one.program, dataset=None)  # what the nodes have read need not be here

    def exact(*events: tuple[float, object], told: int = 100, start: DriverStarted = START) -> bool | None:
        ready = Line(0.0, 1, ((0.0, start), (0.5, NodePrepared("a", (1,), told))))
        return one._samples_exact([ready, Line(9.0, 1, tuple(events))])  # type: ignore[arg-type]

    assert exact(*steps([1, 2, 3, 4])) is True
    assert exact(*steps([1, 2, 3]), (3.5, PlanEntered(2, 2)), *steps([3, 4], generation=2)) is True
    assert exact(*steps([1, 2, 4])) is False
    assert exact(*steps([1, 2, 3])) is False
    assert exact(*steps([1, 2, 3]), *steps([4], n_samples=90)) is False
    imported = replace(START, durable=(Copy(2, "durable", 0, Layout()),))
    assert exact(*steps([3, 4]), start=imported) is True
    assert exact(*steps([1, 2, 3, 4]), told=0) is None and exact(*steps([1, 2, 3, 4]), told=N_POSITIONS) is None


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
        checks.check_layouts(spec, profile)

    plain = ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=1)
    with pytest.raises(SpecError, match="tp=2, but tp must divide 1 for this model; give Program.tp"):
        check("tp=2", plain)
    with pytest.raises(SpecError, match="pp=4, but Program.blocks matches only 2"):
        check("pp=4", plain)
    check("dp_shard=2,pp=2", plain)
    check("tp=4", ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=8))
    with pytest.raises(SpecError, match="take a tp that divides it"):
        check("tp=3", ModelProfile(n_blocks=2, n_params=1, specs=(), tp_limit=8))
