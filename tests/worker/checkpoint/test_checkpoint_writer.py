"""Checkpoints: they come back in any layout, DCP reads them, and one that is committed is whole."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.worker.forks import printed
from support.worker.saved import CUTS, MODEL, Cut, find_valid, part, save, state

from elastic.errors import InternalError, StateLost
from elastic.reshard.rank_boxes import boxes, state_specs
from elastic.storage import LocalStorage, Storage
from elastic.types import Box
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_format import Damaged, Fenced
from elastic.worker.checkpoint.checkpoint_index import find, open_checkpoint, remove, verify
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 48)
    return


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(old, new, marks=() if (j - i) % len(CUTS) == 1 else pytest.mark.whole)
        for i, old in enumerate(CUTS)
        for j, new in enumerate(CUTS)
    ],
    ids=lambda cut: str(cut[0]),
)
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
write_shard(storage, 1, 1, rank=1, items=[(Box("v", (0,), (3,), "float32"), torch.zeros(3))])  # imports
value = torch.randn(50_000, 1024)
before = peak()
write_shard(storage, 1, 1, rank=0, items=[(box, value)])
saved = peak() - before
uri = commit(storage, 1, 1, world_size=2, epoch=1, meta={})
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
    said = printed(PEAK, storage.uri)
    saved, straight, scratch, equal = said.split()
    assert equal == "True"
    assert int(saved) < 24 << 20 and int(straight) < 24 << 20, said
    assert int(scratch) < (64 + 24) << 20, said


# ---------------------------------------------------------------------------------------------- DCP


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


# ------------------------------------------------------------------------------------------- commit


def test_without_marker_there_is_no_checkpoint(storage: Storage) -> None:
    uri = save(storage, CUTS[1])
    storage.delete("checkpoints/step-00000001.g0001/commit.json")
    assert find(storage) == [] and find_valid(storage) == (None, [])
    with pytest.raises(StateLost, match=r"commit\.json: missing"):
        open_checkpoint(uri)


def test_find_is_newest_first(storage: Storage) -> None:
    for step, generation in ((5, 1), (20, 2), (10, 3), (20, 4), (123456789, 5)):
        save(storage, CUTS[0], step, generation=generation, epoch=generation)
    found = find(storage)
    assert [(f.step, f.generation, f.epoch) for f in found] == [
        (123456789, 5, 5),
        (20, 4, 4),
        (20, 2, 2),
        (10, 3, 3),
        (5, 1, 1),
    ]
    assert found[0].world_size == 1 and found[0].n_bytes == sum(
        p.stat().st_size
        for p in Path(found[0].uri).iterdir()
        if p.name not in ("commit.json", "rank-0.json")
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
        if n_puts < 3:
            with pytest.raises(OSError, match="killed"):
                commit(storage, 1, 1, world_size=1, epoch=1, meta={})
            assert find(storage) == []
        else:
            commit(storage, 1, 1, world_size=1, epoch=1, meta={})
        n_puts += 1
    assert n_puts == 4 and find_valid(storage)[1] == []


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


# ------------------------------------------------------------------------------------------ removal


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
