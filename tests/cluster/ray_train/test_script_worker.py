"""What a restarted script asks of ray.train, in its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch

from elastic.cluster.ray_train.script_checkpoints import ReportedCheckpoints, key_in
from elastic.cluster.ray_train.script_output import StepReader
from elastic.cluster.ray_train.script_worker import RANKS, ScriptTrainWorker
from elastic.storage import LocalStorage


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one rank."""
    for variable in RANKS.values():
        monkeypatch.setenv(variable, "1" if "SIZE" in variable else "0")
    return tmp_path / "results" / "r"


def made(place: Path, checkpoint: str = "", generation: int = 1) -> ScriptTrainWorker:
    def ask(ask: str, said: Any = None, given: bool = False) -> Any:
        return [said, int(given)]

    told = {"run_uri": str(place), "generation": generation, "checkpoint": checkpoint}
    return ScriptTrainWorker(ask, told | {"resumed": generation > 1, "copies": ""})


def saved(folder: Path, text: str) -> ray.train.Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "state").write_text(text)
    return ray.train.Checkpoint.from_directory(folder)


def test_what_was_reported_last_is_there_in_the_next_group(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = made(place)
    assert worker.get_checkpoint() is None
    worker.report({"loss": 2.0, "epoch": 0}, checkpoint=saved(tmp_path / "a", "one"))
    mode = ray.train.CheckpointUploadMode.ASYNC
    worker.report(
        {"loss": torch.tensor(1.5), "note": "fine", "last": True, "epoch": 1},
        checkpoint=saved(tmp_path / "a", "two"), checkpoint_dir_name="epoch-1",
        checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=True,
        checkpoint_upload_fn=None, validation=False,
    )  # fmt: skip
    assert not (tmp_path / "a").exists()
    worker.report({"loss": 1.0})
    stored = ReportedCheckpoints(LocalStorage(place))
    assert stored.newest() == key_in(1, 2, "epoch-1")
    found = worker.get_checkpoint()
    assert found is not None and (Path(found.to_directory()) / "state").read_text() == "two"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == 'ray.train.report 2: {"loss": 1.5, "epoch": 1}'
    reader = StepReader()
    assert [reader.read(line) for line in lines] == [(1, 2.0), (2, 1.5), (3, 1.0)]

    after = made(place, stored.newest(), generation=2)
    found = after.get_checkpoint()
    assert found is not None
    with found.as_directory() as folder:
        assert (Path(folder).name, (Path(folder) / "state").read_text()) == ("epoch-1", "two")
    after.report({"loss": 0.9}, checkpoint=saved(tmp_path / "b", "three"))
    assert stored.newest() == key_in(2, 3, "checkpoint_000003"), "counted over the run"
    assert capsys.readouterr().out.startswith("ray.train.report 3: ")


def test_reports_after_a_cut_journal_are_newer_than_those_before(
    place: Path, tmp_path: Path
) -> None:
    stored = ReportedCheckpoints(LocalStorage(place))
    made(place, generation=12).report({"loss": 2.0}, checkpoint=saved(tmp_path / "a", "one"))
    for generation, text in ((3, "two"), (4, "three")):  # counted anew
        after = made(place, stored.newest(), generation)
        after.report({"loss": 1.5}, checkpoint=saved(tmp_path / "a", text))
        found = made(place, stored.newest(), generation + 1).get_checkpoint()
        assert found is not None and (Path(found.path) / "state").read_text() == text


def test_parts_of_a_group_that_was_killed_make_room_for_the_first_report(
    place: Path, tmp_path: Path
) -> None:
    stored = ReportedCheckpoints(LocalStorage(place))
    before = made(place)
    for text in ("one", "two"):
        before.report({}, checkpoint=saved(tmp_path / "a", text))
    stored.add(key_in(1, 3, "cut"), tmp_path / "a")
    made(place, stored.newest(), generation=2).report({})
    names = {key.split("/")[1] for key in stored.storage.list("reported/")}
    assert {name.removesuffix(".json") for name in names} == {
        f"00000001-0000000{n}" for n in (1, 2)
    }


def test_what_has_no_meaning_is_refused_by_its_name(place: Path, tmp_path: Path) -> None:
    worker, checkpoint = made(place), saved(tmp_path / "a", "one")
    given: dict[str, Any] = {
        "checkpoint_upload_fn": print,
        "validation": True,
        "checkpoint_upload_mode": ray.train.CheckpointUploadMode.NO_UPLOAD,
        "of_a_later_ray": 1,
    }
    for name, value in given.items():
        with pytest.raises(RuntimeError, match=rf"report\({name}=...\) is not there"):
            worker.report({}, checkpoint=checkpoint, **{name: value})
    for name in ("get_dataset_shard", "get_all_reported_checkpoints", "barrier"):
        with pytest.raises(RuntimeError, match=f"'{name}' is not there for a script"):
            getattr(worker, name)
    assert ReportedCheckpoints(LocalStorage(place)).newest() == ""


def test_the_ranks_are_those_of_the_environment(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, variable in enumerate(RANKS.values(), 3):
        monkeypatch.setenv(variable, str(value))
    context = made(place).get_context()
    assert isinstance(context, ray.train.TrainContext)
    assert (context.get_world_rank(), context.get_world_size()) == (3, 4)
    assert (context.get_local_rank(), context.get_local_world_size()) == (5, 6)
    assert (context.get_node_rank(), context.get_experiment_name()) == (7, "r")
    assert context.get_storage().experiment_fs_path == str(place)


def test_a_device_is_that_of_the_local_rank(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert not made(place).is_distributed() and chosen == [2]


def test_reports_of_a_script_that_saves_otherwise_have_no_number_after_a_restart(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may continue anywhere."""
    worker = made(place, generation=2)
    worker.report({"loss": 2.0})
    worker.report({"loss": 1.5}, checkpoint=saved(tmp_path / "a", "one"))
    worker.report({"loss": 1.0})
    lines, reader = capsys.readouterr().out.splitlines(), StepReader()
    assert lines[0] == 'ray.train.report: {"loss": 2.0}'
    assert [reader.read(line) for line in lines] == [None, None, (3, 1.0)]


def test_more_numbers_than_a_run_may_have_are_left_out(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(place).report({f"name{k}": k for k in range(100)})
    (line,) = capsys.readouterr().out.splitlines()
    assert len(json.loads(line.partition(": ")[2])) == 64
