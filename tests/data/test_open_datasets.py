"""`data:` of job.yaml: each kind of source without a line of Python, and one line for each
mistake."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from elastic.config.data_section import DataSpec, SourceSpec
from elastic.config.job import job_of
from elastic.data.open_datasets import PhaseData, Sets, dataset_of, validation_of
from elastic.data.progress import heard_by
from elastic.data.sources.parquet import write_rows
from elastic.errors import SpecError
from elastic.program import Program
from elastic.storage import Storage, open_storage
from elastic.types import Job

tokenizers = pytest.importorskip("tokenizers", reason="tokenizer files need the library")

TEXTS = ["one two three", "four five six seven", "eight", "nine ten"] * 5
NONE = Program(
    model=lambda: None, optimizer=lambda named: None, dataset=None, loss=lambda output, batch: None
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A job folder with data of each kind."""
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:02d}.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"body": text, "ids": [i, 5, 6]}) + "\n" for i, text in enumerate(TEXTS))
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "rows.parquet")
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    write_rows(open_storage(tmp_path / "indexed"), [{"x": np.arange(5)}], "train")
    words = sorted(set(" ".join(TEXTS).split()))
    vocabulary = {word: i for i, word in enumerate([*words, "<|endoftext|>", "<unk>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path


def opened(place: Path, **data: Any) -> Any:
    return dataset_of(NONE, Job.from_plain(job(place, data)))


def job(place: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """As it stands in the journal; `microbatch_tokens` is a key of the job."""
    keys = {"microbatch_tokens": data["microbatch_tokens"]} if "microbatch_tokens" in data else {}
    data = {key: value for key, value in data.items() if key not in keys}
    spec = job_of(
        {"steps": 1, "global_batch": 1, "data": data, **keys}, place / "program.py", "job.yaml"
    )
    plain = json.loads(json.dumps(spec.plain()))
    assert DataSpec.model_validate(plain["data"]) == spec.data
    return plain


def refused(place: Path, **data: Any) -> str:
    with pytest.raises(SpecError) as caught:
        opened(place, **data)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def tokens(dataset: Any) -> list[int]:
    return [int(i) for n in range(len(dataset)) for i in dataset[n]["input"]]


STREAM = b"".join(text.encode() + b"\0" for text in TEXTS)
SOURCES: dict[str, dict[str, Any]] = {
    "folder": {"folder": "texts", "seq": 8},
    "folder_tokenised": {"folder": "texts", "seq": 8, "tokenizer": "bytes", "end_token": None},
    "jsonl": {"jsonl": "rows.jsonl", "text": "body", "tokenizer": "bytes", "seq": 8},
    "parquet": {"parquet": "rows.parquet", "tokenizer": "bytes", "seq": 8, "pack": False},
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_text_from_each_source(place: Path, source: str) -> None:
    found = opened(place, train=SOURCES[source])
    assert len(found) == (len(STREAM) - 1) // 8
    assert bytes(tokens(found)) == STREAM[: 8 * len(found)]
    assert sorted(found[0]) == ["input", "target"]


@pytest.mark.parametrize("source", SOURCES)
def test_packed(place: Path, source: str) -> None:
    keep = {key: value for key, value in SOURCES[source].items() if key != "pack"}
    whole = opened(place, train={**keep, "seq": 24, "pack": "whole"})
    assert sorted(whole[0]) == ["document", "input", "position", "target"]
    assert sum(int((whole[i]["target"] != -100).sum()) for i in range(len(whole))) == len(
        STREAM
    ) - len(TEXTS)
    cut = opened(place, train={**keep, "pack": True})
    assert bytes(tokens(cut)) == STREAM[: 8 * len(cut)] and cut[1]["document"][-1] > 0
    padded = opened(place, train={**keep, "pack": "pad"})
    assert len(padded) == len(TEXTS) and bytes(padded[2]["input"].tolist()) == b"eight\0\0\0"


@pytest.mark.parametrize("path", ["model", "model/tokenizer.json"])
@pytest.mark.parametrize("source", ["folder", "jsonl", "parquet"])
def test_a_tokenizer_file(place: Path, path: str, source: str) -> None:
    found = opened(place, train={**SOURCES[source], "tokenizer": path, "seq": 1})
    vocabulary = json.loads((place / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    wanted = [vocabulary[word] for text in TEXTS for word in [*text.split(), "<|endoftext|>"]]
    assert tokens(found) == wanted[:-1]


def test_text_is_tokenised_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    source = {"jsonl": "rows.jsonl", "text": "body", "tokenizer": "model", "seq": 4}
    heard: list[int] = []
    with heard_by(lambda: heard.append(1)):
        first = tokens(opened(place, train=source))
    kept = sorted((own_cache / "built").iterdir())
    assert heard, "it said that it makes progress"
    monkeypatch.setattr("elastic.data.sources.tokenizers.TokenizerFile.encode", None)
    assert tokens(opened(place, train=source)) == first
    assert tokens(opened(place, train={**source, "seq": 2, "pack": "cut"}))[: len(first)] == first
    assert sorted((own_cache / "built").iterdir()) == kept
    monkeypatch.undo()
    monkeypatch.setenv("ELASTIC_CACHE", str(own_cache))
    (kept[0] / "tokens.bin").write_bytes(b"cut off")
    assert tokens(opened(place, train=source)) == first
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"body": "ten"}\n')
    assert len(tokens(opened(place, train={**source, "seq": 1}))) == len(
        tokens(opened(place, train={**source, "seq": 1}))
    )
    assert len([*(own_cache / "built").iterdir()]) > len(kept)


def test_fields_of_ids_and_of_numbers(place: Path) -> None:
    found = opened(
        place,
        train={
            "jsonl": "rows.jsonl",
            "text": "ids",
            "tokenizer": "none",
            "seq": 3,
            "pack": "whole",
        },
    )
    assert len(found) == 20 and found[7]["input"].tolist() == [7, 5, 6]
    numbers = opened(place, train={"jsonl": "rows.jsonl", "columns": ["ids"]})
    assert numbers[7]["ids"].tolist() == [7, 5, 6]
    files = opened(
        place,
        train={"tokens": "train.bin", "dtype": "uint16", "seq": 9, "end_token": 30, "pack": "cut"},
    )
    assert len(files) == 11 and files[3]["target"].tolist() == [
        28,
        29,
        30,
        -100,
        32,
        33,
        34,
        35,
        36,
    ]
    assert len(opened(place, train="indexed")) == len(opened(place, train={"rows": "indexed"})) == 5


@pytest.mark.parametrize(("pack", "looked_for"), [("stream", False), ("cut", True)])
def test_ends_of_documents_are_looked_for_where_a_sample_has_them(
    place: Path, own_cache: Path, pack: str, looked_for: bool
) -> None:
    source = {"tokens": "train.bin", "dtype": "uint16", "seq": 9, "end_token": 30, "pack": pack}
    found = opened(place, train=source)
    assert len(found) == 11 and found[3]["input"].tolist() == [*range(27, 36)]
    assert any(path.name.startswith("ends-") for path in (own_cache / "built").iterdir()) == (
        looked_for
    )


def test_mixtures_hand_on_what_their_parts_do_not_say(place: Path) -> None:
    parts = {
        "files": {"folder": "texts", "weight": 3},
        "lines": {"jsonl": "rows.jsonl", "text": "body", "weight": 1},
    }
    found = opened(
        place,
        train={"mixture": parts, "tokenizer": "bytes", "seq": 8, "pack": "cut", "samples": 40},
    )
    assert (
        len(found) == 40
        and found.counts == [30, 10]
        and sorted(found[39]) == ["document", "input", "position", "target"]
    )
    tokens_too = {**parts, "ids": {"tokens": "train.bin", "dtype": "uint16", "weight": 1, "seq": 4}}
    said = refused(place, train={"mixture": tokens_too, "tokenizer": "bytes", "seq": 8})
    assert said.startswith(
        "data.train: part 'ids' of the mixture gives input int64 [4], target int64 [4], part "
        "'files' input"
    )


def test_validation_sets_by_name(place: Path) -> None:
    one = validation_of(NONE, Job.from_plain(job(place, {"validation": SOURCES["folder"]})))
    assert len(one) == (len(STREAM) - 1) // 8
    several = validation_of(
        NONE,
        Job.from_plain(job(place, {"validation": {"prose": SOURCES["jsonl"], "rows": "indexed"}})),
    )
    assert (
        isinstance(several, Sets) and [*several] == ["prose", "rows"] and len(several["rows"]) == 5
    )
    assert validation_of(NONE, Job()) is None
    with pytest.raises(SpecError, match=r"data\.validation\.b: .*absent: no such folder"):
        validation_of(
            NONE,
            Job.from_plain(
                job(place, {"validation": {"a": SOURCES["jsonl"], "b": {"jsonl": "absent"}}})
            ),
        )


def test_under_s3(place: Path, s3: Storage) -> None:
    s3.put("rows.jsonl", (place / "rows.jsonl").read_bytes())
    found = opened(place, train={**SOURCES["jsonl"], "jsonl": s3.uri_of("rows.jsonl")})
    assert bytes(tokens(found)) == STREAM[: 8 * len(found)]


def test_what_does_not_fit_into_the_cache_is_said_once_it_is_open(place: Path, s3: Storage) -> None:
    """By what samples are read from, of all parts together: not by text that is tokenized once."""
    s3.put("a.bin", bytes(3_000_000))
    s3.put("b.bin", bytes(3_000_000))
    s3.put("text.jsonl", b'{"text": "' + bytes([65]) * 5_000_000 + b'"}')

    def notes(cache_gb: float, **train: Any) -> tuple[str, ...]:
        return PhaseData.of(
            NONE, Job.from_plain(job(place, {"train": train, "cache_gb": cache_gb}))
        ).notes

    parts = {name: {"tokens": s3.uri_of(f"{name}.bin"), "dtype": "uint8"} for name in "ab"}
    both = {"mixture": parts, "seq": 4}
    assert notes(0.0061, **both) == notes(0.005, **parts["a"], seq=4) == ()
    assert notes(0.005, **both) == (
        "data.train: 0.006 GB in object storage do not fit into a node's cache (data.cache_gb: "
        "0.005): a sample that is not in it is fetched each time; raise data.cache_gb where the "
        "nodes' disks have room",
    )
    assert not notes(0.0045, jsonl=s3.uri_of("text.jsonl"), tokenizer="bytes", seq=4)
    assert not notes(0.0045, folder="texts", seq=4)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"jsonl": "absent.jsonl", "tokenizer": "bytes", "seq": 4},
        "data.train: .*absent.jsonl: no such folder or file"), ({"jsonl": "rows.jsonl",
        "tokenizer": "bytes", "seq": 4},
        "rows.jsonl, line 1: no field 'text'; it has 'body', 'ids'"), ({"jsonl": "rows.jsonl",
        "text": "ids", "tokenizer": "bytes", "seq": 4}, "line 1, field 'ids': a text was wanted"),
        ({"jsonl": "rows.jsonl", "text": "body", "tokenizer": "none", "seq": 4},
        "line 1, field 'body': .* wants a list"), ({"jsonl": "rows.jsonl", "text": "body",
        "seq": 4}, "data.train: key 'tokenizer' is missing: bytes, the path of"),
        ({"jsonl": "rows.jsonl", "text": "body", "tokenizer": "bytes"},
        "data.train: key 'seq' is missing"), ({"jsonl": "rows.jsonl", "text": "body",
        "tokenizer": "no", "seq": 4}, "tokenizer .*no: no such file; it must be"),
        ({"folder": "texts", "tokenizer": "rows.jsonl", "seq": 4},
        "rows.jsonl: no file of the tokenizers library"), ({"folder": "texts", "tokenizer": "model",
        "end_token": "<x>", "seq": 4}, "it has no token '<x>' to end"), ({"folder": "texts",
        "tokenizer": "bytes", "end_token": "<x>", "seq": 4},
        "tokenizer 'bytes' has no texts for tokens"), ({"folder": "texts", "seq": 4000},
        "data.train: it holds 245 tokens; one sample of seq=4000 needs 4001"),
        ({"tokens": "train.bin", "seq": 4},
        "data.train: .*train.bin: a raw token file does not say what it holds"),
        ({"jsonl": "rows.jsonl"}, "rows.jsonl, line 1: 'body' is no number or tensor"), ("absent",
        "data.train: .*absent: no index.json there"), ({"seq": 4},
        "key 'data.train': a source has exactly one of rows, folder, .* not none"), ({"folder": "a",
        "tokens": "b"}, "exactly one of .* not folder, tokens"), ({"folder": "a", "text": "b"},
        "'text' belongs to jsonl or parquet or huggingface or dataset, not to folder"), ({"rows": "a",
        "seq": 4, "pack": "whole"}, "'seq' belongs to folder or jsonl .* or tokens, not to rows"),
        ({"tokens": "a", "tokenizer": "bytes"}, "'tokenizer' belongs to folder or .*, not to tokens"),
        ({"jsonl": "rows.jsonl", "pack": "whole"}, "key 'tokenizer' is missing"), ({"jsonl": "a",
        "columns": ["x"], "seq": 3}, "'columns' are fields of numbers"), ({"mixture": {}},
        "a mixture needs parts"), ({"mixture": {"a": {"folder": "x", "weight": 1},
        "b": {"folder": "y"}}}, "part 'b' of the mixture has no weight"), ({"folder": "a",
        "sek": 3}, r"unknown key 'data.train.sek'; did you mean 'seq'\?"), ({"folder": "a",
        "pack": "tight"}, "key 'data.train.pack': input should be 'stream', .* or 'document'"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line(place: Path, train: Any, says: str) -> None:
    said = refused(place, train=train)
    assert re.search(says, said), said


def test_a_mixture_hands_on_what_a_part_can_use() -> None:
    made = SourceSpec.model_validate(
        {
            "mixture": {"a": {"rows": "x"}, "b": {"tokens": "y"}, "c": {"folder": "z", "seq": 8}},
            "seq": 4,
            "tokenizer": "bytes",
        }
    )
    assert {name: part.plain() for name, part in made.parts().items()} == {
        "a": {"rows": "x"},
        "b": {"tokens": "y", "seq": 4},
        "c": {"folder": "z", "seq": 8, "tokenizer": "bytes"},
    }


def test_without_the_library_it_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = refused(place, train={"dataset": "rows.jsonl", "tokenizer": "bytes", "seq": 2})
    assert said == (
        "data.train: the package 'datasets' is not there; pip install 'elastic-ray[datasets]'"
    )


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (NoLength(), r"Program\.dataset: a NoLength has no len\(\)"),
        (iter([1]), r"Program\.dataset: a list_iterator has no \[sample id\]"),
        ([], r"Program\.dataset: it has no samples"),
    ],
)
def test_a_dataset_of_the_program(dataset: Any, says: str) -> None:
    program = Program(
        model=lambda: None,
        optimizer=lambda n: None,
        dataset=lambda: dataset,
        loss=lambda o, b: None,
    )
    with pytest.raises(SpecError, match=says):
        dataset_of(program, Job())


def test_documents_by_themselves(place: Path) -> None:
    """Of the same corpus as `pad`, without the filling; their lengths are known without reading
    them."""
    source = {"jsonl": "rows.jsonl", "text": "body", "tokenizer": "bytes", "seq": 9}
    alone, filled = (
        opened(place, train={**source, "pack": pack}, microbatch_tokens=20)
        for pack in ("document", "pad")
    )
    assert len(alone) == len(filled) == len(TEXTS)
    for i, text in enumerate(TEXTS):
        n = min(len(text.encode()) + 1, 9)
        assert (
            alone.length(i) == n == len(alone[i]["input"]) == len(alone[i]["target"])
            and filled.length(i) == 9
        )
        assert all((alone[i][key] == filled[i][key][:n]).all() for key in ("input", "target"))
        assert set(filled[i]["target"][n:].tolist()) <= {-100}
    both = {"a": source, "b": {"folder": "texts"}}
    mixed = opened(
        place,
        train={"mixture": both, "tokenizer": "bytes", "seq": 9, "pack": "document"},
        microbatch_tokens=20,
    )
    assert all(mixed.length(i) == len(mixed[i]["input"]) for i in range(len(mixed)))


def test_lists_of_unequal_length(place: Path) -> None:
    rows = [
        {"n": 1, "input_ids": list(range(i % 7 + 1)), "attention_mask": [1] * (i % 7 + 1)}
        for i in range(20)
    ]
    (place / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "lists.parquet")
    for kind in ("jsonl", "parquet"):
        found = opened(place, train={kind: f"lists.{kind}"}, microbatch_tokens=7)
        assert [found.length(i) for i in range(20)] == [i % 7 + 1 for i in range(20)]
        assert [len(found[i]["input_ids"]) for i in range(20)] == [i % 7 + 1 for i in range(20)]
    assert re.search(
        r"data.train: .*lists.jsonl, line 7: a sample of 7 tokens, microbatch_tokens is 6; raise "
        r"it",
        refused(place, train={"jsonl": "lists.jsonl"}, microbatch_tokens=6),
    )
    indexed = opened(place, train={"rows": "indexed"}, microbatch_tokens=7)
    assert indexed.length(0) == len(np.atleast_1d(indexed[0]["x"]))


def test_a_program_whose_samples_have_no_lengths() -> None:
    def program(dataset: Any) -> Program:
        return Program(
            model=len, optimizer=len, dataset=dataset, loss=len, validation=lambda: [{"x": 1}]
        )

    with pytest.raises(
        SpecError, match="Program.dataset: microbatch_tokens needs .*; give list a method length"
    ):
        dataset_of(program(lambda: [{"x": 1}]), Job(microbatch_tokens=9))
    with pytest.raises(SpecError, match="Program.validation: microbatch_tokens needs"):
        validation_of(program(None), Job(microbatch_tokens=9))
