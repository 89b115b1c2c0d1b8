"""Finding, checking and reading durable checkpoints; see durable_format.py for the files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any

import torch
from torch import Tensor

from elastic.errors import SpecError
from elastic.reshard.shards import Region, meet
from elastic.storage import Storage, open_storage
from elastic.types import Box, TensorSpec
from elastic.worker.durable_blob import decode_blob
from elastic.worker.durable_format import (
    FOLDER,
    FOLDER_NAME,
    MARKER,
    METADATA,
    Damaged,
    Entry,
    FileNote,
    Manifest,
    Marker,
    decode_manifest,
    decode_marker,
    manifest_name,
    shard_name,
)

VERIFY_BYTES = 8 << 20


@dataclass(frozen=True)
class Found:
    """A committed checkpoint; its data files have not been looked at."""

    step: int
    generation: int
    uri: str
    meta: dict[str, Any]
    n_bytes: int
    epoch: int
    world_size: int


def read_marker(storage: Storage, folder: str) -> Marker | None:
    """None without a marker. Raises Damaged when it is not whole."""
    key = f"{folder}/{MARKER}" if folder else MARKER
    try:
        data = storage.get(key)
    except FileNotFoundError:
        return None
    return decode_marker(data, storage.uri_of(key))


def find(storage: Storage, problems: list[str] | None = None) -> list[Found]:
    """Committed checkpoints of a run, newest first; markers that are not whole are left out (and told in `problems`)."""
    out = []
    for key in storage.list(f"{FOLDER}/"):
        _, folder, *rest = key.split("/")
        match = FOLDER_NAME.fullmatch(folder)
        if rest != [MARKER] or match is None:
            continue
        try:
            marker = read_marker(storage, f"{FOLDER}/{folder}")
            if marker is None:
                continue
            if (marker.step, marker.generation) != (int(match[1]), int(match[2])):
                raise Damaged(f"{storage.uri_of(key)}: it is the marker of step {marker.step}, generation {marker.generation}")
        except Damaged as error:
            if problems is not None:
                problems.append(str(error))
            continue
        uri = storage.uri_of(f"{FOLDER}/{folder}")
        n_bytes = sum(note.n_bytes for note in marker.files)
        out.append(Found(marker.step, marker.generation, uri, marker.meta, n_bytes, marker.epoch, marker.world_size))
    return sorted(out, key=lambda found: (found.step, found.generation), reverse=True)


def find_valid(storage: Storage, deep: bool = True) -> tuple[Found | None, list[str]]:
    """The newest checkpoint in which nothing is wrong, and what is wrong with newer ones (each names a file).

    deep: every byte is read and compared with its digest; else presence, sizes and the index only.
    """
    problems: list[str] = []
    for found in find(storage, problems):
        wrong = verify(found.uri, deep)
        if not wrong:
            return found, problems
        problems += wrong
    return None, problems


def verify(uri: str, deep: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one text for each file; empty = nothing."""
    try:
        checkpoint = open_checkpoint(uri)
    except Damaged as error:
        return [str(error)]
    return checkpoint.verify() if deep else []


def remove(uri: str) -> None:
    """Removes a checkpoint, its marker first: what an interruption leaves is no checkpoint."""
    storage = open_storage(uri)
    storage.delete(MARKER)
    storage.delete_folder()


def open_checkpoint(uri: str) -> Checkpoint:
    """Opens a committed checkpoint: marker, index and the sizes of all files are checked, the data while it is read.

    Raises Damaged (a StateLost) naming the file that is missing, truncated or altered.
    """
    storage = open_storage(uri)
    marker = read_marker(storage, "")
    if marker is None:
        raise Damaged(f"{storage.uri_of(MARKER)}: missing; there is no checkpoint, or its save was not finished")
    notes = {note.name: note for note in marker.files}
    expected = {METADATA, *map(shard_name, range(marker.world_size)), *map(manifest_name, range(marker.world_size))}
    if set(notes) != expected:
        raise Damaged(
            f"{storage.uri_of(MARKER)}: it names {len(notes)} files where {marker.world_size} ranks write {len(expected)}"
        )
    for note in marker.files:
        _check_size(storage, note)
    manifests = []
    for rank in range(marker.world_size):
        note = notes[manifest_name(rank)]
        text = storage.get(note.name)
        where = storage.uri_of(note.name)
        if sha256(text).hexdigest() != note.sha256:
            raise Damaged(f"{where}: altered (its SHA-256 is not the one in {MARKER})")
        manifests.append(decode_manifest(text, where))
    return Checkpoint(storage, marker, manifests)


class Checkpoint:
    """An open checkpoint, for one thread. `tensors`: fqn -> (shape, dtype)."""

    def __init__(self, storage: Storage, marker: Marker, manifests: list[Manifest]) -> None:
        self._storage, self._marker = storage, marker
        self.uri, self.step, self.generation, self.meta = storage.uri, marker.step, marker.generation, marker.meta
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        self._buffer = bytearray()
        self._entries: dict[str, dict[Region, tuple[str, Entry]]] = {}
        for manifest in manifests:
            for entry in manifest.entries:
                self._add(shard_name(manifest.rank), entry)

    def read(self, box: Box) -> Tensor:
        """The content of `box` as a new tensor; see `read_into`."""
        out = torch.empty(box.sizes, dtype=getattr(torch, box.dtype))
        self.read_into(box, out)
        return out

    def read_into(self, box: Box, out: Tensor) -> None:
        """Fills `out` (of the box's sizes) from the stored boxes that it meets; only their blobs are read, one at a time.

        Raises SpecError where the checkpoint is of another model, Damaged where a blob is not what was written.
        """
        if not box.n_elements:
            return
        self._check_box(box)
        filled, wanted = 0, (box.offsets, box.sizes)
        for region, (name, entry) in self._entries[box.fqn].items():
            common = meet(wanted, region)
            if common is not None:
                out[_window(common, box.offsets)].copy_(self._blob(name, entry)[_window(common, region[0])])
                filled += prod(common[1])
        if filled != box.n_elements:
            raise Damaged(f"{self.uri}: {box.fqn} has {filled} of the {box.n_elements} elements of {_show(box)}")

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raises SpecError, naming tensor and shapes, unless the checkpoint holds exactly the state `specs`."""
        wanted = {spec.fqn: (spec.shape, spec.dtype) for spec in specs if 0 not in spec.shape}
        for fqn, (shape, dtype) in wanted.items():
            if fqn not in self.tensors:
                raise SpecError(f"{self.uri}: it has no tensor {fqn} (the model wants {list(shape)} {dtype}); other model?")
            if self.tensors[fqn] != (shape, dtype):
                has = f"{list(self.tensors[fqn][0])} {self.tensors[fqn][1]}"
                raise SpecError(f"{self.uri}: {fqn} is {has} there, the model wants {list(shape)} {dtype}; other model?")
        extra = [fqn for fqn in self.tensors if fqn not in wanted]
        if extra:
            more = f"{extra[0]} {list(self.tensors[extra[0]][0])}, which it has (and {len(extra) - 1} more)"
            raise SpecError(f"{self.uri}: the model has no tensor {more}; other model?")

    def verify(self) -> list[str]:
        """Reads every file and compares it with its digest; one text for each that is wrong."""
        out = []
        for note in self._marker.files:
            try:
                _check_size(self._storage, note)
                if _file_sha256(self._storage, note) != note.sha256:
                    raise Damaged(f"{self._storage.uri_of(note.name)}: altered (its SHA-256 is not the one in {MARKER})")
            except Damaged as error:
                out.append(str(error))
        return out

    def _add(self, name: str, entry: Entry) -> None:
        box = entry.box
        corner = tuple(o + s for o, s in zip(box.offsets, box.sizes))
        shape, dtype = self.tensors.setdefault(box.fqn, (corner, box.dtype))
        if len(shape) != len(corner) or dtype != box.dtype:
            raise Damaged(f"{self.uri}/{name}: the boxes of {box.fqn} do not fit together")
        self.tensors[box.fqn] = (tuple(map(max, shape, corner)), dtype)
        self._entries.setdefault(box.fqn, {}).setdefault((box.offsets, box.sizes), (name, entry))

    def _check_box(self, box: Box) -> None:
        if box.fqn not in self.tensors:
            raise SpecError(f"{self.uri}: it has no tensor {box.fqn}; it is the checkpoint of another model")
        shape, dtype = self.tensors[box.fqn]
        inside = len(shape) == len(box.sizes) and all(o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape))
        if not inside or dtype != box.dtype:
            raise SpecError(f"{self.uri}: {box.fqn} is {list(shape)} {dtype} there, wanted is {_show(box)}; other model?")

    def _blob(self, name: str, entry: Entry) -> Tensor:
        """The stored tensor. It may lie in the buffer that the next call overwrites."""
        where = f"{self._storage.uri_of(name)}: the blob of {_show(entry.box)} at byte {entry.offset}"
        if len(self._buffer) < entry.length:
            self._buffer = bytearray(entry.length)
        data = memoryview(self._buffer)[: entry.length]
        try:
            n_bytes = self._storage.read_into(name, entry.offset, data)
        except FileNotFoundError as error:
            raise Damaged(f"{where} is gone") from error
        if n_bytes != entry.length or zlib.crc32(data) != entry.crc32:
            raise Damaged(f"{where} is truncated or altered ({n_bytes} of {entry.length} bytes)")
        try:
            return decode_blob(data, entry.box)
        except ValueError as error:
            raise Damaged(f"{where} is no tensor of that kind ({error})") from error


def _window(region: Region, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - start, o - start + s) for o, s, start in zip(*region, origin))


def _show(box: Box) -> str:
    return f"{box.fqn} {list(box.sizes)} {box.dtype} from {list(box.offsets)}"


def _check_size(storage: Storage, note: FileNote) -> None:
    where = storage.uri_of(note.name)
    try:
        n_bytes = storage.size(note.name)
    except FileNotFoundError as error:
        raise Damaged(f"{where}: missing") from error
    if n_bytes != note.n_bytes:
        raise Damaged(f"{where}: truncated or altered ({n_bytes} bytes, {note.n_bytes} were committed)")


def _file_sha256(storage: Storage, note: FileNote) -> str:
    digest = sha256()
    for offset in range(0, note.n_bytes, VERIFY_BYTES):
        digest.update(storage.read(note.name, offset, VERIFY_BYTES))
    return digest.hexdigest()
