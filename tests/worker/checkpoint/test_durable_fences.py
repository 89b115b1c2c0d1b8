"""What keeps a run's checkpoints from a driver that was replaced, and from markers that somebody
has changed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from support.worker.plans import plan
from support.worker.saved import CUTS, MODEL, part, save, state

from elastic.ledger.lease import Sign
from elastic.reshard.rank_boxes import owned_boxes
from elastic.storage import Storage, open_storage
from elastic.types import CopyStored, Layout, ShardStored, WorkerId
from elastic.worker.checkpoint.checkpoint_format import FOLDER, MARKER, METADATA, Damaged, Fenced
from elastic.worker.checkpoint.checkpoint_index import (
    clean,
    find,
    open_checkpoint,
    remove_copy,
    verify,
)
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard
from elastic.worker.hosting.aggregate import CheckpointParts
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter

TAKEN = Sign(2, 0, "elsewhere", "boot", 4711, 1, 1e9, 1e9, 15.0)  # the driver of epoch 2 has begun
SIGN = json.dumps(asdict(TAKEN)).encode()


def test_a_marker_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    """It still is JSON, and says what a marker may say."""
    storage = open_storage(tmp_path / "run")
    first, second = save(storage, CUTS[1], step=1), save(storage, CUTS[1], step=2, epoch=3)
    marker = Path(second) / MARKER
    text = marker.read_text()
    assert '"epoch": 3' in text
    marker.write_text(text.replace('"epoch": 3', '"epoch": 9'))
    problems: list[str] = []
    assert [found.uri for found in find(storage, problems)] == [
        first
    ] and "its own digest does not fit" in problems[0]
    with pytest.raises(Damaged, match="its own digest does not fit"):
        open_checkpoint(second)


def test_a_driver_that_was_replaced_cleans_nothing_up(tmp_path: Path) -> None:
    """What looks like the rest of an interrupted save may be what its successor is writing."""
    storage = open_storage(tmp_path / "run")
    save(storage, CUTS[1], step=1, epoch=5)
    storage.put("checkpoints/step-00000002.g0003/__0_0.distcp", b"half")
    with pytest.raises(Fenced, match="epoch 5 has taken over"):
        clean(storage, 4)
    assert storage.exists("checkpoints/step-00000002.g0003/__0_0.distcp")
    assert clean(storage, 5) == [storage.uri_of("checkpoints/step-00000002.g0003")]


@pytest.fixture
def replaced(tmp_path: Path) -> Storage:
    """A run whose driver of epoch 1 has committed step 1 and written step 2; epoch 2 has just taken
    over."""
    storage = open_storage(tmp_path / "run")
    save(storage, CUTS[1], step=1, epoch=1)
    save(storage, CUTS[1], step=2, epoch=1)
    (tmp_path / "run/checkpoints/step-00000002.g0001/commit.json").unlink()
    storage.put(TAKEN.key, SIGN)
    return storage


def test_before_its_successor_has_committed_it_commits_nothing(replaced: Storage) -> None:
    with pytest.raises(
        Fenced, match="the driver of epoch 1 may not commit it; epoch 2 has taken over this run"
    ):
        commit(replaced, 2, 1, world_size=1, epoch=1, meta={})
    assert [found.step for found in find(replaced)] == [1]
    commit(replaced, 2, 1, world_size=1, epoch=2, meta={})
    assert [(found.step, found.epoch) for found in find(replaced)] == [(2, 2), (1, 1)]


def test_nor_where_it_is_replaced_while_it_looks_through_the_files(
    replaced: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced.delete(TAKEN.key)
    put = replaced.put

    def taken_over(key: str, data: bytes, if_absent: bool = False) -> bool:
        if key.endswith(METADATA):
            put(TAKEN.key, SIGN)
        return put(key, data, if_absent)

    monkeypatch.setattr(replaced, "put", taken_over)
    with pytest.raises(Fenced, match="epoch 2"):
        commit(replaced, 2, 1, world_size=1, epoch=1, meta={})
    assert [found.step for found in find(replaced)] == [1]


def test_nor_removes_or_cleans_it_anything(replaced: Storage) -> None:
    keys = replaced.list()
    with pytest.raises(Fenced, match="epoch 2"):
        remove_copy(replaced, replaced.uri_of("checkpoints/step-00000001.g0001"), 1)
    with pytest.raises(Fenced, match="epoch 2"):
        clean(replaced, 1)
    assert replaced.list() == keys
    assert clean(replaced, 2) == [replaced.uri_of("checkpoints/step-00000002.g0001")]


def test_a_worker_of_a_driver_that_was_replaced_writes_beside_its_successors_checkpoint(
    tmp_path: Path,
) -> None:
    """Both have a generation 3: storage was away when the first one ordered its own."""
    storage = open_storage(tmp_path / "run")
    storage.put(TAKEN.key, SIGN)
    mine = save(storage, CUTS[1], step=2, generation=3, epoch=2, ordered=2)
    before = {key: storage.get(key) for key in storage.list()}
    write(storage, 2, 3, ordered=1)
    assert {key: storage.get(key) for key in before} == before
    assert verify(mine) == [] and mine.endswith("step-00000002.g0003.e0002")
    with pytest.raises(Fenced, match="epoch 2"):
        commit(storage, 2, 3, world_size=4, epoch=1, meta={}, ordered=1)
    assert [found.uri for found in find(storage)] == [mine]


def test_what_workers_of_older_drivers_write_goes_with_the_next_commit_whatever_its_step(
    tmp_path: Path,
) -> None:
    storage = open_storage(tmp_path / "run")
    kept = save(storage, CUTS[1], step=7, generation=1, epoch=1, ordered=1)
    storage.put(TAKEN.key, SIGN)
    names = [f"{FOLDER}/step-{name}" for name in (
        "00000009.g0003.e0001", "00000008.g0002", "00000009.g0004.e0002", "00000001.g0004.e0002",
    )]  # fmt: skip
    for name in names:
        storage.put(f"{name}/__0_0.distcp", b"half")
    copies = CheckpointCommitter(storage, 2, {})
    write(storage, 2, 4, ordered=2)
    ranks = [WorkerId("a", rank) for rank in range(4)]
    stored = {rank: ShardStored(4, 2, rank, 8, ordered=2) for rank in range(4)}
    copies.commit(CheckpointParts(plan(4, Layout(dp_shard=4), ranks, 8), 2, stored))
    copies.close()
    (done,) = copies.news()
    assert isinstance(done, CopyStored)
    there = {key.rpartition("/")[0] for key in storage.list(f"{FOLDER}/")}
    assert there == {names[2], f"{FOLDER}/step-00000002.g0004.e0002", kept.split("run/")[1]}


def write(storage: Storage, step: int, generation: int, *, ordered: int) -> None:
    """All parts, not what is the state of that step."""
    for rank in range(4):
        items = [(box, part(state(99), box)) for box in owned_boxes(MODEL, *CUTS[1], rank)]
        write_shard(storage, step, generation, rank=rank, items=items, ordered=ordered)


def test_a_file_that_only_has_the_name_of_a_newer_driver_keeps_nobody_from_committing(
    replaced: Storage,
) -> None:
    replaced.put(TAKEN.key, b"{}")
    replaced.put("lease/99999999-00000000.json", SIGN)
    commit(replaced, 2, 1, world_size=1, epoch=1, meta={})
    assert [found.step for found in find(replaced)] == [2, 1]
