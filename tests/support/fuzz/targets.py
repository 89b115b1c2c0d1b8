"""What reads what others have written: for each reader good inputs, the errors that it declares,
and what must hold of what it takes."""

from __future__ import annotations

import json
import lzma
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from support.fuzz import imported_targets, mutating, peer_targets, people_targets
from support.fuzz.target import Mutate, Target

from elastic.errors import JournalDamaged, SpecError
from elastic.ledger import holder, lease, parts, segments
from elastic.ledger.journal import SEALED, Line, crc_of, parse_state, read_text, write_line
from elastic.storage import open_storage
from elastic.types import (
    Box,
    Copy,
    CopyStored,
    Decision,
    DriverStarted,
    EnterPlan,
    Layout,
    ModelProfile,
    Node,
    NodeReady,
    Plan,
    Pool,
    StepDone,
    Stop,
    WorkerId,
)
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_format import (
    MARKER,
    BlobEntry,
    Damaged,
    FileNote,
    Manifest,
    Marker,
    decode_manifest,
    decode_manifests,
    decode_marker,
    encode_manifest,
    encode_manifests,
    encode_marker,
    manifest_name,
    root_of,
)
from elastic.worker.hosting.inbox import _order as read_order


def journal() -> Target:
    def kept(found: list[Line], good: list[Line]) -> bool:
        return found == good[: len(found)]

    return Target(
        "journal",
        [journal_text()],
        lambda data: read_text(data, "journal"),
        (JournalDamaged, SpecError),
        mutating.as_json,
        kept,
    )


def journal_text() -> bytes:
    plan = Plan(1, Layout(dp_shard=2), (WorkerId("a", 0), WorkerId("b", 0)), (4, 4), (2,))
    pool = Pool("spot", "A100", 8, "spot", 10.0, max_nodes=4)
    start = DriverStarted(
        "run", 1, {"steps": 10, "global_batch": 8}, (pool,), ModelProfile(2, 100, ())
    )
    copy = Copy(5, "durable", 1, Layout(dp_shard=2), uri="s3://b/r/c", n_bytes=9)
    lines = [
        Line(0.0, 1, ((0.0, start),), None),
        Line(
            1.0,
            1,
            ((1.0, NodeReady(Node("a", "spot", 8))),),
            Decision((EnterPlan(plan),), "because", 9.0),
        ),
        *(
            Line(2.0 + n, 1, ((2.0 + n, StepDone(1, n, 2.5, 80, 1.0, digest="d")),), None)
            for n in range(1, 4)
        ),
        Line(
            9.0, 1, ((9.0, CopyStored(copy, 1.0)),), Decision((Stop("stopped", "asked"),), "asked")
        ),
    ]
    return "".join(write_line(line) + "\n" for line in lines).encode()


def stored_journal() -> list[Target]:
    """What it is in a run's storage. Parts and States are sealed by a checksum: what gets past it
    is made under it."""
    text = journal_text()
    half = len(text) // 2
    head = {"v": 1, "epoch": 2, "first": 3, "n_bytes": [half, len(text) - half], "before": {"1": 4}}
    state = write_line(Line(9.0, 1, state={"phase": "running", "step": 3}), "0badcafe").encode()
    return [
        Target(
            "journal-segment",
            [json.dumps(head).encode() + b"\n" + text],
            lambda data: segments._parsed(data, segments.Span(2, 3, 4)),
            (ValueError, SpecError),
            mutating.as_json,
        ),
        Target(
            "journal-part",
            [lzma.decompress(parts.pack(text, {"1": 4}))],
            lambda data: parts.unpack(lzma.compress(data, preset=0)),
            (ValueError, SpecError),
            mutating.as_json,
        ),
        Target(
            "journal-state",
            [state[: state.rindex(b',"crc"')] + b"}"],
            _state,
            (ValueError, SpecError),
            mutating.as_json,
        ),
    ]


def _state(data: bytes) -> Any:
    return parse_state(data[:-1] + SEALED.format(crc_of(data[:-1] + b"}")).encode())


def leases() -> Target:
    sign = lease.Sign(3, 7, "elsewhere", "boot/pid", 4711, 12, 1.7e9, 1.7e9, 15.0)
    seeds = [json.dumps(asdict(one)).encode() for one in (sign, replace(sign, released=True))]

    def read(data: bytes) -> None:
        """It is taken as what its name says, and what is done with it raises nothing."""
        found = lease.decode(sign.key, data)
        holder.started(found.pid)
        time.strftime("%Y", time.gmtime(found.since_s))
        assert found.key == sign.key and 0 <= found.ttl_s <= 86400 and found.host.isprintable()

    return Target("lease", seeds, read, (ValueError,), mutating.as_json)


def markers() -> list[Target]:
    digest = "xxh3:" + "0" * 32
    entries = (
        BlobEntry(Box("w", (0,), (4,), "float32"), 0, 100, digest, 8),
        BlobEntry(Box("b", (0,), (1,), "bfloat16"), 100, 50, digest, 4),
    )
    manifest = Manifest(0, 150, root_of(entries), entries)
    note = FileNote("__0_0.distcp", 150, "0" * 64)
    marker = Marker(5, 1, 1, 1, {"run": "r", "digest": "7"}, (note,))
    return [
        Target(
            "marker",
            [encode_marker(marker)],
            lambda data: decode_marker(data, "commit.json"),
            (Damaged,),
            mutating.as_json,
            _same,
        ),
        Target(
            "manifest",
            [encode_manifest(manifest)],
            lambda data: decode_manifest(data, "rank-0.json"),
            (Damaged,),
            mutating.as_json,
        ),
        Target(
            "manifests",
            [encode_manifests([encode_manifest(replace(manifest, rank=k)) for k in range(3)])],
            lambda data: [
                decode_manifest(text, "manifests.json")
                for text in decode_manifests(data, "manifests.json", 3)
            ],
            (Damaged,),
        ),
    ]


def _same(found: Any, good: Any) -> bool:
    return bool(found == good)


def checkpoint(folder: Path) -> Target:
    """A whole one, of which one file is another; the seeds are its files, each behind its name."""
    storage = open_storage(str(folder))
    checkpoint_writer.write_shard(
        storage,
        5,
        1,
        rank=0,
        items=[(Box("w", (0, 0), (8, 4), "float32"), torch.arange(32.0).reshape(8, 4))],
    )
    uri = checkpoint_writer.commit(storage, 5, 1, world_size=1, epoch=1, meta={"run": "r"})
    # what a rank tells whoever commits is no part of it
    files = sorted(path for path in Path(uri).iterdir() if path.name != manifest_name(0))
    good = {path.name: path.read_bytes() for path in files}

    def read(data: bytes) -> list[str]:
        name, _, content = data.partition(b"\0")
        path = Path(uri, name.decode())
        path.write_bytes(content)
        try:
            if content == good[path.name] or checkpoint_index.verify(uri):
                return []
            same = path.name == MARKER and decode_marker(content, MARKER) == decode_marker(
                good[MARKER], MARKER
            )
            # blanks between the words of the marker do not count
            return [] if same else ["a changed file was taken"]
        finally:
            path.write_bytes(good[path.name])

    def mutated(data: bytes, chance: random.Random, how: Mutate) -> bytes:
        name, _, content = data.partition(b"\0")
        return name + b"\0" + how(content, chance)

    class Files(Target):
        def made(self, chance: random.Random) -> tuple[bytes, bytes, bool]:
            seed = chance.choice(self.seeds)
            contents = list(good.values())
            hows: list[Mutate] = [
                mutating.accident,
                mutating.as_json,
                lambda data, c: mutating.forced(data, contents, c),
            ]
            return seed, mutated(seed, chance, chance.choice(hows)), True

    seeds = [name.encode() + b"\0" + content for name, content in good.items()]
    return Files("checkpoint", seeds, read, (), None, lambda found, _: not found)


def inbox() -> Target:
    orders = [
        {"stop": "enough"},
        {"drill": {"at_step": 40, "notice": "any-spot", "deadline_s": 30}},
        {"drill": {"kill": ["a", "b"]}},
    ]
    return Target(
        "inbox",
        [json.dumps(order).encode() for order in orders],
        read_order,
        (SpecError, ValueError, RecursionError),
        mutating.as_json,
    )


@contextmanager
def opened() -> Iterator[list[Target]]:
    """All of them, over a folder in memory where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if memory.is_dir() else None, prefix="elastic-fuzz-"
    ) as name:
        root = Path(name)
        yield [
            journal(),
            *stored_journal(),
            leases(),
            *markers(),
            checkpoint(root / "run"),
            inbox(),
            *people_targets.opened(root),
            *imported_targets.opened(root),
            *peer_targets.opened(),
        ]
