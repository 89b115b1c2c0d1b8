"""What the library `datasets` of Hugging Face reads: datasets that it saved, and files of Arrow,
JSON, Parquet, CSV or text. Rows and tokens are Arrow files that all processes of a node map.

The library is imported when such a source is opened: 1 s and 60 to 100 MB of each process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.data.progress import gets_on
from elastic.data.sources.array_file import ArrayWriter
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.corpus import ENDS, Parts, Tokenizer, Tokens, id_type
from elastic.data.sources.files import files_at
from elastic.data.sources.records import Record, Records
from elastic.errors import SpecError

FORMATS = {
    "arrow": ("arrow",),
    "json": ("jsonl", "json", "ndjson"),
    "parquet": ("parquet",),
    "csv": ("csv", "tsv"),
    "text": ("txt",),
}
PACKED = ("", ".gz", ".bz2", ".xz", ".zst")
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves in its folder
TOKENS, IDS = "tokens.arrow", "ids"
VERSION = 1
AT_ONCE = 100  # documents that are tokenized in one call
LOOK_S = 2.0  # between looks at the files that are being converted


class ArrowRows(Records):
    """Rows of a `datasets.Dataset`, by their number. Files that are not Arrow are converted once
    per node. Raises SpecError, also without the library."""

    typed = True

    def __init__(
        self,
        where: str | Path,
        form: str | None = None,
        *,
        split: str | None = None,
        pattern: str | None = None,
        cache: BlockCache | None = None,
    ) -> None:
        self._library = _library()
        if "://" in str(where):
            raise SpecError(
                f"{where}: the library datasets would copy all of it to each node; name a local "
                "folder here, or read it in blocks: jsonl, parquet or huggingface in the place of "
                "dataset"
            )
        if saved := any((Path(where).expanduser() / name).is_file() for name in SAVED):
            pattern = pattern or "**"
        files = files_at(where, pattern or f"**/*.{{{','.join(_endings(form))}}}")
        super().__init__(files, cache or BlockCache())
        self._said = f"{form}|{split}|{self._library.__version__}"
        self._parts: dict[tuple[str, ...], Any] = {}
        with _named(str(where)), _quiet(self._library):
            if saved:
                self.dataset = self._saved(str(where), split)
            else:
                self.dataset = self._converted(form or _format_of(files.names, where), split)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.files.digest}|{self._said}".encode()).hexdigest()[:32]

    def _saved(self, where: str, split: str | None) -> Any:
        found = self._library.load_from_disk(where)
        if isinstance(found, self._library.DatasetDict):
            if split not in found:
                said = f"no split '{split}'" if split else "it has several splits: give split"
                raise SpecError(f"{where}: {said}; there are {', '.join(found)}")
            return found[split]
        if split is not None:
            raise SpecError(f"{where}: it has no splits; leave split '{split}' out")
        return found

    def _converted(self, form: str, split: str | None) -> Any:
        """The library's own cache, which it finds again by files and options; its lock says nothing
        to those who wait, so they wait for ours."""

        def load(cache: Path) -> Any:
            files = [self.files.uri(n) for n in range(len(self.files))]
            return self._library.load_dataset(
                form, data_files=files, split=split or "train", cache_dir=str(cache)
            )

        def build(into: Path) -> None:
            with _growth_of(into):
                load(into)

        assert self._cache is not None
        return load(self._cache.once(f"datasets-{self.digest}", build))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Record:
        return self.pick(index, self.dataset.column_names)

    def pick(self, index: int, names: Sequence[str]) -> Record:
        wanted = tuple(name for name in self.dataset.column_names if name in names)
        if wanted not in self._parts:
            self._parts[wanted] = self.dataset.select_columns(list(wanted))
        found: Record = self._parts[wanted][index]
        return found

    def texts(self, name: str) -> Iterator[Any]:
        for batch in self.only(name).iter(AT_ONCE):
            yield from batch[name]
            gets_on()

    def only(self, name: str) -> Any:
        """This column as a dataset. Raises SpecError where there is none of that name."""
        if name not in self.dataset.column_names:
            raise SpecError(
                f"{self._place()}: no column '{name}'; it has "
                f"{', '.join(self.dataset.column_names)}"
            )
        return self.dataset.select_columns([name])

    def where(self, index: int) -> str:
        return f"{self._place()}, row {index + 1}"

    def _place(self) -> str:
        return self.files.uri(0) if len(self.files) == 1 else str(self.files.root)


class ArrowTokens:
    """Documents as tokens: mapped once per node into an Arrow file of lists, of these rows and this
    tokenizer, then read by ranges (a `Corpus`)."""

    def __init__(
        self, rows: ArrowRows, field: str, tokenizer: Tokenizer, *, cache: BlockCache
    ) -> None:
        import datasets

        self.rows, self.field, self.tokenizer = rows, field, tokenizer
        key = f"{rows.digest}|{field}|{tokenizer.digest}|{VERSION}".encode()
        self._key = hashlib.sha256(key).hexdigest()[:32]
        self.name = f"arrow-tokens-{self._key}"
        folder = cache.once(self.name, self._write)
        self.ends: NDArray[np.int64] = np.load(folder / ENDS, mmap_mode="r")
        self._lists = datasets.Dataset.from_file(str(folder / TOKENS)).data.column(IDS)
        self._parts = Parts([len(_values(lists)) for lists in self._lists.chunks])
        self.n_tokens = int(self._parts.starts[-1])

    def read(self, start: int, stop: int) -> Tokens:
        found = [
            _values(self._lists.chunk(n))[first:until]
            for n, first, until in self._parts.pieces(start, stop)
        ]
        return np.concatenate([*found, np.zeros(0, dtype=np.int64)])

    def _write(self, into: Path) -> None:
        import datasets

        kind = datasets.List(datasets.Value(id_type(self.tokenizer).name))
        with _quiet(datasets):
            found = self.rows.only(self.field).map(
                self._ids_of,
                with_indices=True,
                batched=True,
                batch_size=AT_ONCE,
                remove_columns=[self.field],
                features=datasets.Features({IDS: kind}),
                cache_file_name=str(into / TOKENS),
                new_fingerprint=self._key,
            )
        at = 0
        with ArrayWriter(into / ENDS) as out:
            for lists in found.data.column(IDS).chunks:
                ends = at + np.cumsum(lists.value_lengths().to_numpy(), dtype=np.int64)
                out.add(np.unique(ends[ends > at]))
                at += len(_values(lists))

    def _ids_of(self, batch: Any, indices: Sequence[int]) -> dict[str, Any]:
        for index, text in zip(indices, batch[self.field], strict=True):
            if problem := self.tokenizer.problem(text):
                raise SpecError(f"{self.rows.where(index)}, field '{self.field}': {problem}")
        gets_on()
        return {IDS: self.tokenizer.encode(batch[self.field])}


def _values(lists: Any) -> NDArray[Any]:
    """All tokens of lists in a row: a view of the mapped file."""
    found: NDArray[Any] = lists.flatten().to_numpy(zero_copy_only=True)
    return found


# -------------------------------------------------------------------------------------- the library


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise SpecError(
            "the package 'datasets' is not there; pip install 'elastic-ray[datasets]'"
        ) from error
    return datasets


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Whatever the library raises, in one line that begins with the place."""
    try:
        yield
    except (SpecError, ImportError):
        raise
    except Exception as error:  # a boundary: the library raises what its readers raise
        reason = error.__cause__ or error
        said = " ".join(str(reason).split())[:200] or type(reason).__name__
        raise SpecError(f"{where}: datasets cannot read it ({said})") from error


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """No progress bars: a worker's output is a log."""
    shown = not library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bars()


@contextmanager
def _growth_of(folder: Path) -> Iterator[None]:
    """The library does not say how far it is: files that grow do."""
    done, listeners = threading.Event(), copy_context()

    def look() -> None:
        before = 0
        while not done.wait(LOOK_S):
            now = _bytes_in(folder)
            if now != before:
                listeners.run(gets_on)
            before = now

    thread = threading.Thread(target=look, name="elastic-conversion", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    """Files and folders may go away in the middle of it: they are renamed when they are done."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).stat().st_size
    return total


def _endings(form: str | None) -> list[str]:
    wanted = [FORMATS[form]] if form is not None else FORMATS.values()
    return [f"{name}{packed}" for names in wanted for name in names for packed in PACKED]


def _format_of(names: Sequence[str], where: str | Path) -> str:
    """What all of them are, by the ends of their names. Raises SpecError."""
    found = {
        form
        for form in FORMATS
        if any(name.endswith(f".{ending}") for name in names for ending in _endings(form))
    }
    if len(found) != 1:
        what = f"files of {', '.join(sorted(found))}" if found else f"'{names[0]}'"
        raise SpecError(
            f"{where}: {what}: give format ({', '.join(FORMATS)}), and pattern where it is some of "
            "them"
        )
    return found.pop()
