"""What it costs that a corpus is large: memory for each document, files that are open, and what a
start reads of it."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from errno import EIO
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from elastic.data.packing import Whole
from elastic.data.sources import files as files_module
from elastic.data.sources.array_file import ArrayWriter
from elastic.data.sources.arrow_tables import FILES_KEPT, HuggingFace, Parquet
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.corpus import TokenFiles, Tokenized
from elastic.data.sources.files import Files, files_at
from elastic.data.sources.records import Columns, Jsonl
from elastic.data.sources.tokenizers import Bytes
from elastic.errors import SpecError, StorageFailed, StorageRefused
from elastic.storage import open_storage

real_local = files_module._local
FEW, MANY = 20_000, 60_000  # documents
MOST_BYTES = 2.0  # of memory for each more of them: a number on disk takes 8


class Texts:
    digest = "texts"

    def __init__(self, n: int) -> None:
        self.n = n

    def texts(self, name: str) -> Iterator[str]:
        return (str(i % 7) * (i % 3) for i in range(self.n))

    def where(self, index: int) -> str:
        return str(index)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a local file."""
    found: list[int] = []
    real = files_module._pread
    monkeypatch.setattr(
        files_module, "_pread", lambda *a: found.append(len(data := real(*a))) or data
    )
    return found


def token_files(folder: Path, n: int) -> TokenFiles:
    """Documents of 1, 2 and 3 tokens; a file ends in the middle of one."""
    folder.mkdir()
    ids = np.concatenate([np.ones(2 * n, dtype=np.uint8), np.zeros(n, dtype=np.uint8)])
    np.random.default_rng(0).shuffle(ids)
    ids[: n // 2].tofile(folder / "a.bin")
    ids[n // 2 :].tofile(folder / "b.bin")
    return TokenFiles(files_at(folder, "*"), "uint8", 0, cache=BlockCache(folder / "cache"))


def lines(folder: Path, n: int) -> Jsonl:
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"x": [1, 2]}\n' * n)
    return Jsonl(folder, BlockCache(folder / "cache"))


def tokenized(folder: Path, n: int) -> Tokenized:
    return Tokenized(Texts(n), "", Bytes(), cache=BlockCache(folder))


BUILT: dict[str, Callable[[Path, int], Callable[[], object]]] = {
    "tokenized": lambda folder, n: partial(tokenized, folder, n),
    "whole": lambda folder, n: partial(Whole, tokenized(folder, n), 16, BlockCache(folder)),
    "lines": lambda folder, n: partial(getattr, lines(folder, n), "lines"),
    "lengths": lambda folder, n: partial(getattr, Columns(lines(folder, n)), "lengths"),
    "ends": lambda folder, n: partial(getattr, token_files(folder, n), "ends"),
}


@pytest.mark.parametrize("what", BUILT)
def test_an_index_is_not_made_in_memory(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("files", "corpus"):
        monkeypatch.setattr(f"elastic.data.sources.{module}.CHUNK_BYTES", 20_000)
    peaks = []
    for n in (100, FEW, MANY):  # the first time, much is imported
        build = BUILT[what](tmp_path / str(n), n)
        tracemalloc.start()
        build()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / (MANY - FEW) < MOST_BYTES, peaks


def test_a_file_that_is_written_in_pieces_is_that_of_numpy(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 2**60, (1000, 3))
    with ArrayWriter(tmp_path / "pieces.npy", 3) as out:
        for at in range(0, 1000, 300):
            out.add(rows[at : at + 300])
    np.save(tmp_path / "whole.npy", rows)
    assert (tmp_path / "pieces.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    with ArrayWriter(tmp_path / "none.npy"):
        pass
    assert np.load(tmp_path / "none.npy", mmap_mode="r").shape == (0,)


@pytest.mark.parametrize("chunk", [7, 100_000])
def test_ends_of_documents_over_the_edges_of_chunks(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.data.sources.corpus.CHUNK_BYTES", chunk)
    found = token_files(tmp_path / "ids", 100)
    ids = found.read(0, found.n_tokens)
    assert found.n_tokens == 300 and len(ids) == 300
    assert found.ends.tolist() == sorted({50, 300, *(int(i) + 1 for i in np.flatnonzero(ids == 0))})


def test_heads_of_token_files_are_read_once_on_a_node(tmp_path: Path, read: list[int]) -> None:
    kinds = ("<u2", ">u4", "|u1", "<i8")
    for n in range(50):
        np.save(tmp_path / f"{n:02d}.npy", np.full(n, n, dtype=kinds[n % 4]))
    for expected in (50, 0):
        del read[:]
        found = TokenFiles(files_at(tmp_path, "*.npy"))
        assert len(read) == expected
    assert found.n_tokens == sum(range(50))
    assert found.read(0, found.n_tokens).tolist() == [n for n in range(50) for _ in range(n)]


def test_row_groups_are_found_once_on_a_node(tmp_path: Path, read: list[int]) -> None:
    """Also where their tokens are in the cache, and then not even once."""
    for n in range(50):
        table = pyarrow.table({"x": [n] * (n + 1), "text": [str(n)] * (n + 1)})
        pyarrow.parquet.write_table(table, tmp_path / f"{n:02d}.parquet", row_group_size=20)
    assert not read
    first = Parquet(tmp_path)
    assert not read and len(first) == sum(range(51)) and len(read) >= 50
    del read[:]
    again = Parquet(tmp_path)
    assert len(again) == len(first) and not read
    samples = Columns(again, ["x"])
    assert [int(samples[i]["x"]) for i in (0, 1, 2, 3, 1274)] == [0, 1, 1, 2, 49]
    assert again.where(1274) == f"{tmp_path}/49.parquet, row 50"
    assert again.where(1240) == f"{tmp_path}/49.parquet, row 16"
    for known in (False, True):
        del read[:]
        found = Tokenized(Parquet(tmp_path), "text", Bytes())
        assert found.n_tokens == sum((len(str(n)) + 1) * (n + 1) for n in range(50))
        assert bool(read) != known


def open_files() -> int:
    """Descriptors and mappings of Arrow files."""
    places = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    places += Path("/proc/self/maps").read_text().split()
    return sum(place.endswith(".arrow") for place in places)


def save(folder: Path, n_files: int) -> None:
    """As `Dataset.save_to_disk` does: two rows in each."""
    names = [f"data-{n:05d}-of-{n_files:05d}.arrow" for n in range(n_files)]
    for n, name in enumerate(names):
        table = pyarrow.table({"x": [n, n + 1], "y": [float(n)] * 2})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))


def far(root: Path, pattern: str, leave_out: tuple[str, ...]) -> Files:
    """As if they lay in object storage: pyarrow reads them through `Files.read`."""
    here = real_local(root, pattern, leave_out)
    return Files(None, open_storage(root), here.names, here.sizes, here.changed_s, BlockCache())


def parquets(folder: Path, n_files: int) -> None:
    for n in range(n_files):
        table = pyarrow.table({"x": [n, n + 1], "y": [float(n)] * 2})
        pyarrow.parquet.write_table(table, folder / f"{n:05d}.parquet")


@pytest.mark.parametrize("error", [StorageFailed("x"), StorageRefused("x"), OSError(EIO, "x")])
@pytest.mark.parametrize(("write", "opened"), [(save, HuggingFace), (parquets, Parquet)])
def test_a_file_that_cannot_be_opened_again_is_not_taken_for_a_damaged_one(
    write: Callable[[Path, int], None],
    opened: Callable[..., HuggingFace | Parquet],
    error: OSError,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All through a run: few are open at once."""
    n_files = FILES_KEPT + 1
    write(tmp_path, n_files)
    monkeypatch.setattr("elastic.data.sources.files._local", far)
    found = opened(tmp_path)
    assert [found[2 * n]["x"] for n in range(n_files)] == [*range(n_files)]

    def fails(*_: object) -> bytes:
        raise error

    found._kept.clear()
    with monkeypatch.context() as away:
        away.setattr(Files, "read", fails)
        with pytest.raises(OSError) as seen:
            found[0]
        assert type(seen.value) is type(error) and seen.value.errno == error.errno
    assert found[0]["x"] == 0
    found._open.clear()
    found._kept.clear()
    with monkeypatch.context() as away:
        away.setattr(Files, "read", lambda *_: b"")
        with pytest.raises(SpecError, match=f"no whole {found.form}"):
            found[1]


def test_few_files_of_a_saved_dataset_are_open(tmp_path: Path) -> None:
    save(tmp_path, 50)
    found = HuggingFace(tmp_path)
    assert [found[i]["x"] for i in range(100)] == [i // 2 + i % 2 for i in range(100)]
    found._kept.clear()  # what was decoded lies in the mappings
    assert open_files() <= 2 * FILES_KEPT
    assert [found[i]["x"] for i in (99, 0, 50)] == [50, 0, 25]
