"""Reading an open checkpoint: what a rank needs, straight to where it belongs; see
checkpoint_format.py for the files.

Blobs are read in a few threads. One that fills a contiguous part of its destination is read right
into it; others, and runs of small ones, go through scratch memory, of which all threads together
take one chunk at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import prod
from typing import Any

import torch
from torch import Tensor

from elastic.errors import SpecError, StorageDamaged
from elastic.reshard.rank_boxes import EXTRA, Region, meet
from elastic.storage import Sizes, Storage
from elastic.types import Box, TensorSpec
from elastic.worker.checkpoint.blob import (
    UNCHECKED,
    Blob,
    Hasher,
    check_head,
    decode_blob,
    find_data_in,
    hasher_for,
)
from elastic.worker.checkpoint.checkpoint_format import (
    MARKER,
    BlobEntry,
    Damaged,
    FileNote,
    Manifest,
    Marker,
    shard_name,
)
from elastic.worker.program.owned.optimizer_counters import COUNTERS

SCRATCH_BYTES = 64 << 20  # of all threads together; a single larger blob still gets its size
RUN_BYTES = 8 << 20  # small blobs that lie together are read at once, up to this much
SMALL_BYTES = 256 << 10
THREADS, THREADS_REMOTE = 4, 16
VERIFY_BYTES, VERIFY_REMOTE_BYTES = 8 << 20, 64 << 20  # read at once; from there in several ranges


@dataclass(frozen=True)
class _Piece:
    """A blob, and the part of it that belongs into `out` (the tensor of `box`)."""

    name: str
    entry: BlobEntry
    box: Box
    out: Tensor
    shared: Region


class Checkpoint:
    """An open checkpoint. `tensors`: fqn -> (shape, dtype). `tick`: called as bytes come, by the
    threads that read; what it raises ends that."""

    def __init__(
        self,
        storage: Storage,
        marker: Marker,
        manifests: list[Manifest],
        *,
        plain: Iterable[tuple[str, BlobEntry]] = (),
    ) -> None:
        self._storage, self._marker, self._manifests = storage, marker, manifests
        self.uri, self.meta = storage.uri, marker.meta
        self.step, self.generation = marker.step, marker.generation
        self.n_bytes = sum(note.n_bytes for note in marker.files)
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        self.tick: Callable[[], object] = lambda: None
        self._scratch = _Scratch(SCRATCH_BYTES)
        self._data: dict[tuple[str, int], int | None] = {}  # file and offset of a blob -> in it
        self._entries: dict[str, dict[Region, tuple[str, BlobEntry]]] = {}
        for manifest in manifests:
            for entry in manifest.entries:
                self._add(shard_name(manifest.rank), entry)
        for name, entry in plain:  # of a checkpoint without manifests
            self._add(name, entry)

    def read(self, box: Box) -> Tensor:
        """The content of `box` as a new tensor; see `fill`."""
        out = torch.empty(box.sizes, dtype=getattr(torch, box.dtype))
        self.fill([(box, out)])
        return out

    def read_whole(self, fqn: str) -> Tensor:
        return self.read(Box.whole(fqn, *self.tensors[fqn]))

    def fill(self, items: Iterable[tuple[Box, Tensor]]) -> int:
        """Fills each tensor (of its box's sizes) from the stored boxes that it meets; only their
        blobs are read. Returns the bytes read.

        Raises SpecError where the checkpoint is of another model, Damaged where a blob is not what
        was written; the tensors then hold anything.
        """
        pieces = [piece for box, out in items for piece in self._pieces(box, out)]
        runs = list(_runs(pieces, self._storage.remote))
        threads = min(THREADS_REMOTE if self._storage.remote else THREADS, len(runs))
        if threads < 2:
            for run in runs:
                self._read_run(run)
        else:  # after the first that raises no other is begun
            with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
                for _ in pool.map(self._read_run, runs):
                    pass
        return sum(piece.entry.length for piece in pieces)

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raises SpecError, naming tensor and shapes, unless the checkpoint holds exactly the state
        `specs`."""
        wanted = {spec.fqn: (spec.shape, spec.dtype) for spec in specs if 0 not in spec.shape}
        for fqn, (shape, dtype) in wanted.items():
            if fqn not in self.tensors:
                more = "other model?"
                if fqn == EXTRA + COUNTERS:
                    more = (
                        "the job's optimizer counts its steps there, and one that does not, or a "
                        "version before, stored it; take its weights alone (elastic checkpoint "
                        "import) or the optimizer that it was stored with"
                    )
                raise SpecError(
                    f"{self.uri}: it has no tensor {fqn} (the model wants {list(shape)} {dtype}); "
                    f"{more}"
                )
            if self.tensors[fqn] != (shape, dtype):
                has = f"{list(self.tensors[fqn][0])} {self.tensors[fqn][1]}"
                raise SpecError(
                    f"{self.uri}: {fqn} is {has} there, the model wants {list(shape)} {dtype}; "
                    "other model?"
                )
        extra = [fqn for fqn in self.tensors if fqn not in wanted]
        if extra:
            more = (
                f"{extra[0]} {list(self.tensors[extra[0]][0])}, which it has (and "
                f"{len(extra) - 1} more)"
            )
            raise SpecError(f"{self.uri}: the model has no tensor {more}; other model?")

    def verify(self, paced: Callable[[int], object] = lambda n_bytes: None) -> list[str]:
        """Reads every byte, from storage itself, and compares it with its digest; one text for each
        file that is wrong. `paced` gets the bytes of each part."""
        out = []
        shards = {shard_name(manifest.rank): manifest for manifest in self._manifests}
        sizes = self._storage.sizes()
        for note in self._marker.files:
            try:
                check_size(self._storage, note, sizes)
                self._storage.forget(note.name)
                manifest = shards.get(note.name)
                if manifest is not None:
                    for blobs in _together(manifest.entries, self._at_once):
                        self._verify_blobs(note.name, blobs, paced)
                elif self._sha256(note, paced) != note.sha256:
                    raise Damaged(
                        f"{self._storage.uri_of(note.name)}: altered (its SHA-256 is not the one "
                        f"in {MARKER})"
                    )
            except Damaged as error:
                out.append(str(error))
            except (FileNotFoundError, StorageDamaged) as error:
                out.append(f"{self._storage.uri_of(note.name)}: {error}")
            finally:
                self._storage.forget(note.name)  # others have more use for that memory
        return out

    # --------------------------------------------------------------------------------- what to read

    def _add(self, name: str, entry: BlobEntry) -> None:
        box = entry.box
        corner = tuple(o + s for o, s in zip(box.offsets, box.sizes))
        shape, dtype = self.tensors.setdefault(box.fqn, (corner, box.dtype))
        if len(shape) != len(corner) or dtype != box.dtype:
            raise Damaged(f"{self.uri}/{name}: the boxes of {box.fqn} do not fit together")
        self.tensors[box.fqn] = (tuple(map(max, shape, corner)), dtype)
        self._entries.setdefault(box.fqn, {}).setdefault((box.offsets, box.sizes), (name, entry))

    def _pieces(self, box: Box, out: Tensor) -> list[_Piece]:
        if not box.n_elements:
            return []
        self._check_box(box)
        pieces, filled = [], 0
        for region, (name, entry) in self._entries[box.fqn].items():
            shared = meet((box.offsets, box.sizes), region)
            if shared is not None:
                pieces.append(_Piece(name, entry, box, out, shared))
                filled += prod(shared[1])
        if filled != box.n_elements:
            raise Damaged(
                f"{self.uri}: {box.fqn} has {filled} of the {box.n_elements} elements of "
                f"{_show(box)}"
            )
        return pieces

    def _check_box(self, box: Box) -> None:
        if box.fqn not in self.tensors:
            raise SpecError(
                f"{self.uri}: it has no tensor {box.fqn}; it is the checkpoint of another model"
            )
        shape, dtype = self.tensors[box.fqn]
        inside = len(shape) == len(box.sizes) and all(
            o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape)
        )
        if not inside or dtype != box.dtype:
            raise SpecError(
                f"{self.uri}: {box.fqn} is {list(shape)} {dtype} there, wanted is {_show(box)}; "
                "other model?"
            )

    # -------------------------------------------------------------------------------------- reading

    def _read_run(self, run: Sequence[_Piece]) -> None:
        """Blobs that lie one after the other in a file."""
        if len(run) == 1 and self._read_rows(run[0]):
            return
        if len(run) == 1 and not self._storage.remote:
            straight = _straight(run[0])
            if straight is not None:
                self._read_straight(run[0], straight)
                return
        first, last = run[0].entry, run[-1].entry
        length = last.offset + last.length - first.offset
        with self._scratch.take(length) as data:
            if len(run) == 1:
                hasher = hasher_for(first.digest)
                n_bytes = self._read(run[0], first.offset, data, hasher=hasher)
                self._deliver(run[0], data, n_bytes, digest=hasher.text())
                return
            n_bytes = self._read(run[0], first.offset, data)
            for piece in run:
                start = piece.entry.offset - first.offset
                blob = data[start : start + piece.entry.length]
                hasher = hasher_for(piece.entry.digest)
                hasher.update(blob)
                self._deliver(piece, blob, max(0, n_bytes - start), digest=hasher.text())

    def _deliver(self, piece: _Piece, data: memoryview, n_bytes: int, *, digest: str) -> None:
        """From scratch memory, of which the first `n_bytes` were read, to its place."""
        entry = piece.entry
        if n_bytes < entry.length or digest != entry.digest:
            raise Damaged(
                f"{self._where(piece.name, entry)} is truncated or altered ({entry.length} bytes "
                "expected)"
            )
        try:
            tensor = decode_blob(data, entry.box, entry.data)
        except ValueError as error:
            raise Damaged(
                f"{self._where(piece.name, entry)} is no tensor of that kind ({error})"
            ) from error
        _put(piece, tensor, entry.box)

    def _read_rows(self, piece: _Piece) -> bool:
        """Those that are wanted alone, of a blob without a digest (of plain DCP), which may be a
        whole tensor; False: it has to be read whole."""
        entry, (offsets, sizes) = piece.entry, piece.shared
        box = entry.box
        if entry.digest != UNCHECKED or not box.sizes or sizes[0] == box.sizes[0]:
            return False
        begin = self._data_of(piece)
        if begin is None:
            return False
        rows = replace(
            box, offsets=(offsets[0], *box.offsets[1:]), sizes=(sizes[0], *box.sizes[1:])
        )
        begin += (offsets[0] - box.offsets[0]) * (box.n_bytes // box.sizes[0])
        with self._scratch.take(rows.n_bytes) as data:
            if self._read(piece, entry.offset + begin, data) < rows.n_bytes:
                raise Damaged(f"{self._where(piece.name, entry)} is truncated")
            values = torch.frombuffer(data, dtype=getattr(torch, box.dtype)).reshape(rows.sizes)
            _put(piece, values, rows)
        return True

    def _data_of(self, piece: _Piece) -> int | None:
        """Where the memory of the tensor begins in the blob; None where it does not lie there as it
        is. Found out once."""
        entry, key = piece.entry, (piece.name, piece.entry.offset)
        if key not in self._data:
            blob = Blob(lambda at, into: self._read(piece, entry.offset + at, into), entry.length)
            self._data[key] = find_data_in(blob, entry.box)
        return self._data[key]

    def _read_straight(self, piece: _Piece, target: memoryview) -> None:
        entry = piece.entry
        end = entry.data + len(target)
        head, tail = memoryview(bytearray(entry.data)), memoryview(bytearray(entry.length - end))
        hasher, n_bytes = hasher_for(entry.digest), 0
        for offset, part in ((0, head), (entry.data, target), (end, tail)):
            if len(part):
                n_bytes += self._read(piece, entry.offset + offset, part, hasher=hasher)
        if n_bytes != entry.length or hasher.text() != entry.digest:
            raise Damaged(
                f"{self._where(piece.name, entry)} is truncated or altered ({n_bytes} of "
                f"{entry.length} bytes)"
            )
        try:
            check_head(head)
        except ValueError as error:
            raise Damaged(
                f"{self._where(piece.name, entry)} is no tensor of that kind ({error})"
            ) from error

    def _read(
        self, piece: _Piece, offset: int, into: memoryview, *, hasher: Hasher | None = None
    ) -> int:
        self.tick()
        try:
            if hasher is None:
                return self._storage.read_into(piece.name, offset, into)
            took = partial(self._took, hasher)
            return self._storage.read_parts(piece.name, offset, into, took=took)
        except FileNotFoundError as error:
            raise Damaged(f"{self._where(piece.name, piece.entry)} is gone") from error
        except StorageDamaged as error:
            raise Damaged(f"{self._where(piece.name, piece.entry)}: {error}") from error

    def _took(self, hasher: Hasher, part: memoryview) -> None:
        hasher.update(part)
        self.tick()

    @property
    def _at_once(self) -> int:
        return VERIFY_REMOTE_BYTES if self._storage.remote else VERIFY_BYTES

    def _parts(self, name: str, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Of a file, each with where it begins."""
        for offset in range(begin, end, self._at_once):
            n = min(self._at_once, end - offset)
            yield offset, memoryview(self._storage.read(name, offset, n))

    def _verify_blobs(
        self, name: str, blobs: Sequence[BlobEntry], paced: Callable[[int], object]
    ) -> None:
        """Of such as lie one after the other."""
        hashers = [hasher_for(entry.digest) for entry in blobs]
        end = blobs[-1].offset + blobs[-1].length
        for offset, part in self._parts(name, blobs[0].offset, end):
            for entry, hasher in zip(blobs, hashers, strict=True):
                at = entry.offset - offset
                hasher.update(part[max(0, at) : max(0, at + entry.length)])
            paced(len(part))
        for entry, hasher in zip(blobs, hashers, strict=True):
            if hasher.text() != entry.digest:
                raise Damaged(f"{self._where(name, entry)} is altered")

    def _sha256(self, note: FileNote, paced: Callable[[int], object]) -> str:
        digest = sha256()
        for _, part in self._parts(note.name, 0, note.n_bytes):
            digest.update(part)
            paced(len(part))
        return digest.hexdigest()

    def _where(self, name: str, entry: BlobEntry) -> str:
        return (
            f"{self._storage.uri_of(name)}: the blob of {_show(entry.box)} at byte {entry.offset}"
        )


class _Scratch:
    """Memory that threads share: at most `limit` bytes are out at a time, unless a single piece is
    larger."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._free = limit, 0, threading.Condition()

    @contextmanager
    def take(self, n_bytes: int) -> Iterator[memoryview]:
        with self._free:
            while self._used and self._used + n_bytes > self._limit:
                self._free.wait()
            self._used += n_bytes
        try:
            yield memoryview(bytearray(n_bytes))
        finally:
            with self._free:
                self._used -= n_bytes
                self._free.notify_all()


def _runs(pieces: Iterable[_Piece], remote: bool) -> Iterator[list[_Piece]]:
    """Small blobs that lie together form a run; the others are alone."""
    small = RUN_BYTES if remote else SMALL_BYTES
    run: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.entry.offset)):
        entry = piece.entry
        fits = (
            run
            and run[-1].name == piece.name
            and run[-1].entry.offset + run[-1].entry.length == entry.offset
            and max(run[-1].entry.length, entry.length) <= small
            and entry.offset + entry.length - run[0].entry.offset <= RUN_BYTES
        )
        if not fits and run:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _together(entries: Iterable[BlobEntry], most: int) -> Iterator[list[BlobEntry]]:
    """Those that lie one after the other, of so many bytes at most; a longer one is alone."""
    run: list[BlobEntry] = []
    for entry in entries:
        end = entry.offset + entry.length
        if run and (run[-1].offset + run[-1].length != entry.offset or end - run[0].offset > most):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _straight(piece: _Piece) -> memoryview | None:
    """The memory of the destination that the whole blob fills; None where it must go through
    scratch memory."""
    entry, out = piece.entry, piece.out
    if (
        entry.data < 0
        or entry.length <= SMALL_BYTES
        or piece.shared != (entry.box.offsets, entry.box.sizes)
    ):
        return None
    target = out.detach()[_window(piece.shared, piece.box.offsets)]
    if target.device.type != "cpu" or not target.is_contiguous():
        return None
    memory: Any = target.reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def _put(piece: _Piece, values: Tensor, of: Box) -> None:
    """What is wanted of it, to its place. `of`: what the values are."""
    target = piece.out[_window(piece.shared, piece.box.offsets)]
    target.copy_(values[_window(piece.shared, of.offsets)])


def _window(region: Region, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - start, o - start + s) for o, s, start in zip(*region, origin))


def _show(box: Box) -> str:
    return f"{box.fqn} {list(box.sizes)} {box.dtype} from {list(box.offsets)}"


def check_size(storage: Storage, note: FileNote, sizes: Sizes) -> None:
    """Raises Damaged where the file is not there or not of its size. `sizes`: of all files of the
    checkpoint."""
    where = storage.uri_of(note.name)
    if note.name not in sizes:
        raise Damaged(f"{where}: missing")
    n_bytes, _ = sizes[note.name]
    if n_bytes != note.n_bytes:
        raise Damaged(
            f"{where}: truncated or altered ({n_bytes} bytes, {note.n_bytes} were committed)"
        )
