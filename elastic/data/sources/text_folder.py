"""Map-style datasets of the package's own: windows over the bytes of text files."""

from __future__ import annotations

import hashlib
import logging
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.data.packing import Windows
from elastic.data.sources.corpus import FileBytes
from elastic.data.sources.files import LEFT_OUT, Files, files_at, find_files
from elastic.errors import SpecError

__all__ = [
    "LEFT_OUT",
    "SPLITS",
    "TextFolder",
    "find_files",
    "in_validation",
    "python_stdlib_folder",
    "split_files",
]

LOG = logging.getLogger(__name__)
SPLITS = ("all", "train", "validation")


def python_stdlib_folder() -> Path:
    """Folder of the running interpreter's standard library: text that every machine with Python
    has."""
    return Path(sysconfig.get_paths()["stdlib"])


def in_validation(relative_path: str, share: float) -> bool:
    """Whether a file belongs to the validation split: by the hash of its name, so that other files
    do not matter."""
    digest = hashlib.sha256(relative_path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def split_files(files: Files, split: str, validation_share: float) -> Files:
    """Those of one split. Raises SpecError where none of its files can be read."""
    if split != "all":
        wanted = split == "validation"
        files = files.only(
            [
                n
                for n, name in enumerate(files.names)
                if in_validation(name, validation_share) == wanted
            ]
        )
    bad, n_files = len(files.unreadable), len(files) + len(files.unreadable)
    if bad:
        LOG.warning(
            "%d of %d files cannot be read and are left out; first: %s",
            bad,
            n_files,
            files.unreadable[0],
        )
    return files


@dataclass(eq=False)
class TextFolder:
    """Windows over the bytes of the text files of a folder (also in object storage), which are
    read when they are requested.

    Files are taken in the order of their relative paths, a zero byte behind each, until there are
    `max_bytes` (None: all). Item i is {"input": int64 [seq], "target": int64 [seq]}: bytes i*seq ..
    i*seq+seq, the target one byte later. split: "train", "validation" (files whose name hashes into
    `validation_share`) or "all". Raises SpecError when there is nothing to read; single unreadable
    files are left out, counted and named in a warning (`unreadable`).
    """

    folder: str | Path
    seq: int
    split: str = "train"
    pattern: str = "**/*.py"
    leave_out: tuple[str, ...] = LEFT_OUT
    max_bytes: int | None = 16 << 20
    validation_share: float = 0.05
    unreadable: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise SpecError(
                f"TextFolder: split is '{self.split}'; it must be one of {', '.join(SPLITS)}"
            )
        if self.seq < 1:
            raise SpecError(f"TextFolder: seq is {self.seq}; it must be at least 1")
        found = files_at(self.folder, self.pattern, None, leave_out=self.leave_out)
        files = split_files(found, self.split, self.validation_share)
        self.unreadable = files.unreadable
        self.corpus = FileBytes(files, self.max_bytes)
        self._windows = Windows(self.corpus, self.seq)
        if not len(self):
            there = (
                f"{len(files)} files matching '{self.pattern}' in split '{self.split}' hold "
                f"{self.n_bytes} bytes"
            )
            raise SpecError(
                f"{self.folder}: {there}; one window of seq={self.seq} needs {self.seq + 1}"
            )

    @property
    def n_bytes(self) -> int:
        return self.corpus.n_tokens

    def __len__(self) -> int:
        return len(self._windows)

    def length(self, index: int) -> int:
        return self.seq

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        return self._windows[index]
