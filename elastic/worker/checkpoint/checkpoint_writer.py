"""Checkpoints: every rank writes its boxes, then one commit marker makes them a checkpoint.

No process group is used. The files are those of checkpoint_format.py. The reader takes its own JSON
index and the tensors' memory where it lies in the blobs: nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from elastic.errors import InternalError
from elastic.reshard.rank_boxes import meet
from elastic.storage import Sizes, Storage
from elastic.types import Box
from elastic.worker.checkpoint import dcp_index
from elastic.worker.checkpoint.blob import Xxh3, alone
from elastic.worker.checkpoint.checkpoint_format import (
    MANIFESTS,
    MARKER,
    METADATA,
    BlobEntry,
    Damaged,
    FileNote,
    Manifest,
    Marker,
    decode_manifest,
    encode_manifest,
    encode_manifests,
    encode_marker,
    folder_of,
    manifest_name,
    note_of,
    root_of,
    shard_name,
)
from elastic.worker.checkpoint.checkpoint_index import check_epoch, read_marker

CHUNK_BYTES = 16 << 20  # a box is written in blobs of at most this size, cut along dimension 0
PIECE_BYTES = 1 << 20  # written, then hashed while it is in the cache
SYNC_BYTES = 64 << 20  # of a local file are synced at a time, behind the writing


def write_shard(
    storage: Storage,
    step: int,
    generation: int,
    *,
    rank: int,
    items: Iterable[tuple[Box, Tensor]],
    ordered: int = 0,
    wrote: Callable[[], object] = lambda: None,
) -> int:
    """Writes the boxes of one rank and its manifest; returns the bytes. Items may come from an
    iterator, one at a time. `ordered`: the epoch of the driver that ordered the generation.
    `wrote`: called whenever some of it was written.

    Memory: nothing beyond the items where they are contiguous and on the CPU, else one blob. Where
    the checkpoint is committed already, nothing is written. Empty boxes are left out. Two writers
    of the same items write the same bytes.
    """
    folder = folder_of(step, generation, ordered)
    if read_marker(storage, folder) is not None:
        return storage.size(f"{folder}/{shard_name(rank)}")
    entries = []
    with (
        storage.create(f"{folder}/{shard_name(rank)}") as file,
        _without_crc(),
        ThreadPoolExecutor(1) as pool,
    ):
        sink = _Sink(file, pool, behind=not storage.remote)
        for box, tensor in items:
            if tuple(tensor.shape) != box.sizes or tensor.dtype != getattr(torch, box.dtype):
                raise InternalError(
                    f"{box.fqn}: box {box.sizes} {box.dtype} holds {tuple(tensor.shape)} "
                    f"{tensor.dtype}"
                )
            for part in box.in_rows(CHUNK_BYTES):
                rows = tensor.detach()
                if part.sizes:
                    rows = rows.narrow(0, part.offsets[0] - box.offsets[0], part.sizes[0])
                entries.append(sink.add(part, alone(rows)))
                wrote()
        sink.wait()
    manifest = Manifest(rank, sink.n_bytes, root_of(entries), tuple(entries))
    storage.put(f"{folder}/{manifest_name(rank)}", encode_manifest(manifest))
    return sink.n_bytes


def commit(
    storage: Storage,
    step: int,
    generation: int,
    *,
    world_size: int,
    epoch: int,
    meta: dict[str, Any],
    ordered: int = 0,
) -> str:
    """Makes the shards of `world_size` ranks a checkpoint; returns its URI. Doing it twice is the
    same as once.

    `epoch` is this driver's, `ordered` that of the one that ordered the generation. `meta` is plain
    data and comes back in Found and Checkpoint. Raises Fenced when a newer driver (epoch) has taken
    over, Damaged when a file is missing or a tensor has gaps.
    """
    folder = folder_of(step, generation, ordered)
    fence = f"{folder}: the driver of epoch {epoch} may not commit it"
    check_epoch(storage, epoch, fence)
    texts = storage.each(
        partial(_manifest_text, storage, folder, rank) for rank in range(world_size)
    )
    manifests = [
        decode_manifest(text, f"{folder}/{manifest_name(rank)}") for rank, text in enumerate(texts)
    ]
    sizes = storage.sizes(f"{folder}/")  # one question for all files, however many ranks there are
    notes = [_shard_note(storage, folder, manifest, sizes=sizes) for manifest in manifests]
    index = dcp_index.metadata(manifests, _shapes(folder, manifests))
    plain = json.loads(json.dumps(meta))
    together = encode_manifests(texts)
    notes += [note_of(METADATA, index), note_of(MANIFESTS, together)]
    marker = Marker(step, generation, epoch, world_size, plain, tuple(notes))
    known = read_marker(storage, folder)
    if known is None:
        storage.put(f"{folder}/{METADATA}", index)
        storage.put(f"{folder}/{MANIFESTS}", together)
        check_epoch(storage, epoch, fence)  # looking through the files of many ranks takes minutes
        if storage.put(f"{folder}/{MARKER}", encode_marker(marker), if_absent=True):
            return storage.uri_of(folder)
        known = read_marker(storage, folder)
    if known is None or not _same_shards(known, marker):
        raise Damaged(
            f"{folder}/{MARKER}: it is there, but it does not describe the files that are"
        )
    return storage.uri_of(folder)


class _Sink:
    """What torch.save writes to: the file, and the digest of the blob that is being written.

    Bytes are hashed while they are in the processor's cache; on a local disk, what was written is
    synced behind the writing.
    """

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor, behind: bool) -> None:
        self._file, self._pool, self._behind = file, pool, behind
        self._hasher = Xxh3()
        self._memory = self._data_at = self._start = self._synced = self.n_bytes = 0
        self._syncing: Future[None] | None = None

    def add(self, box: Box, tensor: Tensor) -> BlobEntry:
        """Writes the tensor as the next blob. `tensor` is alone in its memory."""
        self._hasher, self._start = Xxh3(), self.n_bytes
        self._memory, self._data_at = tensor.data_ptr(), -1
        torch.save(tensor, cast(BinaryIO, self))
        if self._data_at < 0:
            raise InternalError(f"{box.fqn}: torch.save did not write the tensor's memory as it is")
        return BlobEntry(
            box, self._start, self.n_bytes - self._start, self._hasher.text(), self._data_at
        )

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        if len(view) and np.frombuffer(view, dtype=np.uint8).ctypes.data == self._memory:
            self._data_at = self.n_bytes - self._start
        for at in range(0, len(view), PIECE_BYTES):
            self._file.write(view[at : at + PIECE_BYTES])
            self._hasher.update(view[at : at + PIECE_BYTES])
        self.n_bytes += len(view)
        if (
            self._behind
            and self.n_bytes - self._synced >= SYNC_BYTES
            and (self._syncing is None or self._syncing.done())
        ):
            self.wait()
            self._synced = self.n_bytes
            self._syncing = self._pool.submit(os.fdatasync, self._file.fileno())
        return len(view)

    def wait(self) -> None:
        """For the sync under way. Raises what it raised."""
        if self._syncing is not None:
            self._syncing.result()

    def flush(self) -> None:
        """torch.save calls it."""


@contextmanager
def _without_crc() -> Iterator[None]:
    """torch.save's own CRC halves its speed, and torch.load does not look at it; blobs have one of
    ours."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _manifest_text(storage: Storage, folder: str, rank: int) -> bytes:
    key = f"{folder}/{manifest_name(rank)}"
    try:
        return storage.get(key)
    except FileNotFoundError as error:
        raise Damaged(f"{storage.uri_of(key)}: missing; the checkpoint is not committed") from error


def _shard_note(storage: Storage, folder: str, manifest: Manifest, *, sizes: Sizes) -> FileNote:
    key = f"{folder}/{shard_name(manifest.rank)}"
    n_bytes, _ = sizes.get(key, (-1, 0.0))
    if n_bytes != manifest.n_bytes:
        raise Damaged(
            f"{storage.uri_of(key)}: {manifest.n_bytes} bytes were written, {max(0, n_bytes)} are "
            "there"
        )
    return FileNote(shard_name(manifest.rank), n_bytes, manifest.sha256)


def _shapes(folder: str, manifests: Sequence[Manifest]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, by the far corner of its boxes. Raises Damaged where boxes overlap or
    leave a gap."""
    parts: dict[str, dict[Box, None]] = {}
    for manifest in manifests:
        for entry in manifest.entries:
            parts.setdefault(entry.box.fqn, {})[entry.box] = None
    shapes = {}
    for fqn, boxes in parts.items():
        corners = [tuple(o + s for o, s in zip(box.offsets, box.sizes)) for box in boxes]
        shape = tuple(map(max, zip(*corners)))
        n_elements = sum(box.n_elements for box in boxes)
        if (
            len({(len(box.sizes), box.dtype) for box in boxes}) > 1
            or n_elements != prod(shape)
            or _overlap(boxes)
        ):
            raise Damaged(
                f"{folder}: the boxes of {fqn} hold {n_elements} elements of {prod(shape)} in "
                f"shape {list(shape)}"
            )
        shapes[fqn] = shape
    return shapes


def _overlap(boxes: Iterable[Box]) -> bool:
    """Whether two of the boxes of one tensor have an element in common: a sweep along dimension
    0."""
    ordered = sorted(boxes, key=lambda box: box.offsets)
    for i, one in enumerate(ordered):
        for two in ordered[i + 1 :]:
            if one.sizes and two.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            if meet((one.offsets, one.sizes), (two.offsets, two.sizes)) is not None:
                return True
    return False


def _same_shards(known: Marker, marker: Marker) -> bool:
    """And the same manifests, unless each has a note of its own, as those of markers had at
    first."""
    notes = {note.name: note for note in known.files}
    return known.world_size == marker.world_size and all(
        notes.get(note.name, note if note.name == MANIFESTS else None) == note
        for note in marker.files
        if note.name != METADATA
    )
