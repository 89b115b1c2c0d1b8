"""Checkpoints: they come back in any layout, DCP reads them, and whatever is wrong with one has a
name."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.worker.saved import CUTS, MODEL, Cut, part, save, state
from torch import Tensor

from elastic.errors import InternalError, SpecError, StateLost
from elastic.reshard.rank_boxes import boxes, state_specs
from elastic.storage import LocalStorage, Storage, open_storage
from elastic.types import Box, TensorSpec
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.checkpoint.blob import decode_blob, digest_of, find_data
from elastic.worker.checkpoint.checkpoint_format import Damaged, Fenced
from elastic.worker.checkpoint.checkpoint_index import (
    find,
    find_valid,
    open_checkpoint,
    remove,
    verify,
)
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 48)
    return


# ------------------------------------------------------------------------------------------------
# round trips


@pytest.mark.slow
@pytest.mark.parametrize("old", CUTS, ids=lambda cut: str(cut[0]))
@pytest.mark.parametrize("new", CUTS, ids=lambda cut: str(cut[0]))
def test_state_comes_back_in_any_layout(storage: Storage, old: Cut, new: Cut) -> None:
    checkpoint = open_checkpoint(save(storage, old, step=40))
    assert checkpoint.step == 40 and checkpoint.meta == {
        "layers": list(old[1]),
        "layout": str(old[0]),
    }
    checkpoint.check(state_specs(MODEL))
    tensors = state(40)
    assert checkpoint.tensors == {
        s.fqn: (s.shape, s.dtype) for s in state_specs(MODEL) if 0 not in s.shape
    }
    for rank in range(new[0].world_size):
        for box in boxes(MODEL, *new, rank):
            got = checkpoint.read(box)
            assert got.dtype == tensors[box.fqn].dtype and torch.equal(got, part(tensors, box)), box
    assert checkpoint.verify() == []


@pytest.mark.usefixtures("small_chunks")
def test_large_boxes_are_cut_into_blobs(storage: Storage) -> None:
    checkpoint = open_checkpoint(save(storage, CUTS[0]))
    manifest = json.loads(storage.get("checkpoints/step-00000001.g0001/rank-0.json"))
    parts = [
        (row["offsets"], row["sizes"])
        for row in manifest["boxes"]
        if row["fqn"] == "model.layers.0.up"
    ]
    assert parts == [([0, 0], [3, 4]), ([3, 0], [3, 4]), ([6, 0], [1, 4])]
    for box in boxes(MODEL, *CUTS[1], 0):
        assert torch.equal(checkpoint.read(box), part(state(), box))


def test_empty_boxes_and_ranks_without_boxes(storage: Storage) -> None:
    whole = Box("w", (0, 0), (2, 3), "float32")
    value = torch.arange(6.0).reshape(2, 3)
    write_shard(
        storage,
        1,
        1,
        rank=0,
        items=[(whole, value), (Box("w", (2, 0), (0, 3), "float32"), torch.empty(0, 3))],
    )
    assert write_shard(storage, 1, 1, rank=1, items=[]) == 0
    checkpoint = open_checkpoint(commit(storage, 1, 1, world_size=2, epoch=1, meta={}))
    assert torch.equal(checkpoint.read(whole), value)
    assert checkpoint.read(Box("w", (2, 0), (0, 3), "float32")).shape == (0, 3)
    assert checkpoint.verify() == []


def test_views_are_written_without_the_tensor_that_they_look_into(storage: Storage) -> None:
    big = torch.arange(1_000_000.0).reshape(1000, 1000)
    row, column = big[10:11], big[:, 7:8]
    n_bytes = write_shard(
        storage, 1, 1, rank=0, items=[(Box("a", (0, 0), (1, 1000), "float32"), row)]
    )
    n_bytes += write_shard(
        storage,
        1,
        1,
        rank=1,
        items=[(Box("b", (0, 0), (1000, 1), "float32"), torch.nn.Parameter(column))],
    )
    assert n_bytes < 20_000
    checkpoint = open_checkpoint(commit(storage, 1, 1, world_size=2, epoch=1, meta={}))
    assert torch.equal(checkpoint.read(Box("b", (0, 0), (1000, 1), "float32")), column)


def test_a_tensor_that_is_not_its_box_is_refused(storage: Storage) -> None:
    for tensor in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(InternalError, match=r"w: box \(2,\) float32 holds"):
            write_shard(storage, 1, 1, rank=0, items=[(Box("w", (0,), (2,), "float32"), tensor)])
    assert storage.list() == []


def test_torch_save_keeps_its_setting(storage: Storage) -> None:
    save(storage, CUTS[0])
    assert torch.serialization.get_crc32_options()


# ------------------------------------------------------------------------------------------------
# DCP


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: str(cut[0]))
def test_dcp_loads_it(storage: Storage, cut: Cut) -> None:
    """torch.distributed.checkpoint reads the files as its own; fails when the private name of
    durable_dcp.py changes."""
    uri = save(storage, cut)
    tensors = {fqn: value for fqn, value in state().items() if value.numel()}
    loaded = {fqn: torch.zeros_like(value) for fqn, value in tensors.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(uri), no_dist=True)
    for fqn, value in tensors.items():
        assert torch.equal(loaded[fqn], value), fqn


def test_dcp_turns_it_into_one_torch_save_file(storage: Storage, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(save(storage, CUTS[2]), tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(loaded[fqn], value) for fqn, value in state().items() if value.numel())


# ------------------------------------------------------------------------------------------------
# commit


def test_without_marker_there_is_no_checkpoint(storage: Storage) -> None:
    uri = save(storage, CUTS[1])
    storage.delete("checkpoints/step-00000001.g0001/commit.json")
    assert find(storage) == [] and find_valid(storage) == (None, [])
    with pytest.raises(StateLost, match=r"commit\.json: missing"):
        open_checkpoint(uri)


def test_find_is_newest_first(storage: Storage) -> None:
    for step, generation in ((5, 1), (20, 2), (10, 3), (20, 4), (123456789, 5)):
        save(storage, CUTS[0], step, generation, epoch=generation)
    found = find(storage)
    assert [(f.step, f.generation, f.epoch) for f in found] == [
        (123456789, 5, 5),
        (20, 4, 4),
        (20, 2, 2),
        (10, 3, 3),
        (5, 1, 1),
    ]
    assert found[0].world_size == 1 and found[0].n_bytes == sum(
        p.stat().st_size for p in Path(found[0].uri).iterdir() if p.name != "commit.json"
    )


def test_commit_needs_every_rank(storage: Storage) -> None:
    write_shard(storage, 1, 1, rank=0, items=[(Box("w", (0,), (2,), "float32"), torch.zeros(2))])
    with pytest.raises(Damaged, match=r"rank-1\.json: missing"):
        commit(storage, 1, 1, world_size=2, epoch=1, meta={})
    storage.path("checkpoints/step-00000001.g0001/__0_0.distcp").write_bytes(b"short")
    with pytest.raises(Damaged, match=r"__0_0\.distcp: \d+ bytes were written, 5 are there"):
        commit(storage, 1, 1, world_size=1, epoch=1, meta={})
    assert find(storage) == []


@pytest.mark.parametrize(
    "second",
    [
        Box("w", (3, 0), (1, 2), "float32"),  # a gap
        Box("w", (1, 0), (2, 2), "float32"),  # an overlap
        Box("w", (1, 1), (2, 1), "float32"),  # an overlap and a gap of the same size
        Box("w", (2, 0), (1, 2), "float64"),
        Box("w", (2,), (1,), "float32"),
    ],
)
def test_commit_refuses_gaps_and_overlaps(storage: Storage, second: Box) -> None:
    first = Box("w", (0, 0), (2, 2), "float32")
    for rank, box in enumerate((first, second)):
        write_shard(
            storage,
            1,
            1,
            rank=rank,
            items=[(box, torch.zeros(box.sizes, dtype=getattr(torch, box.dtype)))],
        )
    with pytest.raises(Damaged, match="the boxes of w hold"):
        commit(storage, 1, 1, world_size=2, epoch=1, meta={})


def test_the_marker_is_written_last(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that dies at any write of a commit leaves no checkpoint, and the next one can still
    commit."""
    write_shard(storage, 1, 1, rank=0, items=[(Box("w", (0,), (2,), "float32"), torch.ones(2))])
    real, n_puts = LocalStorage.put, 0
    while not find(storage):
        left = n_puts

        def dying(self: LocalStorage, key: str, data: bytes, if_absent: bool = False) -> bool:
            nonlocal left
            if left == 0:
                raise OSError("killed")
            left -= 1
            return real(self, key, data, if_absent)

        monkeypatch.setattr(LocalStorage, "put", dying)
        if n_puts < 2:
            with pytest.raises(OSError, match="killed"):
                commit(storage, 1, 1, world_size=1, epoch=1, meta={})
            assert find(storage) == []
        else:
            commit(storage, 1, 1, world_size=1, epoch=1, meta={})
        n_puts += 1
    assert n_puts == 3 and find_valid(storage)[1] == []


def test_equal_boxes_of_replicas_are_allowed(storage: Storage) -> None:
    box = Box("w", (0,), (2,), "float32")
    for rank in range(2):
        write_shard(storage, 1, 1, rank=rank, items=[(box, torch.ones(2))])
    assert torch.equal(
        open_checkpoint(commit(storage, 1, 1, world_size=2, epoch=1, meta={})).read(box),
        torch.ones(2),
    )


def test_an_older_driver_is_fenced_off(storage: Storage) -> None:
    save(storage, CUTS[0], step=10, epoch=3)
    with pytest.raises(Fenced, match="epoch 2 may not commit .* epoch 3 has taken over"):
        save(storage, CUTS[0], step=20, generation=2, epoch=2)
    assert [found.step for found in find(storage)] == [10]
    save(storage, CUTS[0], step=20, generation=2, epoch=3)
    save(storage, CUTS[0], step=30, generation=3, epoch=4)


def test_committing_and_writing_again_changes_nothing(storage: Storage) -> None:
    uri = save(storage, CUTS[1])
    before = {key: storage.get(key) for key in storage.list()}
    assert save(storage, CUTS[1]) == uri
    assert {key: storage.get(key) for key in storage.list()} == before
    with pytest.raises(Damaged, match="does not describe the files"):
        commit(storage, 1, 1, world_size=3, epoch=1, meta={})


def test_racing_committers_leave_one_whole_checkpoint(storage: Storage) -> None:
    for rank in range(2):
        box = Box("w", (rank,), (1,), "float32")
        write_shard(storage, 1, 1, rank=rank, items=[(box, torch.full((1,), float(rank)))])
    start, uris = threading.Barrier(8), []

    def race(i: int) -> None:
        start.wait()
        uris.append(commit(storage, 1, 1, world_size=2, epoch=1, meta={"committer": i}))

    racers = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(uris) == 8 and len(set(uris)) == 1 and verify(uris[0]) == []
    assert open_checkpoint(uris[0]).meta["committer"] in range(8)


def test_who_finds_no_marker_and_comes_second_leaves_the_one_that_came_meanwhile(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, looks = save(storage, CUTS[1]), [lambda *_: None]
    real = checkpoint_index.read_marker
    monkeypatch.setattr(
        checkpoint_writer, "read_marker", lambda *where: (looks.pop() if looks else real)(*where)
    )
    assert (
        commit(storage, 1, 1, world_size=CUTS[1][0].world_size, epoch=1, meta={"who": "the second"})
        == uri
    )
    assert "who" not in open_checkpoint(uri).meta


# ------------------------------------------------------------------------------------------------
# damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE: list[Callable[[Path], None]] = [flip, truncate, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE, ids=["altered", "truncated", "missing"])
@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "__3_0.distcp", "rank-2.json", ".metadata", "commit.json"]
)
def test_damage_is_named_and_the_one_before_is_taken(
    storage: Storage, name: str, damage: Callable[[Path], None]
) -> None:
    good = save(storage, CUTS[1], step=10)
    bad = save(storage, CUTS[1], step=20)
    damage(Path(bad) / name)
    found, problems = find_valid(storage)
    assert found is not None and (found.step, found.uri) == (10, good)
    if (name, damage) == ("commit.json", Path.unlink):
        assert problems == []  # then it never was one
    else:
        assert len(problems) == 1 and f"{bad}/{name}" in problems[0]
        assert verify(bad) == problems
    assert verify(good) == []


def test_an_altered_box_is_noticed_while_it_is_read(storage: Storage) -> None:
    uri = save(storage, CUTS[1])
    flip(Path(uri) / "__0_0.distcp")
    checkpoint, bad = open_checkpoint(uri), []
    for box in boxes(MODEL, *CUTS[1], 0):
        try:
            checkpoint.read(box)
        except Damaged as error:
            bad.append(str(error))
    assert len(bad) == 1 and "__0_0.distcp: the blob of" in bad[0] and "altered" in bad[0]
    for box in boxes(MODEL, *CUTS[1], 1):  # in files of others
        if 0 not in box.offsets:
            checkpoint.read(box)


def test_only_the_blobs_that_are_needed_are_read(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(save(storage, CUTS[1]))
    read: list[str] = []
    real = LocalStorage._fill

    def noted(self: LocalStorage, key: str, *how: Any) -> int:
        read.append(key)
        return real(self, key, *how)

    monkeypatch.setattr(LocalStorage, "_fill", noted)
    # rows 1 of rank 0, 2 of rank 1
    checkpoint.read(Box("model.layers.1.up", (1, 0), (2, 4), "float32"))
    assert read == ["__0_0.distcp", "__1_0.distcp"]


def as_version_1(uri: Path) -> None:
    """Rewrites the JSON of a checkpoint as version 1 had it."""
    sums = {}
    for path in sorted(uri.glob("rank-*.json")):
        body = json.loads(path.read_text())
        shard = (uri / f"__{body['rank']}_0.distcp").read_bytes()
        for row in body["boxes"]:
            row["crc32"] = zlib.crc32(shard[row["offset"] : row["offset"] + row["length"]])
            del row["digest"], row["data"]
        sums[f"__{body['rank']}_0.distcp"] = body["sha256"] = sha256(shard).hexdigest()
        path.write_text(json.dumps(body | {"version": 1}))
        sums[path.name] = sha256(path.read_bytes()).hexdigest()

    def change(body: dict[str, Any]) -> None:
        body["version"] = 1
        for note in body["files"]:
            path = uri / note["name"]
            note.update(n_bytes=path.stat().st_size, sha256=sums.get(note["name"], note["sha256"]))

    rewrite(uri / "commit.json", change)


def test_version_1_is_read(storage: Storage) -> None:
    uri = save(storage, CUTS[1], step=7)
    as_version_1(Path(uri))
    checkpoint = open_checkpoint(uri)
    assert checkpoint.verify() == []
    for box in boxes(MODEL, *CUTS[2], 3):
        assert torch.equal(checkpoint.read(box), part(state(7), box))
    flip(Path(uri) / "__1_0.distcp")
    assert len(verify(uri)) == 1 and "__1_0.distcp: altered" in verify(uri)[0]


def write_large(storage: Storage) -> tuple[str, Tensor]:
    """One tensor of 12 MB by two ranks, in blobs that are read straight into their place."""
    value = torch.randn(3000, 1000)
    for rank in range(2):
        rows = value[1500 * rank : 1500 * (rank + 1)]
        write_shard(
            storage,
            1,
            1,
            rank=rank,
            items=[(Box("w", (1500 * rank, 0), (1500, 1000), "float32"), rows)],
        )
    return commit(storage, 1, 1, world_size=2, epoch=1, meta={}), value


def test_large_blobs_are_read_straight_into_their_place(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 1 << 20)
    uri, value = write_large(storage)
    checkpoint = open_checkpoint(uri)
    assert torch.equal(checkpoint.read(Box("w", (0, 0), (3000, 1000), "float32")), value)
    assert torch.equal(
        checkpoint.read(Box("w", (700, 0), (1700, 1000), "float32")), value[700:2400]
    )
    assert torch.equal(
        checkpoint.read(Box("w", (100, 250), (2800, 500), "float32")), value[100:2900, 250:750]
    )


@pytest.mark.parametrize("at", ["head", "memory", "end"])
def test_every_part_of_a_large_blob_is_checked(storage: Storage, at: str) -> None:
    uri, _ = write_large(storage)
    row = json.loads((Path(uri) / "rank-1.json").read_text())["boxes"][0]
    place = {"head": 40, "memory": row["data"] + 999, "end": row["length"] - 3}[at]
    path = Path(uri) / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[row["offset"] + place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"__1_0\.distcp: the blob of w .* altered"):
        open_checkpoint(uri).read(Box("w", (0, 0), (3000, 1000), "float32"))


PEAK = """
import resource, sys, torch
from elastic.storage import open_storage
from elastic.types import Box
from elastic.worker.checkpoint.checkpoint_index import open_checkpoint
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard
torch.set_num_threads(1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

box = Box("w", (0, 0), (50_000, 1024), "float32")
storage = open_storage(sys.argv[1])
write_shard(storage, 1, 1, 1, [(Box("v", (0,), (3,), "float32"), torch.zeros(3))])  # imports
value = torch.randn(50_000, 1024)
before = peak()
write_shard(storage, 1, 1, 0, [(box, value)])
saved = peak() - before
uri = commit(storage, 1, 1, 2, 1, {})
checkpoint = open_checkpoint(uri)
before = peak()
checkpoint.fill([(box, value)])
straight = peak() - before
half = torch.zeros(50_000, 512)
before = peak()
checkpoint.fill([(Box("w", (0, 512), (50_000, 512), "float32"), half)])
print(saved, straight, peak() - before, bool(torch.equal(half, value[:, 512:])))
"""


@pytest.mark.slow
def test_save_and_load_take_one_chunk_of_memory_at_most(storage: Storage) -> None:
    """205 MB: saved and loaded from and to where they lie, else through 64 MiB of scratch memory
    for all threads."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, storage.uri], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    saved, straight, scratch, equal = done.stdout.split()
    assert equal == "True"
    assert int(saved) < 24 << 20 and int(straight) < 24 << 20, done.stdout
    assert int(scratch) < (64 + 24) << 20, done.stdout


BLOBS = [
    (torch.arange(6.0).reshape(2, 3), True),
    (torch.tensor(3), True),
    (torch.zeros(3, dtype=torch.bool), True),
    (torch.ones(4, 5, dtype=torch.bfloat16), True),
    (torch.arange(100.0)[3:5], False),  # a view: its record is the whole storage
]


@pytest.mark.parametrize(("tensor", "as_it_lies"), BLOBS)
def test_blobs_are_read_where_they_lie_else_by_torch(tensor: Tensor, as_it_lies: bool) -> None:
    """Fails when torch.save lays its files out differently: reading is then right, but slower."""
    box = Box(
        "w", (0,) * tensor.ndim, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    )
    file = io.BytesIO()
    torch.save(tensor, file)
    data = memoryview(bytearray(file.getvalue()))
    assert (find_data(data, tensor.nbytes) is not None) == as_it_lies
    assert torch.equal(decode_blob(data, box), tensor)
    with pytest.raises(ValueError):
        decode_blob(data, Box("w", (0, 0), (7, 3), "float32"))
    for bad in (
        memoryview(bytearray(data[:-30])),
        memoryview(bytearray(50)),
        memoryview(bytearray(0)),
    ):
        with pytest.raises(ValueError):
            decode_blob(bad, box)


def test_nothing_valid(storage: Storage) -> None:
    truncate(Path(save(storage, CUTS[0])) / "__0_0.distcp")
    found, problems = find_valid(storage, deep=False)
    assert found is None and len(problems) == 1
    assert find_valid(open_storage(storage.uri_of("nowhere"))) == (None, [])


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alters a marker and mends its digest: the work of somebody who knows the format."""
    body = json.loads(path.read_text())
    change(body)
    body.pop("sha256")
    body["sha256"] = sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["files"].append(
            {"name": "../../../etc/passwd", "n_bytes": 1, "sha256": ""}
        ),
        lambda body: body.update(step=99),
        lambda body: body.update(version=3),
        lambda body: body.update(world_size=-1),
        lambda body: body.update(files={}),
    ],
)
def test_a_marker_that_makes_no_sense_is_refused(
    storage: Storage, change: Callable[[dict[str, Any]], None]
) -> None:
    uri = save(storage, CUTS[0])
    rewrite(Path(uri) / "commit.json", change)
    found, problems = find_valid(storage)
    assert found is None and len(problems) == 1 and "commit.json" in problems[0]


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_nothing_of_a_checkpoint_is_executed(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle in .metadata and one in place of a blob, with all digests mended."""
    monkeypatch.chdir(tmp_path)
    uri = Path(save(storage, CUTS[0]))
    (uri / ".metadata").write_bytes(pickle.dumps(Boom()))
    manifest = json.loads((uri / "rank-0.json").read_text())
    row = manifest["boxes"][0]
    torch.save(Boom(), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    (uri / "__0_0.distcp").write_bytes(evil)
    n_bytes = 4 * prod(row["sizes"])
    digest = digest_of(memoryview(evil))
    row.update(offset=0, length=len(evil), digest=digest, data=len(evil) - n_bytes)
    manifest.update(boxes=[row], n_bytes=len(evil), sha256=sha256(digest.encode()).hexdigest())
    (uri / "rank-0.json").write_text(json.dumps(manifest))

    def mend(body: dict[str, Any]) -> None:
        for note in body["files"]:
            data = (uri / note["name"]).read_bytes()
            shard = note["name"].endswith(".distcp")
            note.update(
                n_bytes=len(data), sha256=manifest["sha256"] if shard else sha256(data).hexdigest()
            )

    rewrite(uri / "commit.json", mend)
    assert find_valid(storage)[0] is not None
    checkpoint = open_checkpoint(str(uri))
    assert checkpoint.verify() == []
    with pytest.raises(Damaged, match="is no tensor"):
        checkpoint.read(Box(row["fqn"], tuple(row["offsets"]), tuple(row["sizes"]), row["dtype"]))
    assert not (tmp_path / "executed").exists()
    pickle.loads((uri / ".metadata").read_bytes())
    assert (tmp_path / "executed").exists()  # it would have been


# ------------------------------------------------------------------------------------------------
# the wrong model


def test_another_model_is_named_with_tensor_and_shapes(storage: Storage) -> None:
    checkpoint = open_checkpoint(save(storage, CUTS[1]))
    specs = [spec for spec in state_specs(MODEL) if 0 not in spec.shape]
    for change, says in (
        (TensorSpec("model.new", (2,), "float32"), r"no tensor model\.new .*\[2\] float32"),
        (
            TensorSpec("model.norm", (5,), "float32"),
            r"model\.norm is \[2\] float32 there, the model wants \[5\] float32",
        ),
        (
            TensorSpec("model.norm", (2,), "bfloat16"),
            r"model\.norm is \[2\] float32 there, the model wants \[2\] bfloat16",
        ),
    ):
        with pytest.raises(SpecError, match=says):
            checkpoint.check([*(spec for spec in specs if spec.fqn != change.fqn), change])
    with pytest.raises(SpecError, match=r"the model has no tensor model\.embed \[9, 4\]"):
        checkpoint.check(specs[1:])


@pytest.mark.parametrize(
    ("box", "says"),
    [
        (Box("model.new", (0,), (2,), "float32"), r"no tensor model\.new"),
        (
            Box("model.norm", (1,), (2,), "float32"),
            r"model\.norm is \[2\] float32 there, wanted .* from \[1\]",
        ),
        (Box("model.norm", (0, 0), (1, 1), "float32"), "other model"),
        (Box("model.norm", (0,), (2,), "float16"), "float16"),
    ],
)
def test_a_box_of_another_model_is_refused(storage: Storage, box: Box, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        open_checkpoint(save(storage, CUTS[1])).read(box)


def test_remove(storage: Storage) -> None:
    first, second = save(storage, CUTS[1], step=1), save(storage, CUTS[1], step=2)
    remove(second)
    remove(second)
    assert [found.uri for found in find(storage)] == [first] and not Path(second).exists()


def test_a_removal_that_is_interrupted_leaves_no_checkpoint(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save(storage, CUTS[1], step=1), save(storage, CUTS[1], step=2)

    def interrupted(self: LocalStorage, key: str = "") -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "delete_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove(second)
    assert [found.uri for found in find(storage)] == [first] and Path(second).exists()
