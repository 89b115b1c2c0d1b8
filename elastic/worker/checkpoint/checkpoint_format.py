"""The files of a checkpoint and their JSON, checked while it is read: nothing in it is trusted.

checkpoints/step-00000040.g0003.e0002/   step, generation, epoch of the driver that ordered that
    __0_0.distcp   boxes of rank 0, one torch.save blob after the other without gaps (DCP's file
                   format)
    rank-0.json    what lies where in it, a digest of each blob, the SHA-256 of all those digests:
                   what rank 0 tells whoever commits
    manifests.json the same of all ranks, a line each, so that a reader asks for one file however
                   many there are
    .metadata      DCP's index, a pickle: written for torch.distributed.checkpoint.load, never read
                   here
    commit.json    the marker, written last: size and SHA-256 of every file that readers need, and
                   of itself

docs/checkpoints.md is the reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, TypeVar

from elastic.errors import ElasticError, SpecError, StateLost
from elastic.types import DTYPE_BYTES, Box, Plan
from elastic.worker.checkpoint.blob import hasher_for

FOLDER = "checkpoints"
MARKER = "commit.json"
METADATA = ".metadata"
MANIFESTS = "manifests.json"
SAMPLES = "sample_digest"  # in a marker's meta: the running digest of the sample ids up to its step
VERSION = 2
REMOVED = f"{FOLDER}/removed"  # a mark for each that a person has removed
FOLDER_NAME = re.compile(r"step-(\d{8,})\.g(\d{4,})(?:\.e(\d{4,}))?")

T = TypeVar("T")


class Damaged(StateLost):
    """A file of a checkpoint is missing, truncated or altered; the message names it."""


class Fenced(ElasticError):
    """A newer driver of the same run has committed: this one must not."""


@dataclass(frozen=True)
class BlobEntry:
    """A box (or some rows of one) as a blob of `length` bytes at `offset` of its rank's file.

    The tensor's memory lies at `data` of the blob; -1 = not known (files of plain DCP). `digest` is
    that of the whole blob.
    """

    box: Box
    offset: int
    length: int
    digest: str
    data: int = -1


@dataclass(frozen=True)
class Manifest:
    """What rank `rank` has written. `sha256`: of the blobs' digests."""

    rank: int
    n_bytes: int
    sha256: str
    entries: tuple[BlobEntry, ...]


@dataclass(frozen=True)
class FileNote:
    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    step: int
    generation: int
    epoch: int
    world_size: int
    meta: dict[str, Any]
    files: tuple[FileNote, ...]


def folder_of(step: int, generation: int, epoch: int = 0) -> str:
    """`epoch`: of the driver that ordered the generation; 0 = none did. Two drivers that do not
    know of each other may give a generation the same number: what the workers of one write never
    stands where those of the other do."""
    by = f".e{epoch:04d}" if epoch else ""
    return f"{FOLDER}/step-{step:08d}.g{generation:04d}{by}"


def ordered_epoch(folder: str) -> int:
    """That a folder's name ends with; 0 = none."""
    match = FOLDER_NAME.fullmatch(folder)
    return int(match[3] or 0) if match else 0


def cut_of(plan: Plan) -> dict[str, Any]:
    """How a state is cut, in a marker's meta."""
    layout, samples = asdict(plan.layout), list(plan.samples)
    return {"layout": layout, "layers": list(plan.layers), "samples": samples}


def shard_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def manifest_name(rank: int) -> str:
    return f"rank-{rank}.json"


def note_of(name: str, data: bytes) -> FileNote:
    return FileNote(name, len(data), sha256(data).hexdigest())


def root_of(entries: Iterable[BlobEntry]) -> str:
    """One SHA-256 for all blobs of a shard: as they lie one after the other, it speaks for every
    byte of the file."""
    return sha256("\n".join(entry.digest for entry in entries).encode()).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    rows = [
        asdict(e.box) | {"offset": e.offset, "length": e.length, "data": e.data, "digest": e.digest}
        for e in manifest.entries
    ]
    about = {"version": VERSION, "rank": manifest.rank, "n_bytes": manifest.n_bytes}
    data = about | {"sha256": manifest.sha256, "boxes": rows}
    return json.dumps(data, separators=(",", ":")).encode()


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Raises Damaged, naming `where`, for anything but a manifest whose blobs fill the file."""

    def build(raw: dict[str, Any]) -> Manifest:
        n_bytes = _natural(raw["n_bytes"])
        entries = tuple(_entry(row, n_bytes) for row in raw["boxes"])
        _check_tiling(entries, n_bytes)
        if root_of(entries) != raw["sha256"]:
            raise ValueError("its SHA-256 is not that of the blobs' digests")
        return Manifest(_natural(raw["rank"]), n_bytes, _text(raw["sha256"]), entries)

    return _decode(data, where, build)


def encode_manifests(texts: Sequence[bytes]) -> bytes:
    """Of all ranks, as they are: JSON without line breaks."""
    return b"\n".join(texts)


def decode_manifests(data: bytes, where: str, world_size: int) -> list[bytes]:
    """The text of each rank's manifest. Raises Damaged, naming `where`, unless there are as many as
    ranks."""
    texts = data.split(b"\n")
    if len(texts) != world_size:
        raise Damaged(f"{where}: it has {len(texts)} lines where {world_size} ranks have one each")
    return texts


def encode_marker(marker: Marker) -> bytes:
    body = {"version": VERSION, **asdict(marker)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def decode_marker(data: bytes, where: str) -> Marker:
    """Raises Damaged, naming `where`, for anything but a whole marker; SpecError for one that a
    newer version wrote."""

    def build(raw: dict[str, Any]) -> Marker:
        if not _is_sealed(raw):
            raise ValueError("its own digest does not fit")
        files = tuple(
            FileNote(_text(f["name"]), _natural(f["n_bytes"]), _text(f["sha256"]))
            for f in raw["files"]
        )
        step, generation, epoch, world_size = (
            _natural(raw[key]) for key in ("step", "generation", "epoch", "world_size")
        )
        return Marker(step, generation, epoch, world_size, dict(raw["meta"]), files)

    return _decode(data, where, build)


def _entry(raw: dict[str, Any], n_bytes: int) -> BlobEntry:
    offsets, sizes = (tuple(_natural(value) for value in raw[key]) for key in ("offsets", "sizes"))
    if raw["dtype"] not in DTYPE_BYTES or len(offsets) != len(sizes):
        raise ValueError(f"the box of {raw['fqn']} makes no sense")
    box, offset, length = (
        Box(_text(raw["fqn"]), offsets, sizes, raw["dtype"]),
        _natural(raw["offset"]),
        _natural(raw["length"]),
    )
    if offset + length > n_bytes:
        raise ValueError(f"the box of {box.fqn} lies beyond the end of the file")
    hasher_for(_text(raw["digest"]))
    if not raw["digest"].startswith("xxh3:"):
        raise ValueError(f"the digest of {box.fqn} is {raw['digest']!r}")
    data = _natural(raw["data"])
    if data + box.n_bytes > length:
        raise ValueError(f"the box of {box.fqn} lies beyond the end of its blob")
    return BlobEntry(box, offset, length, raw["digest"], data)


def _check_tiling(entries: Iterable[BlobEntry], n_bytes: int) -> None:
    at = 0
    for entry in entries:
        if entry.offset != at:
            raise ValueError(
                f"the blob of {entry.box.fqn} does not begin where the one before ends"
            )
        at += entry.length
    if at != n_bytes:
        raise ValueError(f"its blobs have {at} bytes, the file {n_bytes}")


def _decode(data: bytes, where: str, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        raw = json.loads(data)
        if raw["version"] != VERSION:
            if isinstance(raw["version"], int) and raw["version"] > VERSION and _is_sealed(raw):
                raise SpecError(
                    f"{where}: version {raw['version']} is newer than {VERSION}, the newest that "
                    "this elastic reads; take a later one"
                )
            raise ValueError(f"version {raw['version']} is not known (it would be {VERSION})")
        return build(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: not readable ({type(error).__name__}: {error})") from error


def _is_sealed(raw: dict[str, Any]) -> bool:
    """Is it a marker as it was written?"""
    return raw.get("sha256") == _digest({key: raw[key] for key in raw if key != "sha256"})


def _digest(body: dict[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value
