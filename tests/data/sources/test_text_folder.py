"""Windows over text files: what is in them, the split, the bounds, and what bad input says."""

import logging
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from elastic.data.sources.text_folder import (
    TextFolder,
    find_files,
    in_validation,
    python_stdlib_folder,
)
from elastic.errors import SpecError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "pkg" / "deep").mkdir(parents=True)
    (tmp_path / "site-packages").mkdir()
    for name in ("b.py", "a.py", "pkg/c.py", "pkg/deep/d.py", "site-packages/no.py", "note.txt"):
        (tmp_path / name).write_bytes(name.encode() * 4)
    return tmp_path


def text_of(data: TextFolder) -> bytes:
    return b"".join(data[i]["input"].astype(np.uint8).tobytes() for i in range(len(data)))


def test_windows_follow_the_sorted_files(corpus: Path) -> None:
    data = TextFolder(corpus, seq=5, split="all")
    whole = b"".join(
        name.encode() * 4 + b"\0" for name in ("a.py", "b.py", "pkg/c.py", "pkg/deep/d.py")
    )
    assert data.n_bytes == len(whole) and len(data) == (len(whole) - 1) // 5
    assert text_of(data) == whole[: len(data) * 5]
    for i in (0, len(data) - 1):
        item = data[i]
        assert item["input"].dtype == item["target"].dtype == np.int64
        assert item["input"].shape == item["target"].shape == (5,)
        assert item["target"].tolist() == list(whole[i * 5 + 1 : i * 5 + 6])


def test_no_index_outside(corpus: Path) -> None:
    data = TextFolder(corpus, seq=5, split="all")
    for index in (-1, len(data)):
        with pytest.raises(IndexError):
            data[index]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*.py", ["a.py", "b.py", "pkg/c.py", "pkg/deep/d.py"]),
        ("*.py", ["a.py", "b.py"]),
        ("pkg/**/*.py", ["pkg/c.py", "pkg/deep/d.py"]),
        ("**/?.txt", []),
        ("*.txt", ["note.txt"]),
    ],
)
def test_patterns(corpus: Path, pattern: str, names: list[str]) -> None:
    assert find_files(corpus, pattern) == names


def test_the_split_is_by_file_and_does_not_move(tmp_path: Path) -> None:
    names = [f"file{i}.py" for i in range(200)]
    for name in names:
        (tmp_path / name).write_text(f"<{name}>")
    train, validation = (
        text_of(TextFolder(tmp_path, 1, split, validation_share=0.2))
        for split in ("train", "validation")
    )
    chosen = [name for name in names if f"<{name}".encode() in validation]
    assert 20 <= len(chosen) <= 60
    assert all((f"<{name}".encode() in train) != (name in chosen) for name in names)
    # a file's split hangs on its own name only
    assert chosen == [name for name in names if in_validation(name, 0.2)]
    # the same everywhere
    assert [i for i in range(40) if in_validation(f"file{i}.py", 0.2)] == [0, 11, 14, 24, 33, 37]


def test_bounded(corpus: Path) -> None:
    data = TextFolder(corpus, seq=4, split="all", max_bytes=20)
    assert data.n_bytes == 20 and text_of(data) == b"a.pya.pya.pya.py"


def test_one_unreadable_file_is_named_in_a_warning(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (corpus / "gone.py").symlink_to(corpus / "nowhere")
    with caplog.at_level(logging.WARNING):
        data = TextFolder(corpus, seq=5, split="all")
    assert len(data.unreadable) == 1
    assert "1 of 5 files" in caplog.text and "gone.py" in caplog.text


def test_bad_input_is_one_line_that_names_the_folder(tmp_path: Path) -> None:
    def message(folder: Path, **fields: object) -> str:
        with pytest.raises(SpecError) as caught:
            TextFolder(folder, **{"seq": 8, "split": "all", **fields})  # type: ignore[arg-type]
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such folder" in message(tmp_path / "absent") and "absent" in message(
        tmp_path / "absent"
    )
    assert "no file matches '**/*.py'" in message(tmp_path)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    assert "gone.py" in message(tmp_path) and str(tmp_path) in message(tmp_path)
    (tmp_path / "short.py").write_text("x")
    assert "2 bytes" in message(tmp_path) and "9" in message(tmp_path)
    assert "split is 'test'" in message(tmp_path, split="test")
    assert "seq is 0" in message(tmp_path, seq=0)


def test_the_standard_library_is_there_and_opens_quickly() -> None:
    folder = python_stdlib_folder()
    assert (folder / "os.py").is_file() and f"python{sys.version_info.major}" in str(folder)
    assert not any("site-packages" in name for name in find_files(folder))
    start_s = time.process_time()
    data = TextFolder(folder, seq=128)
    assert time.process_time() - start_s < 5.0  # 0.2 s on an idle core
    assert len(data) > 10_000 and data.n_bytes <= 16 << 20
