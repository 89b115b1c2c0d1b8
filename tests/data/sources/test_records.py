"""Records by number: JSON lines, Parquet, datasets saved by Hugging Face; on disk and under s3://;
what bad ones say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from elastic.data.packing import MaskedWindows, Padded
from elastic.data.sources import arrow_tables
from elastic.data.sources import block_cache as cache_module
from elastic.data.sources import files as files_module
from elastic.data.sources.arrow_tables import HuggingFace, Parquet
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.corpus import FileBytes, TokenFiles
from elastic.data.sources.files import files_at
from elastic.data.sources.records import Columns, Jsonl, Records
from elastic.errors import SpecError
from elastic.storage import Storage


def rows(n: int) -> list[dict[str, Any]]:
    return [
        {"text": f"document {i} " + "é" * (i % 7), "ids": [i, i + 1, i + 2], "score": i / 2}
        for i in range(n)
    ]


def write_jsonl(folder: Path) -> None:
    """Two files; blank lines; no newline at the end of the first."""
    lines = [json.dumps(row) for row in rows(57)]
    (folder / "a.jsonl").write_text(
        "\n\n" + "\n".join(lines[:20]) + "\n   \n" + "\n".join(lines[20:40])
    )
    (folder / "b.jsonl").write_text("\n".join(lines[40:]) + "\n")


def write_parquet(folder: Path) -> None:
    for name, part in (("a.parquet", rows(57)[:40]), ("b.parquet", rows(57)[40:])):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(part), folder / name, row_group_size=7
        )


def write_saved(folder: Path) -> None:
    """As `Dataset.save_to_disk` does: Arrow streams, and their names in state.json."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows(57)[:40], rows(57)[40:])):
        table = pyarrow.Table.from_pylist(part)
        with (
            pyarrow.OSFile(str(folder / name), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=7)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0",
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[str], Records]]] = {
    "jsonl": (write_jsonl, Jsonl), "parquet": (write_parquet, Parquet), "huggingface": (write_saved,
    HuggingFace),
}  # fmt: skip


def upload(folder: Path, storage: Storage) -> None:
    for path in folder.iterdir():
        storage.put(path.name, path.read_bytes())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["local", "s3"])
def test_each_record_comes_back_by_its_number(
    kind: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    write, opened = KINDS[kind]
    write(tmp_path)
    where = str(tmp_path)
    if place == "s3":
        storage: Storage = request.getfixturevalue("s3")
        upload(tmp_path, storage)
        where = storage.uri
    for _ in range(2):  # the second time with the index that the first has left
        found = opened(where)
        assert len(found) == 57
        assert [found[i] for i in np.random.default_rng(0).permutation(57)] == [
            rows(57)[i] for i in np.random.default_rng(0).permutation(57)
        ]
        assert list(found.texts("text")) == [row["text"] for row in rows(57)]
    samples = Columns(found, ["ids", "score"])
    assert samples[3]["ids"].tolist() == [3, 4, 5] and samples[3]["score"] == 1.5
    with pytest.raises(SpecError, match=r"'text' is no number or tensor \('document 4"):
        Columns(found)[4]
    with pytest.raises(SpecError, match=r"no (field|column) 'body'; it has .*text"):
        list(found.texts("body"))
    with pytest.raises(SpecError, match="no field 'body'"):
        Columns(found, ["body"])


def test_a_column_of_json_has_one_dtype(tmp_path: Path) -> None:
    """Whether a step is divided by tokens or by samples follows from it."""
    made = [
        {"x": [1, 2], "y": 1, "z": []},
        {"x": [1.5, 2], "y": 2, "z": [7]},
        {"x": [], "y": 3, "z": [8]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, made)))
    samples = Columns(Jsonl(str(tmp_path)))
    for index in range(3):
        assert {name: str(x.dtype) for name, x in samples[index].items()} == {
            "x": "float64",
            "y": "int64",
            "z": "int64",
        }


@pytest.mark.parametrize(
    ("first", "late", "dtype"),
    [
        (1, 2, "int64"), (1, 0.5, "float64"), (1, [2, 1e3], "float64"), (1, 2**63, "float64"),
        (1, math.nan, "float64"), (0.5, 1, "float64"), (True, False, "bool"), (True, 2, "int64"),
        (1, -(2**63), "int64"), (2**63, 2**63, "uint64"), ([], 1, "int64"), ([], 0.5, "float64"),
    ],
)  # fmt: skip
def test_a_late_number_says_what_a_column_of_json_is(
    tmp_path: Path, first: Any, late: Any, dtype: str
) -> None:
    """Before the first step: in the middle of training it would be too late. The fraction of
    another column says nothing of this one."""
    made = [{"x": first, "y": 0.5}] * 300 + [{"x": late, "y": 1}] + [{"x": first, "y": 1}] * 10
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(map(json.dumps, made)))
    cache = BlockCache(tmp_path / "cache")
    for _ in range(2):  # found; known on this node
        samples = Columns(Jsonl(str(tmp_path / "data"), cache))
        assert {str(samples[index]["x"].dtype) for index in (0, 300, 305)} == {dtype}
        assert str(samples[0]["y"].dtype) == "float64"


def test_records_are_parsed_for_their_kinds_once_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(['{"x": [1, 2]}'] * 50 + ['{"x": [1.5]}']))
    parsed: list[bytes] = []

    def noted(self: Jsonl, line: bytes, where: Any) -> Any:
        parsed.append(line)
        return json.loads(line)

    monkeypatch.setattr(Jsonl, "_parsed", noted)
    cache = BlockCache(tmp_path / "cache")
    for expected in (4, 2):  # the record that is asked for twice, the first one, the fraction
        parsed.clear()
        assert Columns(Jsonl(str(tmp_path / "data"), cache))[0]["x"].dtype == np.float64
        assert len(parsed) == expected


def test_neighbours_are_decoded_once_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups of 7 rows: 0 .. 5 in the first file, 6 .. 8 in the second."""
    write_parquet(tmp_path)
    found = Parquet(str(tmp_path))
    assert [found[i]["score"] for i in range(7)] == [
        i / 2 for i in range(7)
    ] and found.n_decoded == 1
    assert [
        found[i]["score"] for i in np.random.default_rng(0).permutation(57)
    ] and found.n_decoded == 9
    one = found._decoded(0, ("text", "ids", "score")).nbytes
    monkeypatch.setattr(arrow_tables, "KEPT_BYTES", 3 * one + one // 2)
    small = Parquet(str(tmp_path))
    for index in (0, 7, 0, 14, 0, 21, 0):  # the first one is used again and again
        small[index]
        assert small._kept_bytes <= arrow_tables.KEPT_BYTES
    assert small.n_decoded == 4
    small[7]
    assert small.n_decoded == 5


def test_only_the_columns_of_a_sample_are_decoded(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    found = Parquet(str(tmp_path))
    samples = Columns(found, ["score"])
    found.n_decoded = 0
    found._kept.clear()
    assert [float(samples[i]["score"]) for i in range(7)] == [
        i / 2 for i in range(7)
    ] and found.n_decoded == 1
    assert [table.schema.names for table in found._kept.values()] == [["score"]]


def save_arrow(folder: Path, tables: list[pyarrow.Table]) -> None:
    names = [f"data-{n}.arrow" for n in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))


def save_parquet(folder: Path, tables: list[pyarrow.Table]) -> None:
    for n, table in enumerate(tables):
        pyarrow.parquet.write_table(table, folder / f"data-{n}.parquet")


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_a_column_of_several_types_has_the_first_files(kind: str, tmp_path: Path) -> None:
    """As pandas writes labels after a merge: whole numbers, as floats in one of the files."""
    empty = pyarrow.table({"x": [0.5], "y": [[0.5]], "z": [1], "b": [0.5]}).slice(0, 0)
    whole = pyarrow.table({"x": [1, 2], "y": [[], [2**53 + 1]], "z": [1.5, 2.0], "b": [True] * 2})
    parts = pyarrow.table({"x": [3.0], "y": [[4.0, 5.0]], "z": [-(2**53)], "b": [0]})
    (save_parquet if kind == "parquet" else save_arrow)(tmp_path, [empty, whole, parts])
    samples = Columns(KINDS[kind][1](str(tmp_path)), ["x", "y", "z", "b"])
    assert [samples[i]["x"].tolist() for i in range(3)] == [1, 2, 3]
    assert [samples[i]["y"].tolist() for i in range(3)] == [[], [2**53 + 1], [4, 5]]
    assert [samples[i]["z"].tolist() for i in range(3)] == [1.5, 2.0, -(2.0**53)]
    assert {
        tuple(str(array.dtype) for array in samples[i].values()) for i in range(3)
    } == {("int64", "int64", "float64", "bool")}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        (1, 2.5, "2.5, which int64"), (1, math.nan, "nan, which int64"), ([1], [2.0, 0.5],
        "0.5, which int64"), (1, 2.0**63, "9.223372036854776e+18, which int64"), (0.5, 2**53 + 1,
        "9007199254740993, which float64"), (0.5, 2**63 - 1, "9223372036854775807, which float64"),
        (True, 2, "2, which bool"),
    ],
)  # fmt: skip
def test_a_number_that_its_column_cannot_hold_is_named(
    tmp_path: Path, first: Any, later: Any, said: str
) -> None:
    save_parquet(tmp_path, [pyarrow.table({"x": [first] * 2}), pyarrow.table({"x": [later] * 2})])
    samples = Columns(Parquet(str(tmp_path)))
    assert samples[0]["x"].tolist() == first
    with pytest.raises(SpecError) as caught:
        samples[3]
    assert str(caught.value) == (
        f"{tmp_path}/data-1.parquet, row 2: 'x' is {said}, the type of this column, cannot hold; "
        "cast the column to one type in all files that holds it, or give `columns` without it"
    )


def test_a_number_of_64_bits_that_its_column_cannot_hold_is_named(tmp_path: Path) -> None:
    large = pyarrow.array([1, 2**64 - 1], pyarrow.uint64())
    save_parquet(tmp_path, [pyarrow.table({"x": large})])
    samples = Columns(Parquet(str(tmp_path)))
    assert samples[0]["x"].dtype == np.int64
    with pytest.raises(SpecError, match=f"row 2: 'x' is {2**64 - 1}, which int64, the type of"):
        samples[1]
    (tmp_path / "a.jsonl").write_text(f'{{"x": 0.5}}\n{{"x": {2**53 + 1}}}')
    with pytest.raises(SpecError, match=f"line 2: 'x' is {2**53 + 1}, which float64, the type of"):
        Columns(Jsonl(tmp_path / "a.jsonl"))[1]


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_the_row_of_a_record(kind: str, tmp_path: Path) -> None:
    write, opened = KINDS[kind]
    write(tmp_path)
    found = opened(str(tmp_path))
    files = sorted(
        str(path) for path in tmp_path.iterdir() if path.suffix in (".parquet", ".arrow")
    )
    assert [found.where(i) for i in (0, 39, 40, 56)] == [
        f"{files[0]}, row 1", f"{files[0]}, row 40", f"{files[1]}, row 1", f"{files[1]}, row 17",
    ]  # fmt: skip


def test_a_bad_line_is_named_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "CHUNK_BYTES", 16)  # lines go over the edges of chunks
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "n": 2}\n{"text: 3}\n[1]\n{"body": 1}\n')
    found = Jsonl(file)
    assert len(found) == 5 and found[1] == {"text": "two", "n": 2}
    with pytest.raises(SpecError, match=r"x\.jsonl, line 4: not JSON"):
        found[2]
    with pytest.raises(SpecError, match=r"x\.jsonl, line 5: it must be a JSON object .*not a list"):
        found[3]
    with pytest.raises(SpecError, match=r"x\.jsonl, line 4: not JSON"):
        list(found.texts("text"))
    file.write_text('\n{"text": "one"}\n{"body": 1}\n')
    with pytest.raises(SpecError, match=r"x\.jsonl, line 3: no field 'text'; it has 'body'"):
        list(Jsonl(file).texts("text"))
    assert [Jsonl(file).where(i) for i in range(2)] == [f"{file}, line 2", f"{file}, line 3"]


def test_an_index_is_of_these_very_files(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n')
    assert len(Jsonl(file)) == 1
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert [Jsonl(file)[i]["a"] for i in range(2)] == [1, 2]


def test_bad_places(tmp_path: Path) -> None:
    def says(opened: Callable[[str], Any], where: Path) -> str:
        with pytest.raises(SpecError) as caught:
            len(opened(str(where)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such folder or file" in says(Jsonl, tmp_path / "absent")
    assert "no file matches '**/*.parquet'" in says(Parquet, tmp_path)
    assert "no file matches" in says(HuggingFace, tmp_path)
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    assert "unpack it first" in says(Jsonl, tmp_path / "x.jsonl.gz")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    assert "x.parquet: no whole Parquet file" in says(Parquet, tmp_path)
    saved = tmp_path / "saved"
    saved.mkdir()
    write_saved(saved)
    whole = (saved / "data-00001-of-00002.arrow").read_bytes()
    (saved / "data-00001-of-00002.arrow").write_bytes(whole[:-700])
    assert "data-00001-of-00002.arrow: no whole Arrow stream" in says(HuggingFace, saved)
    (saved / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow is missing (1 of 2 files" in says(HuggingFace, saved)
    assert "no splits; leave split 'test' out" in says(
        lambda where: HuggingFace(where, "test"), saved
    )
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["saved", "test"]}')
    assert "several splits: give split; there are saved, test" in says(HuggingFace, tmp_path)
    assert "no split 'dev'" in says(lambda where: HuggingFace(where, "dev"), tmp_path)


def test_a_split_of_a_saved_dictionary(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    write_saved(tmp_path / "test")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert HuggingFace(tmp_path, "test")[41] == rows(57)[41]


def test_little_is_kept_and_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record of a large file reads one piece of it."""
    pyarrow.parquet.write_table(
        pyarrow.table({"x": np.arange(200_000)}), tmp_path / "x.parquet", row_group_size=1000
    )
    (tmp_path / "x.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(100_000)))
    read: list[int] = []
    real = files_module._pread
    monkeypatch.setattr(
        files_module, "_pread", lambda *a: read.append(len(data := real(*a))) or data
    )
    found = Parquet(tmp_path)
    for i in range(0, 200_000, 10_000):
        assert found[i]["x"] == i
    assert found._kept_bytes < 200_000 * 8 / 5
    del read[:]
    assert found[123_456]["x"] == 123_456 and sum(read) < 100_000
    lines = Jsonl(tmp_path)
    len(lines)
    del read[:]
    assert lines[77_777]["x"] == 77_777 and sum(read) < 40


# -------------------------------------------------------------------------------------- token files


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64"])
@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_token_files(kind: str, dtype: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 200, 1000).astype(dtype)
    for name, part in (("a", ids[:300]), ("b", ids[300:300]), ("c", ids[300:])):
        path = tmp_path / f"{name}.{kind}"
        np.save(path, part) if kind == "npy" else part.tofile(path)
    found = TokenFiles(files_at(tmp_path, "*"), None if kind == "npy" else dtype)
    assert found.ends.tolist() == [300, 1000]
    for start, stop in ((0, 1000), (299, 301), (300, 300), (7, 40), (990, 1000)):
        assert found.read(start, stop).tolist() == ids[start:stop].tolist()
    cut = TokenFiles(files_at(tmp_path, "*"), None if kind == "npy" else dtype, end_token=7)
    assert cut.ends.tolist() == sorted({300, 1000, *(int(i) + 1 for i in np.flatnonzero(ids == 7))})


@pytest.mark.parametrize("end_token", [None, 255])
def test_an_empty_token_file_is_no_document(end_token: int | None, tmp_path: Path) -> None:
    for name, part in (("a", []), ("b", range(10)), ("c", []), ("d", range(10, 25))):
        np.asarray(part, dtype=np.uint8).tofile(tmp_path / f"{name}.bin")
    found = TokenFiles(files_at(tmp_path, "*.bin"), "uint8", end_token)
    assert found.ends.tolist() == [10, 25]
    positions = [MaskedWindows(found, 6)[i]["position"].tolist() for i in (0, 1)]
    assert positions == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1]]
    padded = Padded(found, 16)
    assert [int((padded[i]["target"] != -100).sum()) for i in range(len(padded))] == [9, 14]


def test_token_files_under_s3(s3: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "BLOCK_BYTES", 1000)
    ids = np.arange(5000, dtype=np.uint16)
    s3.put("train.bin", ids.tobytes())
    found = TokenFiles(files_at(s3.uri_of("train.bin"), ""), "uint16")
    assert found.read(333, 4444).tolist() == ids[333:4444].tolist()
    text = FileBytes(files_at(s3.uri, "**"))
    assert text.read(0, 10).tolist() == list(ids.tobytes()[:10]) and text.ends.tolist() == [10_001]


def test_bad_token_files(tmp_path: Path) -> None:
    def says(data: bytes, name: str, dtype: str | None) -> str:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SpecError) as caught:
            TokenFiles(files_at(tmp_path / name, ""), dtype)
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    def npy(values: Any) -> bytes:
        np.save(tmp_path / "made.npy", values)
        return (tmp_path / "made.npy").read_bytes()

    assert "does not say what it holds; give dtype" in says(b"1234", "x.bin", None)
    assert "5 bytes are no whole number of uint16" in says(b"12345", "x.bin", "uint16")
    assert "must be one of uint8" in says(b"1234", "x.bin", "float32")
    assert "no .npy file" in says(b"1234", "x.npy", None)
    assert "whole numbers" in says(npy(np.zeros(3)), "x.npy", None)
    assert "its tokens are int64, dtype says uint16" in says(npy(np.arange(3)), "x.npy", "uint16")
    assert "cut off?" in says(npy(np.arange(30))[:-8], "x.npy", None)
    assert "column by column" in says(
        npy(np.asfortranarray(np.zeros((3, 4), dtype=np.int32))), "x.npy", None
    )


def test_a_file_that_shrinks_under_the_run(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a" * 100)
    found = FileBytes(files_at(tmp_path, "**"))
    (tmp_path / "x.txt").write_text("a" * 10)
    with pytest.raises(SpecError, match=r"x\.txt: it is shorter than the 100 bytes"):
        found.read(0, 50)
    (tmp_path / "x.txt").unlink()
    with pytest.raises(SpecError, match=r"x\.txt: it is gone"):
        found.read(0, 50)
