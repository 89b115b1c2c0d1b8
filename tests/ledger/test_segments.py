"""The journal in storage that cannot be appended to: what is read elsewhere is what was written
here."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from ray._private.runtime_env import packaging
from support.storage.remote_folder import Remote
from support.waiting import until

from elastic.errors import (
    InternalError,
    JournalDamaged,
    LostContact,
    SpecError,
    StorageFailed,
    StorageRefused,
)
from elastic.ledger import segments
from elastic.ledger.journal import Journal, Line
from elastic.ledger.run_folder import RunFolder, key_of
from elastic.ledger.segments import PREFIX, Segments, StoredJournal, read_stored
from elastic.storage import LocalStorage, open_storage
from elastic.types import (
    Decision,
    EnterPlan,
    Layout,
    NodeLost,
    Plan,
    RequestNodes,
    StepDone,
    Stop,
    WorkerId,
)


@pytest.fixture
def storage(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "bucket")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored because time has passed, unless it could not be stored before."""
    monkeypatch.setattr(segments, "EVERY_S", 3600.0)
    monkeypatch.setattr(segments, "AGAIN_S", 0.02)


def machine(storage: Remote, tmp_path: Path, name: str) -> RunFolder:
    return RunFolder(storage, tmp_path / name)


def plan(generation: int) -> Decision:
    ranks = (WorkerId("n", 0),)
    return Decision((EnterPlan(Plan(generation, Layout(), ranks, (8,), ())),), f"plan {generation}")


def steps(journal: Journal, first: int, n: int) -> None:
    for step in range(first, first + n):
        at_s = 10.0 * step  # far enough apart to be a line each
        journal.append(at_s, [(at_s, step_done(step))], None)
        journal.flush()


def step_done(step: int) -> StepDone:
    return StepDone(1, step, 1.0, 10, 0.5)


def of(lines: list[Line]) -> list[object]:
    """Steps, and generations of plans as strings, in order."""
    found: list[object] = []
    for line in lines:
        found += [event.step for _, event in line.events if isinstance(event, StepDone)]
        if line.decision:
            found += [
                f"g{a.plan.generation}" for a in line.decision.actions if isinstance(a, EnterPlan)
            ]
    return found


def open_at(place: RunFolder, epoch: int) -> Journal:
    before, stored = place.take_over()
    del before
    return place.open_journal(epoch, stored)


def test_a_plan_is_stored_before_append_returns(storage: Remote, tmp_path: Path) -> None:
    here, elsewhere = machine(storage, tmp_path, "a"), machine(storage, tmp_path, "b")
    journal = open_at(here, 1)
    assert not elsewhere.exists()
    steps(journal, 1, 2)
    assert storage.list(PREFIX) == []
    journal.append(30.0, [(30.0, NodeLost("n", "gone"))], plan(1))
    assert elsewhere.exists() and of(elsewhere.lines()) == [1, 2, "g1"]
    steps(journal, 4, 2)
    assert of(elsewhere.lines()) == [1, 2, "g1"] and of(here.lines()) == [1, 2, "g1", 4, 5]
    journal.append(60.0, [], Decision((Stop("succeeded", "done"),), "done"))
    assert of(elsewhere.lines()) == [1, 2, "g1", 4, 5]
    steps(journal, 6, 1)
    journal.close()
    assert elsewhere.lines() == here.lines() and of(here.lines()) == [1, 2, "g1", 4, 5, 6]
    assert not (tmp_path / "b").exists()


def test_lines_without_a_plan_are_stored_in_the_background(storage: Remote, tmp_path: Path) -> None:
    here = machine(storage, tmp_path, "a")
    journal = open_at(here, 1)
    journal.segments = Segments(storage, 1, here.journal, before=StoredJournal(), every_s=0.02)
    steps(journal, 1, 1)
    until(
        lambda: of(machine(storage, tmp_path, "b").lines()) == [1],
        "the first line, seen from another machine",
    )
    journal.close()


def test_another_decision_is_stored_soon(storage: Remote, tmp_path: Path) -> None:
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    journal.append(1.0, [], Decision((RequestNodes("p", 2, "r"),), "more"))
    until(lambda: len(storage.list(PREFIX)) == 1, "one segment")
    journal.close()


def test_a_run_moves_from_machine_to_machine(storage: Remote, tmp_path: Path) -> None:
    for epoch, name in enumerate("abab", start=1):
        journal = open_at(machine(storage, tmp_path, name), epoch)
        journal.append(epoch * 100.0, [], plan(epoch))
        steps(journal, epoch * 10, 2)
        journal.close()
    expected = ["g1", 10, 11, "g2", 20, 21, "g3", 30, 31, "g4", 40, 41]
    assert of(machine(storage, tmp_path, "c").lines()) == expected
    assert [line.epoch for line in machine(storage, tmp_path, "c").lines()][::3] == [1, 2, 3, 4]
    # its own file ended with epoch 3
    assert of(machine(storage, tmp_path, "a").take_over()[0]) == expected


def test_what_a_dead_driver_did_not_store_is_not_lost_on_its_machine(
    storage: Remote, tmp_path: Path
) -> None:
    here = machine(storage, tmp_path, "a")
    dead = open_at(here, 1)
    dead.append(1.0, [], plan(1))
    steps(dead, 1, 2)
    dead._file.close()
    with here.journal.open("ab") as file:
        file.write(b'{"v":1,"at_s":3')  # it was killed in the middle of a line
    assert of(here.lines()) == ["g1", 1, 2] and of(machine(storage, tmp_path, "b").lines()) == [
        "g1"
    ]
    journal = open_at(here, 2)
    journal.append(50.0, [], plan(2))
    assert of(machine(storage, tmp_path, "b").lines()) == ["g1", 1, 2, "g2"]
    journal.close()


def test_an_older_driver_that_goes_on_does_not_count(storage: Remote, tmp_path: Path) -> None:
    old = open_at(machine(storage, tmp_path, "a"), 1)
    old.append(1.0, [], plan(1))
    new = open_at(machine(storage, tmp_path, "b"), 2)
    old.append(2.0, [], plan(66))
    new.append(3.0, [], plan(2))
    old.append(4.0, [], plan(67))
    old.close()
    new.close()
    assert of(machine(storage, tmp_path, "c").lines()) == ["g1", "g2"]
    # also where its own file says otherwise
    assert of(machine(storage, tmp_path, "a").lines()) == ["g1", "g2"]


@pytest.mark.parametrize("n", [1, 3, 8, 9, 10, 28])
def test_many_segments_become_few_objects(
    storage: Remote, tmp_path: Path, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "FAN", 3)
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    assert journal.segments is not None
    for generation in range(n):
        journal.append(generation, [], plan(generation))
    until(lambda: len(storage.list(PREFIX)) == sum(map(int, base_3(n))), "the segments")
    assert of(machine(storage, tmp_path, "b").lines()) == [f"g{i}" for i in range(n)]
    new = open_at(machine(storage, tmp_path, "b"), 2)
    for generation in (101, 102):  # what the older driver does now is merged with what counts
        journal.append(generation, [], plan(generation))
    new.append(200.0, [], plan(200))
    assert of(machine(storage, tmp_path, "c").lines()) == [*(f"g{i}" for i in range(n)), "g200"]
    journal.close()
    new.close()


def test_a_merge_whose_parts_may_not_be_removed_is_no_trouble(
    storage: Remote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(key: str) -> None:
        raise StorageRefused(f"{key}: DeleteObject was refused (AccessDenied)")

    monkeypatch.setattr(segments, "FAN", 3)
    monkeypatch.setattr(storage, "delete", refused)
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    for generation in range(9):
        journal.append(generation, [], plan(generation))
    until(lambda: len(storage.list(PREFIX)) == 9 + 3 + 1, "the segments, and merged ones")
    assert of(machine(storage, tmp_path, "b").lines()) == [f"g{i}" for i in range(9)]
    journal.close()
    assert "no journal can be stored" not in caplog.text


def base_3(n: int) -> str:
    return (base_3(n // 3) if n >= 3 else "") + str(n % 3)


def test_objects_may_be_merged_while_they_are_read(
    storage: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    assert journal.segments is not None
    for generation in range(3):
        journal.append(generation, [], plan(generation))
    journal.segments.close()  # its thread merges nothing from here on
    monkeypatch.setattr(segments, "FAN", 3)
    listed = storage.list
    answers = [listed(PREFIX)]
    journal.segments._merge()
    monkeypatch.setattr(
        storage, "list", lambda prefix="": answers.pop() if answers else listed(prefix)
    )
    assert len(listed(PREFIX)) == 1 and of(machine(storage, tmp_path, "b").lines()) == [
        "g0",
        "g1",
        "g2",
    ]
    journal.close()


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "no head"])
def test_a_torn_or_missing_last_segment_is_left_out(
    storage: Remote, tmp_path: Path, harm: str
) -> None:
    key = three(storage, tmp_path)[-1]
    damage(storage, key, harm)
    assert of(machine(storage, tmp_path, "b").lines()) == ["g1", "g2"]


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "no head"])
def test_a_hole_in_the_middle_is_told(storage: Remote, tmp_path: Path, harm: str) -> None:
    key = three(storage, tmp_path)[1]
    damage(storage, key, harm)
    with pytest.raises(
        InternalError,
        match="segment 1 of epoch 1 is missing" if harm == "missing" else "it was altered",
    ):
        machine(storage, tmp_path, "b").lines()


def test_a_torn_first_segment_of_a_new_driver_is_as_if_it_had_not_come(
    storage: Remote, tmp_path: Path
) -> None:
    three(storage, tmp_path)
    new = open_at(machine(storage, tmp_path, "b"), 2)
    new.append(3.0, [], plan(7))
    new.close()
    damage(storage, storage.list(PREFIX)[-1], "cut")
    assert of(machine(storage, tmp_path, "c").lines()) == ["g1", "g2", "g3"]


def three(storage: Remote, tmp_path: Path) -> list[str]:
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    for generation in (1, 2, 3):
        journal.append(generation, [], plan(generation))
    journal.close()
    keys = storage.list(PREFIX)
    assert len(keys) == 3
    return keys


@pytest.mark.parametrize("harm", ["line", "missing"])
def test_a_damaged_line_is_named_with_its_object_and_the_run_goes_on_from_before(
    storage: Remote, tmp_path: Path, harm: str
) -> None:
    for epoch in (1, 2):
        journal = open_at(machine(storage, tmp_path, "a"), epoch)
        for generation in range(10 * epoch, 10 * epoch + 3):
            steps(journal, generation, 2)
            journal.append(generation, [], plan(generation))
        journal.close()
    key = storage.list(PREFIX)[1]
    if harm == "line":
        storage.put(key, storage.get(key).replace(b'"step":12', b'"step":13'))
        said = (
            rf"line 5 \({re.escape(storage.uri_of(key))}, line 3\): it was altered .* "
            r"--from-checkpoint"
        )
    else:
        storage.delete(key)
        said = (
            r"of epoch 1, segments before the 3th are missing; .* --from-checkpoint|segment 1 of "
            r"epoch 1 is missing"
        )
    for look in (machine(storage, tmp_path, "b").lines, machine(storage, tmp_path, "c").take_over):
        with pytest.raises(JournalDamaged, match=said):
            look()
    objects = {one: storage.get(one) for one in storage.list(PREFIX)}
    here = machine(storage, tmp_path, "d")
    before, stored, cut = here.without_damage()
    assert not here.folder.exists()
    assert of(before) == ([10, 11, "g10"] if harm == "line" else [])
    assert (
        str(here.folder / "journal-damaged-1.jsonl") in cut.said
        and f"{len(before)} lines before that count" in cut.said
    )
    journal = here.open_journal(3, stored, cut)
    journal.append(99.0, [], plan(99))
    journal.close()
    assert of(machine(storage, tmp_path, "b").lines()) == [*of(before), "g99"]
    assert objects.items() <= {one: storage.get(one) for one in storage.list(PREFIX)}.items()


def test_damage_that_is_on_this_machine_alone_is_cut_there(storage: Remote, tmp_path: Path) -> None:
    here = machine(storage, tmp_path, "a")
    dead = open_at(here, 1)
    dead.append(1.0, [], plan(1))
    steps(dead, 1, 3)
    dead._file.close()
    text = here.journal.read_bytes()
    here.journal.write_bytes(text.replace(b'"step":2', b'"step":3'))
    with pytest.raises(JournalDamaged, match=r"journal\.jsonl, line 3: it was altered"):
        here.take_over()
    before, stored, cut = here.without_damage()
    assert of(before) == ["g1", 1]
    journal = here.open_journal(2, stored, cut)
    journal.append(50.0, [], plan(2))
    journal.close()
    assert of(machine(storage, tmp_path, "b").lines()) == ["g1", 1, "g2"]


def damage(storage: Remote, key: str, harm: str) -> None:
    text = storage.get(key)
    match harm:
        case "missing":
            storage.delete(key)
        case "empty":
            storage.put(key, b"")
        case "cut":
            storage.put(key, text[:-5])
        case "no head":
            storage.put(key, text.partition(b"\n")[2])


def test_a_newer_version_is_refused(storage: Remote, tmp_path: Path) -> None:
    key = three(storage, tmp_path)[-1]
    storage.put(key, storage.get(key).replace(b'"v":1', b'"v":9', 1))
    with pytest.raises(SpecError, match="version 9 is newer than 1"):
        read_stored(storage)


def test_no_plan_while_storage_is_out_of_reach(storage: Remote, tmp_path: Path) -> None:
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    storage.broken = StorageFailed("out of reach")
    begun_s = time.monotonic()
    journal.append(1.0, [], plan(1))
    assert not journal.settled and "out of reach" in str(journal.trouble)
    steps(journal, 1, 1)  # what changes no plan continues
    assert time.monotonic() - begun_s < segments.WAIT_S
    storage.broken = None
    until(lambda: journal.settled, "the lines in their places")  # stored without being asked again
    journal.append(2.0, [], plan(2))
    assert journal.settled
    assert of(machine(storage, tmp_path, "b").lines()) == ["g1", 1, "g2"]
    storage.broken = StorageFailed("out of reach")
    steps(journal, 2, 1)
    with pytest.raises(
        LostContact, match="the journal's last lines are only in .* run it again"
    ) as raised:
        journal.close()
    assert raised.value.exit_code == 4


def test_storage_that_hangs_holds_nobody_up_for_long(
    storage: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "WAIT_S", 0.2)
    monkeypatch.setattr(segments, "CLOSE_MOST_S", 0.2)
    answers, put = threading.Event(), storage.put

    def hangs(key: str, data: bytes, if_absent: bool = False) -> bool:
        assert answers.wait(60)
        return put(key, data, if_absent)

    monkeypatch.setattr(storage, "put", hangs)
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    begun_s = time.monotonic()
    journal.append(1.0, [], plan(1))
    steps(journal, 1, 3)
    assert not journal.settled and time.monotonic() - begun_s < 10.0
    with pytest.raises(LostContact, match="does not answer; the journal's last lines are only in"):
        journal.close()
    answers.set()
    until(
        lambda: of(machine(storage, tmp_path, "b").lines()) == ["g1", 1, 2, 3],
        "the lines, seen from another machine",
    )


def test_a_segment_whose_answer_was_lost_is_not_written_twice(
    storage: Remote, tmp_path: Path
) -> None:
    journal = open_at(machine(storage, tmp_path, "a"), 1)
    storage.broken, storage.after = StorageFailed("no answer"), True
    journal.append(1.0, [], plan(1))
    assert not journal.settled
    storage.broken = None
    until(lambda: journal.settled, "the lines in their places")
    journal.append(2.0, [], plan(2))
    assert of(machine(storage, tmp_path, "b").lines()) == ["g1", "g2"]
    journal.close()


def test_two_drivers_of_one_epoch_are_told(storage: Remote, tmp_path: Path) -> None:
    one, two = (open_at(machine(storage, tmp_path, name), 1) for name in "ab")
    one.append(1.0, [], plan(1))
    with pytest.raises(SpecError, match="another driver writes the journal of this epoch"):
        two.append(1.0, [], plan(2))
    one.close()
    with pytest.raises(SpecError):
        two.close()


def test_on_a_real_server(
    s3: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = RunFolder.of(open_storage(s3.uri))
    assert (
        place.folder == tmp_path / "elastic_runs" / place.name
        and not place.exists()
        and place.storage.remote
    )
    journal = open_at(place, 1)
    journal.append(1.0, [], plan(1))
    steps(journal, 2, 1)
    journal.close()
    monkeypatch.chdir("/")
    assert of(RunFolder.of(open_storage(s3.uri)).lines()) == ["g1", 2]
    # the folder knows where the run is
    assert RunFolder.of(open_storage(tmp_path / "elastic_runs" / place.name)).uri == s3.uri
    assert place.age_s() < 60.0


def test_runs_of_one_name_in_two_storages_have_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (
        RunFolder.of(open_storage(f"s3://{bucket}/runs/baseline")) for bucket in ("ann", "bob")
    )
    assert one.folder == two.folder == tmp_path / "elastic_runs" / "baseline", "nobody has it yet"
    one.folder.mkdir(parents=True)
    (one.folder / "storage-uri").write_text(one.uri + "\n")
    assert RunFolder.of(one.storage).folder == one.folder
    assert RunFolder.of(two.storage).folder.name == key_of(two.uri) != key_of(one.uri)
    assert key_of(two.uri).startswith("baseline-") and RunFolder.of(two.storage).name == "baseline"
    (one.folder / "storage-uri").unlink()
    (one.folder / "journal.jsonl").write_text("")
    assert RunFolder.of(one.storage).folder != one.folder, "it is a run of this very folder"


def test_what_somebody_else_says_of_where_a_run_is_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "storage-uri").write_text(f"{tmp_path}/elsewhere/r\n")
    assert RunFolder.of(open_storage(str(tmp_path / "r"))).uri == f"{tmp_path}/elsewhere/r"
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(
        SpecError, match=f"user {owner} says there that the run is {tmp_path}/elsewhere/r"
    ):
        RunFolder.of(open_storage(str(tmp_path / "r")))


def test_a_folder_by_two_paths_is_one_storage(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert (
        key_of(str(tmp_path / "link" / "r"))
        == key_of(str(tmp_path / "r"))
        != key_of(str(tmp_path / "a" / "r"))
    )


def test_a_folder_needs_no_segments(tmp_path: Path) -> None:
    place = RunFolder.of(open_storage(tmp_path / "run"))
    journal = open_at(place, 1)
    journal.append(1.0, [], plan(1))
    journal.close()
    assert place.exists() and of(place.lines()) == ["g1"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["journal.jsonl"]
    at_s = time.time() - 1000
    os.utime(place.journal, (at_s, at_s))
    assert 999 < place.age_s() < 1100


def test_where_workers_write_what_they_print(storage: Remote, tmp_path: Path) -> None:
    """Nodes share the folder of a run that is in one; else those of this machine have it, and the
    others one of their own."""
    shared, remote = RunFolder.of(open_storage(tmp_path / "run")), machine(storage, tmp_path, "a")
    assert (
        shared.logs_of_workers(True)
        == shared.logs_of_workers(False)
        == shared.logs
        == tmp_path / "run" / "logs"
    )
    assert remote.logs_of_workers(True) == tmp_path / "a" / "logs"
    elsewhere = remote.logs_of_workers(False)
    assert elsewhere.name == remote.name and tmp_path / "a" not in elsewhere.parents


def test_runs_that_were_tried_in_a_repository_are_not_uploaded_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `ray job submit --working-dir .`: their checkpoints alone may be more than Ray takes."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    place = RunFolder.of(open_storage("elastic_runs/mine"))
    place.open_journal(1, StoredJournal()).close()
    (place.folder / "weights").write_bytes(bytes(100))
    sent: list[str] = []
    packaging._dir_travel(tmp_path, [], lambda path: sent.append(path.name), include_gitignore=True)
    assert "train.py" in sent and not {"mine", "weights", "journal.jsonl"} & set(sent)
    assert open_storage("elastic_runs").folders() == ["mine"]
    (tmp_path / "elastic_runs" / ".gitignore").write_text("# theirs\n")
    place.open_journal(2, StoredJournal()).close()
    assert (tmp_path / "elastic_runs" / ".gitignore").read_text() == "# theirs\n"


def test_a_run_begins_in_a_folder_of_which_only_its_own_part_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    real = Path.write_text

    def refused(path: Path, text: str) -> int:
        if path.name == ".gitignore":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", refused)
    place = RunFolder.of(open_storage("elastic_runs/mine"))
    place.open_journal(1, StoredJournal()).close()
    assert not (tmp_path / "elastic_runs" / ".gitignore").exists()
