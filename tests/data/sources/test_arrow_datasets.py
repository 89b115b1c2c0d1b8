"""`dataset:` of job.yaml: what the library `datasets` reads, tokenized once per node for all who
ask; a Dataset that a program hands over itself."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.places import ROOT
from support.waiting import until

from elastic.config.data_section import SourceSpec
from elastic.config.job import job_of
from elastic.data import progress
from elastic.data.batches import Unread, batch_of, item_of
from elastic.data.budget import Microbatch
from elastic.data.collate import collate
from elastic.data.loader_processes import Readers
from elastic.data.open_datasets import dataset_of
from elastic.data.order import sample_ids
from elastic.data.sources import arrow_datasets
from elastic.data.sources.arrow_datasets import FORMATS, ArrowRows
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.text_folder import python_stdlib_folder
from elastic.errors import SpecError
from elastic.program import Program
from elastic.types import Job

datasets = pytest.importorskip("datasets", reason="the extra `datasets`")

FILES = sorted(python_stdlib_folder().glob("*.py"))[:24]
TEXTS = [path.read_text("utf-8", "replace")[:700] for path in FILES]
ROWS = [{"body": text, "ids": [i, i + 1, 7], "score": i / 2} for i, text in enumerate(TEXTS)]
STREAM = b"".join(text.encode() + b"\0" for text in TEXTS)
SOURCES: dict[str, dict[str, Any]] = {
    "saved": {"dataset": "saved"},
    "split": {"dataset": "splits", "split": "train"},
    "arrow": {"dataset": "saved", "pattern": "*.arrow", "format": "arrow"},
    "json": {"dataset": "rows.jsonl"},
    "gzip": {"dataset": "packed"},
    "parquet": {"dataset": "rows.parquet", "format": "parquet"},
    "csv": {"dataset": "csv"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job folder with the same rows in each format."""
    folder = tmp_path_factory.mktemp("job")
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(folder / "rows.parquet")
    made.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": made, "test": made.select([3])}).save_to_disk(folder / "splits")
    (folder / "packed").mkdir()
    made.to_json(folder / "packed" / "rows.jsonl.gz", compression="gzip")
    (folder / "csv").mkdir()
    made.remove_columns(["ids"]).to_csv(folder / "csv" / "rows.csv")
    (folder / "lines.txt").write_text("".join(f"line {i}\n" for i in range(9)))
    (folder / "bad.jsonl").write_text('{"body": "good"}\n{"body": \n')
    (folder / "bad.parquet").write_text("no Parquet")
    return folder


def job(place: Path, source: dict[str, Any], **data: Any) -> Job:
    spec = job_of(
        {"steps": 1, "global_batch": 1, "data": {"train": source, **data}}, place / "program.py"
    )
    return Job.from_plain(json.loads(json.dumps(spec.plain())))


NONE = Program(
    model=lambda: None, optimizer=lambda named: None, dataset=None, loss=lambda output, batch: None
)


def opened(place: Path, source: dict[str, Any]) -> Any:
    return dataset_of(NONE, job(place, source))


def tokens(dataset: Any) -> list[int]:
    return [int(i) for n in range(len(dataset)) for i in dataset[n]["input"]]


@pytest.mark.parametrize("form", SOURCES)
def test_the_same_text_from_each_format(place: Path, form: str) -> None:
    source = {**SOURCES[form], "text": "body", "tokenizer": "bytes", "seq": 50}
    found = opened(place, source)
    assert len(found) == (len(STREAM) - 1) // 50
    assert bytes(tokens(found)) == STREAM[: 50 * len(found)]
    whole = opened(place, {**source, "pack": "whole", "seq": 900})
    n_targets = sum(int((whole[i]["target"] != -100).sum()) for i in range(len(whole)))
    assert n_targets == len(STREAM) - len(TEXTS), "each document whole, none into the next"


@pytest.mark.parametrize("form", [form for form in SOURCES if form != "csv"])
def test_columns_of_numbers_are_samples(place: Path, form: str) -> None:
    found = opened(place, {**SOURCES[form], "columns": ["ids", "score"]})
    assert len(found) == len(ROWS)
    assert found[5]["ids"].tolist() == [5, 6, 7] and float(found[5]["score"]) == 2.5
    assert found.length(5) == 3
    ids = opened(place, {**SOURCES[form], "text": "ids", "tokenizer": "none", "seq": 3})
    assert tokens(ids)[:9] == [0, 1, 7, 1, 2, 7, 2, 3, 7]


def test_lines_of_text_and_a_slice_of_them(place: Path) -> None:
    source = {"dataset": "lines.txt", "tokenizer": "bytes", "seq": 6, "pack": "pad"}
    assert len(opened(place, source)) == 9
    found = opened(place, {**source, "split": "train[3:5]"})
    assert bytes(tokens(found)) == b"line 3line 4"


def test_chosen_rows_of_a_saved_dataset(place: Path, tmp_path: Path) -> None:
    """The library keeps such a choice as an index beside the files."""
    chosen = datasets.Dataset.from_list(ROWS).select([7, 2, 11])
    chosen.save_to_disk(tmp_path / "chosen")
    found = opened(tmp_path, {"dataset": "chosen", "columns": ["score"]})
    assert [float(found[i]["score"]) for i in range(3)] == [3.5, 1.0, 5.5]


@pytest.mark.e2e
def test_once_per_node_whoever_asks(place: Path, tmp_path: Path, own_cache: Path) -> None:
    """Two processes at once: one converts and tokenizes, the other finds it, and both map it."""
    spec = job(place, {"dataset": "rows.jsonl", "text": "body", "tokenizer": "bytes", "seq": 50})
    code = (
        "import sys, pickle\n"
        "from elastic.data.open_datasets import dataset_of\n"
        "from elastic.data.sources.arrow_datasets import ArrowTokens\n"
        "from elastic.program import Program\n"
        "made, write = [], ArrowTokens._write\n"
        "ArrowTokens._write = lambda self, into: (made.append(1), write(self, into))\n"
        "no = lambda *a: None\n"
        "job = pickle.load(open(sys.argv[1], 'rb'))\n"
        "found = dataset_of(Program(model=no, optimizer=no, dataset=None, loss=no), job)\n"
        "import hashlib\n"
        "total = hashlib.sha256(b''.join(found[i]['input'].tobytes() for i in range(len(found))))\n"
        "maps = sum('tokens.arrow' in line for line in open('/proc/self/maps'))\n"
        "print(len(made), maps > 0, total.hexdigest(), 'torch' in sys.modules)\n"
    )
    (tmp_path / "job").write_bytes(pickle.dumps(spec))
    command = [sys.executable, "-c", code, str(tmp_path / "job")]
    asked = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    said = [one.communicate(timeout=300)[0].decode().split() for one in asked]
    assert [one.returncode for one in asked] == [0] * 2
    assert sorted(made for made, *_ in said) == ["0", "1"]
    assert len({tuple(rest) for _, *rest in said}) == 1 and said[0][1] == "True"
    assert said[0][3] == "False", "a loader process needs no torch for it"
    built = {path.name.rpartition("-")[0] for path in (own_cache / "built").iterdir()}
    assert built == {"datasets", "arrow-tokens"}


def test_files_that_changed_are_tokenized_anew(tmp_path: Path) -> None:
    source = {"dataset": "rows.jsonl", "text": "body", "tokenizer": "bytes", "seq": 2}
    (tmp_path / "rows.jsonl").write_text('{"body": "one"}\n')
    assert bytes(tokens(opened(tmp_path, source))) == b"on"
    (tmp_path / "rows.jsonl").write_text('{"body": "another"}\n')
    assert bytes(tokens(opened(tmp_path, source))) == b"anothe"


def test_it_says_that_it_makes_progress(
    place: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(arrow_datasets, "LOOK_S", 0.01)
    real = datasets.load_dataset

    def slow(*args: Any, cache_dir: str, **more: Any) -> Any:
        part = Path(cache_dir) / "part"

        def grows() -> bool:
            part.write_bytes(bytes(part.stat().st_size + 1 if part.exists() else 0))
            return heard.count("elastic-conversion") > 3

        if ".datasets" in cache_dir:  # while it is built
            until(grows, "to hear of a file that grows")
        return real(*args, cache_dir=cache_dir, **more)

    monkeypatch.setattr(datasets, "load_dataset", slow)
    with progress.heard_by(lambda: heard.append(threading.current_thread().name)):
        opened(place, {"dataset": "rows.jsonl", "text": "body", "tokenizer": "bytes", "seq": 2})
    assert threading.current_thread().name in heard, "while they are tokenized"


def test_a_folder_that_goes_away_while_it_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_bytes(b"123")
    gone, real = tmp_path / "gone", os.scandir
    gone.mkdir()

    def scandir(path: Any = ".") -> Any:
        if Path(path) == gone and gone.exists():
            gone.rmdir()
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert arrow_datasets._bytes_in(tmp_path) == 3 and not gone.exists()


MISTAKES = [
    ({"dataset": "absent.jsonl"}, "data.train: .*absent.jsonl: no such folder or file"),
    ({"dataset": "s3://bucket/rows"}, "s3://bucket/rows: the library .* jsonl, parquet or hugg"),
    ({"dataset": "bad.jsonl"}, r"bad\.jsonl: datasets cannot read it \(JSON parse error.*row 1"),
    ({"dataset": "bad.parquet"}, r"bad\.parquet: datasets cannot read it \(Parquet magic"),
    ({"dataset": "rows.jsonl", "split": "test"}, r"rows.jsonl: datasets cannot read it .*\"test\""),
    ({"dataset": "saved", "split": "test"}, "saved: it has no splits; leave split 'test' out"),
    ({"dataset": "splits"}, "it has several splits: give split; there are train, test"),
    ({"dataset": "splits", "split": "no"}, "no split 'no'; there are train, test"),
    ({"dataset": ".", "pattern": "rows.*"}, "files of json, parquet: give format"),
    ({"dataset": ".", "pattern": "*.odd"}, r"no file matches '\*\.odd'"),
    ({"dataset": "lines.txt", "format": "csv", "text": "x", "tokenizer": "bytes", "seq": 2},
     "lines.txt: no column 'x'; it has line 0"),
    ({"dataset": "rows.jsonl", "tokenizer": "bytes", "seq": 2}, "no column 'text'; it has body"),
    ({"dataset": "rows.jsonl", "text": "score", "tokenizer": "bytes", "seq": 2},
     r"rows.jsonl, row 1, field 'score': a text was wanted, it holds a float"),
    ({"dataset": "rows.jsonl"}, "rows.jsonl, row 1: 'body' is no number or tensor"),
    ({"dataset": "rows.jsonl", "format": "xml"}, "key 'data.train.format': input should be 'arrow'"),
    ({"jsonl": "rows.jsonl", "format": "json"}, "'format' belongs to dataset, not to jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "says"), MISTAKES)
def test_each_mistake_is_one_line(place: Path, source: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        opened(place, source)
    said = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in said and re.search(says, said), said


def test_a_file_without_a_name_that_says_what_it_is(place: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes((place / "rows.jsonl").read_bytes())
    with pytest.raises(SpecError, match=r"'odd': give format \(arrow, json, parquet, csv, text\)"):
        opened(tmp_path, {"dataset": "odd"})
    assert len(opened(tmp_path, {"dataset": "odd", "format": "json", "columns": ["score"]})) == 24


def test_bars_stay_as_they_were(place: Path) -> None:
    datasets.enable_progress_bars()
    try:
        ArrowRows(place / "rows.jsonl", cache=BlockCache())
        assert not datasets.are_progress_bars_disabled()
    finally:
        datasets.disable_progress_bars()


def test_the_model_knows_all_formats() -> None:
    said = str(SourceSpec.model_fields["format"].annotation)
    assert re.findall(r"'(\w+)'", said) == [*FORMATS]


@pytest.mark.slow
def test_loader_processes_read_the_same(place: Path) -> None:
    source = {"dataset": "rows.parquet", "text": "body", "tokenizer": "bytes", "seq": 50}
    spec = job(place, source)
    readers = Readers(spec, 1)
    try:
        part = Microbatch(tuple(sample_ids(100, 4, 3, step=1)), None)
        (found,) = readers.each[0].load([part], 0)
    finally:
        readers.close()
    mine = batch_of(partial(item_of, opened(place, source)), part, collate)
    assert np.array_equal(found["input"], mine["input"].numpy())


# ------------------------------------------------------------------------- a Dataset of the program


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
@pytest.mark.parametrize("way", ["as it is", "pickled", "saved", "loaded"])
def test_a_dataset_is_a_programs_data(place: Path, kind: str | None, way: str) -> None:
    given = {
        "as it is": lambda: datasets.Dataset.from_list(ROWS),
        "pickled": lambda: pickle.loads(pickle.dumps(datasets.Dataset.from_list(ROWS))),
        "saved": lambda: pickle.loads(pickle.dumps(datasets.load_from_disk(place / "saved"))),
        "loaded": lambda: datasets.load_dataset(
            "json", data_files=str(place / "rows.jsonl"), split="train", cache_dir=place / "hub"
        ),
    }[way]().select_columns(["ids", "score"]).with_format(kind)  # fmt: skip
    program = Program(
        model=lambda: None, optimizer=lambda n: None, dataset=lambda: given, loss=lambda o, b: None
    )
    found = dataset_of(program, Job(global_batch=3))
    batch = batch_of(partial(item_of, found), Microbatch((4, 0, 9), None), collate)
    assert batch["ids"].tolist() == [[4, 5, 7], [0, 1, 7], [9, 10, 7]]
    assert batch["score"].tolist() == [2.0, 0.0, 4.5]


def test_a_column_of_text_is_named() -> None:
    with pytest.raises(Unread) as caught:
        batch_of(
            partial(item_of, datasets.Dataset.from_list(ROWS)), Microbatch((4,), None), collate
        )
    assert "'body' of an item cannot become a tensor" in caught.value.text


def test_an_iterable_dataset_is_a_stream_that_continues() -> None:
    rows = datasets.Dataset.from_list(ROWS).select_columns(["ids"])
    program = Program(
        model=lambda: None,
        optimizer=lambda n: None,
        dataset=lambda: rows.to_iterable_dataset(num_shards=3),
        loss=lambda o, b: None,
    )
    first, other = (dataset_of(program, Job(global_batch=4)) for _ in range(2))
    read = [first[position]["ids"][0] for position in range(12)]
    first.taken(1)
    state = json.loads(json.dumps(first.state_dict()))
    other.load_state_dict(state)
    again = [other[position]["ids"][0] for position in range(8, 32)]
    assert read + again[4:] == [i % 24 for i in range(32)] and again[:4] == read[8:]
