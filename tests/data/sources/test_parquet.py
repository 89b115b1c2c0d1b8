"""Rows in indexed Parquet: each comes back by its id, little is read for it, and what is no tensor
is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.data.open_datasets import dataset_of, validation_of
from elastic.data.sources import parquet
from elastic.data.sources.parquet import Rows, read_index, write_rows
from elastic.errors import SpecError
from elastic.program import Program
from elastic.storage import open_storage
from elastic.types import Job

pytest.importorskip("pyarrow", reason="rows are kept in Parquet files")


def batches(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    first, out = 0, []
    for n in sizes:
        ids = np.arange(first, first + n)
        grid = (ids[:, None, None] * 100 + np.arange(6).reshape(2, 3)).astype(np.float32)
        out.append({"id": ids, "grid": grid, "flag": ids % 2 == 0})
        first += n
    return out


def test_each_row_comes_back_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 200)
    monkeypatch.setattr(parquet, "FILE_BYTES", 1000)
    write_rows(open_storage(tmp_path), batches((7, 1, 50, 3, 40)), "train")
    rows = Rows(open_storage(tmp_path))
    assert len(rows) == 101
    assert len(rows.index.files) > 1
    for i in np.random.default_rng(0).permutation(101):
        row = rows[int(i)]
        assert row["id"] == i and row["flag"] == (i % 2 == 0)
        assert row["grid"].dtype == np.float32
        assert row["grid"].tolist() == (i * 100 + np.arange(6).reshape(2, 3)).tolist()
    with pytest.raises(IndexError, match="sample 101 of 101"):
        rows[101]


def test_one_row_reads_one_small_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 60, (4000, 100))
    storage = open_storage(tmp_path)
    write_rows(storage, [{"x": noise}], "train")
    assert storage.size("part-00000.parquet") > 2 << 20
    read = []
    real = type(storage).read_into
    monkeypatch.setattr(
        type(storage), "read_into", lambda self, *a: read.append(real(self, *a)) or read[-1]
    )
    rows = Rows(storage)
    rows[0]
    del read[:]
    assert rows[3000]["x"].tolist() == noise[3000].tolist()
    assert 0 < sum(read) < 2 * parquet.GROUP_BYTES
    del read[:]
    rows[3001]
    assert not read


def test_an_altered_file_is_not_read_as_if_whole(tmp_path: Path) -> None:
    write_rows(open_storage(tmp_path), [{"x": np.arange(5000)}], "train")
    file = tmp_path / "part-00000.parquet"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    with pytest.raises(OSError, match=r"(?i)crc|checksum|corrupt|decompress"):
        Rows(open_storage(tmp_path))[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"text": np.array(["a", "b"])}], "train: column 'text' holds text"),
        (
            [{"t": np.array(["2020-01-01"], dtype="datetime64[s]")}],
            "column 't' holds dtype datetime64",
        ),
        (
            [{"x": np.array([[1, 2], [3]], dtype=object)}],
            r"column 'x' has rows of different shapes \(\[2\] and \[1\]\)",
        ),
        (
            [{"x": np.arange(3)}, {"x": np.array([1.0, np.nan])}],
            r"'x' is int64 \[\] in some rows, float64 \[\] in others",
        ),
        (
            [{"x": np.arange(3)}, {"y": np.arange(3)}],
            r"column 'x' is int64 \[\] in some rows, nothing in others",
        ),
        (
            [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}],
            r"float64 \[3\] in some rows, float64 \[4\]",
        ),
        ([], "it has no rows"),
    ],
)
def test_what_is_no_tensor_is_named(given: list[dict[str, Any]], says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=says):
        write_rows(open_storage(tmp_path), given, "train")
    with pytest.raises(SpecError, match=r"no index\.json there"):
        read_index(open_storage(tmp_path))


def test_lists_of_one_length_are_tensors(tmp_path: Path) -> None:
    ragged = np.empty(2, dtype=object)
    ragged[:] = [[1, 2], [3, 4]]
    assert write_rows(open_storage(tmp_path), [{"x": ragged}], "train").columns["x"].shape == (2,)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    for text in ("{", '{"version": 9}', '{"version": 1, "rows": 1, "columns": [], "files": []}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(SpecError, match=r"index\.json: not readable"):
            Rows(open_storage(tmp_path))


def test_the_job_names_its_data(tmp_path: Path) -> None:
    write_rows(open_storage(tmp_path), [{"x": np.arange(5)}], "train")
    own = Program(
        model=lambda: None,
        optimizer=lambda named: None,
        dataset=lambda: [1, 2],
        loss=lambda output, batch: None,
    )
    assert dataset_of(own, Job()) == [1, 2]
    assert validation_of(own, Job()) is None
    assert len(dataset_of(own, Job.from_plain({"data": {"train": str(tmp_path)}}))) == 5
    assert len(validation_of(own, Job.from_plain({"data": {"validation": str(tmp_path)}}))) == 5
    none = Program(model=own.model, optimizer=own.optimizer, dataset=None, loss=own.loss)
    with pytest.raises(SpecError, match=r"names no data\.train"):
        dataset_of(none, Job.from_plain({"data": {}}))
