"""Finding, checking and reading checkpoints; see checkpoint_format.py for the files."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from elastic.errors import SpecError, StorageDamaged
from elastic.ledger import lease
from elastic.storage import Storage, open_storage
from elastic.worker.checkpoint.checkpoint_format import (
    FOLDER,
    FOLDER_NAME,
    MANIFESTS,
    MARKER,
    METADATA,
    Damaged,
    Fenced,
    FileNote,
    Marker,
    decode_manifest,
    decode_manifests,
    decode_marker,
    manifest_name,
    ordered_epoch,
    shard_name,
)
from elastic.worker.checkpoint.checkpoint_reader import Checkpoint, check_size


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint; its data files have not been looked at."""

    step: int
    generation: int
    uri: str
    meta: dict[str, Any]
    n_bytes: int
    epoch: int
    world_size: int


# of each storage that this process has open: folder -> what its marker says
_READ: MutableMapping[Storage, dict[str, CheckpointInfo]] = WeakKeyDictionary()


def read_marker(storage: Storage, folder: str) -> Marker | None:
    """None without a marker. Raises Damaged when it is not whole, SpecError when a newer version
    wrote it."""
    key = f"{folder}/{MARKER}" if folder else MARKER
    try:
        data = storage.get(key)
    except FileNotFoundError:
        return None
    except StorageDamaged as error:
        raise Damaged(f"{storage.uri_of(key)}: {error}") from error
    return decode_marker(data, storage.uri_of(key))


def find(storage: Storage, problems: list[str] | None = None) -> list[CheckpointInfo]:
    """Committed checkpoints of a run, newest first; markers that are not whole are left out (and
    told in `problems`)."""
    return _found(storage, _folders(storage), problems)


def committed(storage: Storage) -> list[CheckpointInfo]:
    """As `find`, but a marker that was read for this storage before is not read again: it is
    written once, and a folder's name never stands for another checkpoint. For what is asked at
    each save: a marker names the files of all ranks."""
    known = _READ.setdefault(storage, {})
    names = _folders(storage)
    new = _found(storage, [name for name in names if name not in known])
    known |= {found.uri.rpartition("/")[2]: found for found in new}
    for gone in known.keys() - set(names):
        del known[gone]
    return sorted(known.values(), key=_by_step, reverse=True)


def _by_step(found: CheckpointInfo) -> tuple[int, int]:
    return found.step, found.generation


def _folders(storage: Storage) -> list[str]:
    """Of checkpoints, those whose save is not finished included. Their files, which are as many as
    ranks, are not listed."""
    names = open_storage(storage.uri_of(FOLDER)).folders()
    return [name for name in names if FOLDER_NAME.fullmatch(name)]


def _found(
    storage: Storage, names: Sequence[str], problems: list[str] | None = None
) -> list[CheckpointInfo]:
    out = []
    for found in storage.each(partial(_info, storage, name) for name in names):
        if isinstance(found, CheckpointInfo):
            out.append(found)
        elif found is not None and problems is not None:
            problems.append(str(found))
    return sorted(out, key=_by_step, reverse=True)


def _info(storage: Storage, folder: str) -> CheckpointInfo | Damaged | None:
    """None without a marker."""
    try:
        marker = read_marker(storage, f"{FOLDER}/{folder}")
    except Damaged as error:
        return error
    if marker is None:
        return None
    uri, match = storage.uri_of(f"{FOLDER}/{folder}"), FOLDER_NAME.fullmatch(folder)
    if match is None or (marker.step, marker.generation) != (int(match[1]), int(match[2])):
        return Damaged(
            f"{uri}/{MARKER}: it is the marker of step {marker.step}, generation "
            f"{marker.generation}"
        )
    n_bytes = sum(note.n_bytes for note in marker.files)
    return CheckpointInfo(
        marker.step, marker.generation, uri, marker.meta, n_bytes, marker.epoch, marker.world_size
    )


def verify(
    uri: str, deep: bool = True, paced: Callable[[int], object] = lambda n_bytes: None
) -> list[str]:
    """What is wrong with a checkpoint, one text for each file; empty = nothing. `paced`: as
    Checkpoint.verify."""
    try:
        checkpoint = open_checkpoint(uri)
    except Damaged as error:
        return [str(error)]
    return checkpoint.verify(paced) if deep else []


def remove(uri: str) -> None:
    """Removes a checkpoint, its marker first: what an interruption leaves is no checkpoint."""
    storage = open_storage(uri)
    storage.delete(MARKER)
    storage.delete_folder()


def remove_copy(storage: Storage, uri: str, epoch: int) -> None:
    """Removes a checkpoint of this run. Raises Fenced when a newer driver (epoch) has taken over,
    SpecError for another's."""
    prefix, _, folder = uri.rpartition("/")
    if prefix != storage.uri_of(FOLDER) or not FOLDER_NAME.fullmatch(folder):
        raise SpecError(f"{uri}: it is no checkpoint of the run in {storage.uri}")
    check_epoch(storage, epoch, f"{uri}: the driver of epoch {epoch} may not remove it")
    storage.delete(f"{FOLDER}/{folder}/{MARKER}")
    storage.delete_folder(f"{FOLDER}/{folder}")


def clean(
    storage: Storage,
    epoch: int,
    below: tuple[int, int] | None = None,
    *,
    ordered: int = 0,
    spared: Container[str] = (),
) -> list[str]:
    """Removes what interrupted saves and removals have left; returns the URIs. `below`: the step
    and generation of a checkpoint that is there: only what is of older steps, and not of a newer
    generation, which may be saving; None = all. `ordered`: that of the generation that trains: what
    was saved under older drivers goes, of whatever step. Their workers may live on, out of this
    driver's reach. `spared`: URIs of folders that stay: what was committed and has lost its marker
    may get it back.

    Only folders without a marker, whole or not, under this run; raises Fenced when a newer driver
    (epoch) has taken over.
    """
    removed = []
    for folder in _folders(storage):
        match = FOLDER_NAME.fullmatch(folder)
        uri = storage.uri_of(f"{FOLDER}/{folder}")
        old = match and (
            below is None
            or (int(match[1]) < below[0] and int(match[2]) <= below[1])
            or ordered_epoch(folder) < ordered
        )
        if old and uri not in spared and not storage.exists(f"{FOLDER}/{folder}/{MARKER}"):
            check_epoch(
                storage, epoch, f"{storage.uri}: the driver of epoch {epoch} may not clean it"
            )
            storage.delete_folder(f"{FOLDER}/{folder}")
            removed.append(uri)
    return removed


def newest_epoch(storage: Storage) -> int:
    """Of the drivers that have committed, and of the one that has taken the run over and may not
    have yet; 0 = none."""
    sign = lease.newest(storage)
    return max([0 if sign is None else sign.epoch, *(item.epoch for item in committed(storage))])


def check_epoch(storage: Storage, epoch: int, what: str) -> None:
    """Raises Fenced when a newer driver has the run."""
    newest = newest_epoch(storage)
    if newest > epoch:
        raise Fenced(f"{what}; epoch {newest} has taken over this run")


def open_checkpoint(uri: str) -> Checkpoint:
    """Opens a committed checkpoint: marker, index and the sizes of all files are checked, the data
    while it is read.

    Raises Damaged (a StateLost) naming the file that is missing, truncated or altered.
    """
    storage = open_storage(uri)
    marker = read_marker(storage, "")
    if marker is None:
        raise Damaged(
            f"{storage.uri_of(MARKER)}: missing; there is no checkpoint, or its save was not "
            "finished"
        )
    notes = {note.name: note for note in marker.files}
    ranks = range(marker.world_size)
    # at first a marker named each manifest by itself
    manifests_in = {MANIFESTS} if MANIFESTS in notes else set(map(manifest_name, ranks))
    expected = {METADATA, *map(shard_name, ranks)} | manifests_in
    if set(notes) != expected:
        raise Damaged(
            f"{storage.uri_of(MARKER)}: it names {len(notes)} files where {marker.world_size} "
            f"ranks write {len(expected)}"
        )
    sizes = storage.sizes()
    for note in marker.files:
        check_size(storage, note, sizes)
    _noted(storage, notes[METADATA])
    manifests = []
    for rank, (where, text) in enumerate(_manifests(storage, notes, marker.world_size)):
        manifest = decode_manifest(text, where)
        shard = notes[shard_name(rank)]
        if (manifest.rank, manifest.n_bytes, manifest.sha256) != (
            rank,
            shard.n_bytes,
            shard.sha256,
        ):
            raise Damaged(f"{where}: it does not describe {shard.name} as {MARKER} does")
        manifests.append(manifest)
    return Checkpoint(storage, marker, manifests)


def _manifests(
    storage: Storage, notes: Mapping[str, FileNote], world_size: int
) -> Iterator[tuple[str, bytes]]:
    """Of each rank, and where it is."""
    names = [manifest_name(rank) for rank in range(world_size)]
    if MANIFESTS in notes:
        where = storage.uri_of(MANIFESTS)
        for text in decode_manifests(_noted(storage, notes[MANIFESTS]), where, world_size):
            yield where, text
        return
    texts = storage.each(partial(_noted, storage, notes[name]) for name in names)
    yield from zip(map(storage.uri_of, names), texts, strict=True)


def _noted(storage: Storage, note: FileNote) -> bytes:
    try:
        data = storage.get(note.name)
    except (FileNotFoundError, StorageDamaged) as error:
        raise Damaged(f"{storage.uri_of(note.name)}: {error}") from error
    if sha256(data).hexdigest() != note.sha256:
        raise Damaged(
            f"{storage.uri_of(note.name)}: altered (its SHA-256 is not the one in {MARKER})"
        )
    return data
