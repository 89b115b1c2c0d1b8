"""Map-style datasets of the package's own: windows over the bytes of text files."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.errors import SpecError

LOG = logging.getLogger(__name__)
LEFT_OUT = ("site-packages", "dist-packages", "__pycache__")  # folders that are not entered
END_OF_FILE = b"\0"
SPLITS = ("all", "train", "validation")


def python_stdlib_folder() -> Path:
    """Folder of the running interpreter's standard library: text that every machine with Python has."""
    return Path(sysconfig.get_paths()["stdlib"])


def _as_regex(pattern: str) -> re.Pattern[str]:
    """A glob over '/'-separated relative paths: `**/` any number of folders, `*` and `?` inside one name."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(signs.get(part, re.escape(part)) for part in parts))


def find_files(folder: Path, pattern: str = "**/*.py", leave_out: tuple[str, ...] = LEFT_OUT) -> list[str]:
    """Relative paths, with '/', that match `pattern`, sorted; folders named in `leave_out` are not entered."""
    regex, found = _as_regex(pattern), []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in leave_out]
        relative = Path(where).relative_to(folder).as_posix()
        prefix = "" if relative == "." else relative + "/"
        found += [prefix + name for name in names if regex.fullmatch(prefix + name)]
    return sorted(found)


def in_validation(relative_path: str, share: float) -> bool:
    """Whether a file belongs to the validation split: by the hash of its name, so that other files do not matter."""
    digest = hashlib.sha256(relative_path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


@dataclass(eq=False)
class TextFolder:
    """Windows over the bytes of the text files of a folder.

    Files are taken in the order of their relative paths, a zero byte behind each, until `max_bytes` of the split are read.
    Item i is {"input": int64 [seq], "target": int64 [seq]}: bytes i*seq .. i*seq+seq, the target one byte later.
    split: "train", "validation" (files whose name hashes into `validation_share`) or "all".
    Raises SpecError when there is nothing to read; single unreadable files are left out, counted and named in a warning
    (`unreadable`).
    """

    folder: str | Path
    seq: int
    split: str = "train"
    pattern: str = "**/*.py"
    leave_out: tuple[str, ...] = LEFT_OUT
    max_bytes: int = 16 << 20
    validation_share: float = 0.05
    unreadable: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise SpecError(f"TextFolder: split is '{self.split}'; it must be one of {', '.join(SPLITS)}")
        if self.seq < 1:
            raise SpecError(f"TextFolder: seq is {self.seq}; it must be at least 1")
        self.folder = Path(self.folder)
        files = self._listed(self.folder)
        if self.split != "all":
            validation = self.split == "validation"
            files = [name for name in files if in_validation(name, self.validation_share) == validation]
        text = b"".join(self._read(self.folder, files))
        self._bytes: NDArray[np.uint8] = np.frombuffer(text, dtype=np.uint8)
        self._check(len(files))

    def _listed(self, folder: Path) -> list[str]:
        if not folder.is_dir():
            raise SpecError(f"{folder}: no such folder; TextFolder needs a folder of text files")
        files = find_files(folder, self.pattern, self.leave_out)
        if not files:
            raise SpecError(f"{folder}: no file matches '{self.pattern}', or the folder cannot be read; nothing to train on")
        return files

    def _read(self, folder: Path, files: list[str]) -> Iterator[bytes]:
        left = self.max_bytes
        for name in files:
            try:
                with (folder / name).open("rb") as file:
                    text = (file.read(left) + END_OF_FILE)[:left]
            except OSError as error:
                self.unreadable.append(f"{name} ({error.strerror})")
                continue
            yield text
            left -= len(text)
            if left <= 0:
                return

    def _check(self, n_files: int) -> None:
        bad = len(self.unreadable)
        if bad and not self._bytes.size:
            raise SpecError(
                f"{self.folder}: none of {n_files} files of split '{self.split}' can be read; first: {self.unreadable[0]}"
            )
        if not len(self):
            there = f"{n_files} files matching '{self.pattern}' in split '{self.split}' hold {self.n_bytes} bytes"
            raise SpecError(f"{self.folder}: {there}; one window of seq={self.seq} needs {self.seq + 1}")
        if bad:
            report = f"{bad} of {n_files} files cannot be read and are left out; first: {self.unreadable[0]}"
            LOG.warning("%s: %s", self.folder, report)

    @property
    def n_bytes(self) -> int:
        return int(self._bytes.size)

    def __len__(self) -> int:
        return max(0, self._bytes.size - 1) // self.seq

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = self._bytes[index * self.seq : (index + 1) * self.seq + 1].astype(np.int64)
        return {"input": window[:-1], "target": window[1:]}
