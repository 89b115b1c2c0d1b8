"""The files of a durable checkpoint and their JSON, checked while it is read: nothing in it is trusted.

checkpoints/step-00000040.g0003/
    __0_0.distcp   boxes of rank 0, one torch.save blob after the other (DCP's file format)
    rank-0.json    what lies where in it, a CRC-32 of each blob, the SHA-256 of the file
    .metadata      DCP's index, a pickle: written for torch.distributed.checkpoint.load, never read here
    commit.json    the marker, written last: size and SHA-256 of every other file, and of itself
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, TypeVar

from elastic.errors import ElasticError, StateLost
from elastic.types import DTYPE_BYTES, Box

FOLDER = "checkpoints"
MARKER = "commit.json"
METADATA = ".metadata"
VERSION = 1
FOLDER_NAME = re.compile(r"step-(\d{8,})\.g(\d{4,})")

T = TypeVar("T")


class Damaged(StateLost):
    """A file of a checkpoint is missing, truncated or altered; the message names it."""


class Fenced(ElasticError):
    """A newer driver of the same run has committed: this one must not."""


@dataclass(frozen=True)
class Entry:
    """A box (or some rows of one) as a blob of `length` bytes at `offset` of its rank's file."""

    box: Box
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What rank `rank` has written."""

    rank: int
    n_bytes: int
    sha256: str
    entries: tuple[Entry, ...]


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


def folder_of(step: int, generation: int) -> str:
    return f"{FOLDER}/step-{step:08d}.g{generation:04d}"


def shard_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def manifest_name(rank: int) -> str:
    return f"rank-{rank}.json"


def note_of(name: str, data: bytes) -> FileNote:
    return FileNote(name, len(data), sha256(data).hexdigest())


def encode_manifest(manifest: Manifest) -> bytes:
    rows = [
        {**asdict(entry.box), "offset": entry.offset, "length": entry.length, "crc32": entry.crc32}
        for entry in manifest.entries
    ]
    data = {"version": VERSION, "rank": manifest.rank, "n_bytes": manifest.n_bytes, "sha256": manifest.sha256, "boxes": rows}
    return json.dumps(data, separators=(",", ":")).encode()


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Raises Damaged, naming `where`, for anything but a manifest whose blobs lie inside the file."""

    def build(raw: dict[str, Any]) -> Manifest:
        n_bytes = _natural(raw["n_bytes"])
        return Manifest(_natural(raw["rank"]), n_bytes, _text(raw["sha256"]), tuple(_entry(r, n_bytes) for r in raw["boxes"]))

    return _decode(data, where, build)


def encode_marker(marker: Marker) -> bytes:
    body = {"version": VERSION, **asdict(marker)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def decode_marker(data: bytes, where: str) -> Marker:
    """Raises Damaged, naming `where`, for anything but a whole marker."""

    def build(raw: dict[str, Any]) -> Marker:
        if raw.pop("sha256") != _digest(raw):
            raise ValueError("its own digest does not fit")
        files = tuple(FileNote(_text(f["name"]), _natural(f["n_bytes"]), _text(f["sha256"])) for f in raw["files"])
        step, generation, epoch, world_size = (_natural(raw[key]) for key in ("step", "generation", "epoch", "world_size"))
        return Marker(step, generation, epoch, world_size, dict(raw["meta"]), files)

    return _decode(data, where, build)


def _entry(raw: dict[str, Any], n_bytes: int) -> Entry:
    offsets, sizes = (tuple(_natural(value) for value in raw[key]) for key in ("offsets", "sizes"))
    if raw["dtype"] not in DTYPE_BYTES or len(offsets) != len(sizes):
        raise ValueError(f"the box of {raw['fqn']} makes no sense")
    entry = Entry(
        Box(_text(raw["fqn"]), offsets, sizes, raw["dtype"]), *(_natural(raw[k]) for k in ("offset", "length", "crc32"))
    )
    if entry.offset + entry.length > n_bytes:
        raise ValueError(f"the box of {entry.box.fqn} lies beyond the end of the file")
    return entry


def _decode(data: bytes, where: str, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        raw = json.loads(data)
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']} is not known (this program writes {VERSION})")
        return build(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: not readable ({type(error).__name__}: {error})") from error


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
